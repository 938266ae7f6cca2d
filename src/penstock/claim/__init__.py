"""Taking work: claims, bodies, heartbeats, reclaims."""

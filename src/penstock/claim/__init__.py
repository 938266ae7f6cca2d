"""Claims of work: leases, bodies, gates, liveness and reclaims."""

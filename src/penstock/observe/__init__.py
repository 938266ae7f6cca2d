"""What a running system says of itself: logs without secrets or anybody's data."""

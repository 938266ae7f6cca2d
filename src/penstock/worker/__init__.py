"""A worker process: claim loop, heartbeat, inventory of leases and bodies, maintenance."""

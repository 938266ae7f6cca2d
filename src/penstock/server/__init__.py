"""A server process: listener, session workers, callers who wait, background duties."""

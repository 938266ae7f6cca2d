"""PostgreSQL without an installation: a server under a data directory, kept by a small process of its own."""

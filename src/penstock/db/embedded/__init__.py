"""Embedded PostgreSQL: a server under a data directory, run by a small keeper process."""

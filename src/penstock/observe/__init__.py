"""Logs of a running system, without secrets and without users' data."""

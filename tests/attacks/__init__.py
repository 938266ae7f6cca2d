"""Attacks on a server beside a tenant that behaves: `make attacks`, see docs/testing.md."""

"""Limits of calls to providers, over all processes."""

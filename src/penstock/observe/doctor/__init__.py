"""Examination of an installation: its configuration, machine, database, providers and work."""

"""Deletion: out of sight and out of reach at once, out of the tables in small steps, with a report."""

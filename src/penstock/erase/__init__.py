"""Deletion: an object is gone for callers and workers at once, and leaves the tables in small steps, with a report."""

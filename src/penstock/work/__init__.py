"""Batches: create, status, pause, resume, cancel, finish."""

"""Batches: request, create, status, pause, resume, cancel, finish, retry."""

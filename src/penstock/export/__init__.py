"""Results out: outcomes, streamed in input order."""

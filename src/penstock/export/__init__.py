"""Export: outcomes as result lines, streamed in input order or as they are decided."""

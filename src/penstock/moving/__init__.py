"""Moving in from a database of the eager layout (one row per request), and back (ADR 19)."""

"""How much, how fast: pure functions of what was observed."""

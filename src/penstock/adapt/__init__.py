"""Controllers of how much and how fast, as pure functions of observations."""

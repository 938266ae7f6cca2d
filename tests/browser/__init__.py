"""The console in a real browser. A package, so that its server and browser are shared by its tests and then end."""

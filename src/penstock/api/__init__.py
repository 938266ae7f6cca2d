"""HTTP API: one module per family of routes, `endpoint` for what a handler sees, `app` for the whole application."""

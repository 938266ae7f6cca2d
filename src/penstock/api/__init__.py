"""The HTTP server's rooms: one module per family of routes, `endpoint` for what they see, `app` for the whole."""

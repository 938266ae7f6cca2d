"""The console: pages for browsers, served as they are in git."""

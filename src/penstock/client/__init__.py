"""The API as commands and the library call it: over HTTP, or the application in this process on its database."""

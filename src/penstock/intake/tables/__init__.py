"""Tables and images: a file in, rows out, one at a time. Nothing here knows of the database."""

"""Adapters: places where files arrive by themselves, in a folder, in an S3-compatible store or on an FTP server."""

"""The command line: options in, messages and exit codes out."""

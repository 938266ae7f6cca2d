"""Sheets of jobs: rows in, the bytes of a CSV, XLSX or JSONL file out, streamed and in constant memory."""

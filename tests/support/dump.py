"""A database as its backup holds it: what is not in here is nowhere in its tables."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psycopg

from penstock.db.embedded import postgres

_DEBIAN_15 = Path("/usr/lib/postgresql/15/bin")


def dumped(conninfo: str) -> bytes:
    """Every row of every table, as `pg_dump` of the server's own version writes it."""
    with psycopg.connect(conninfo) as connection:
        version = connection.info.server_version // 10_000
    program = (postgres.bundled_bin_dir() if version > 15 else _DEBIAN_15) / "pg_dump"
    done = subprocess.run(
        [program, "--data-only", "--no-owner", "--dbname", conninfo], check=True, capture_output=True, timeout=120
    )
    return done.stdout

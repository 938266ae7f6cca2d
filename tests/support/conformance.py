"""The server that official clients are tried on: two users, a mock upstream, webhooks to this machine allowed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import psycopg
from psycopg.conninfo import make_conninfo

from penstock.db.migrate import migrate
from tests.support.mock_process import start_mock_process
from tests.support.server import served
from tests.support.tenants import make_key


@dataclass(frozen=True)
class OfficialGround:
    url: str
    key: str
    other_key: str


@contextmanager
def official_ground(directory: Path, server: str) -> Iterator[OfficialGround]:
    name = f"conformance_{uuid4().hex}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    database = make_conninfo(server, dbname=name)
    migrate(database)
    secrets = [make_key(database, owner) for owner in ("alice", "bob")]
    with (
        # Answers take long enough for a batch to be seen, cancelled and followed while it runs.
        start_mock_process("--latency", "20ms") as mock,
        served(
            directory,
            *("--base-url", mock.base_url),
            database=database,
            env={"PENSTOCK_WEBHOOK_ALLOW": "127.0.0.1"},
        ) as running,
    ):
        yield OfficialGround(running.url, *secrets)

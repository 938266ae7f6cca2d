"""Runs of `penstock run` as batches: taken up by a later command, or continued by one over a file that has grown."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID

from penstock.db import sql
from penstock.db.pool import Connection, Now
from penstock.model import BatchState

_SQL = sql.load("penstock.batches", "runs.sql")

_CANDIDATES = 20

ASKED, INPUT, INPUT_BYTES, CONTINUES = "asked", "input", "input_bytes", "continues"
"""Metadata of a run: digest of what is asked, path and size of its input, and the batch whose results come before its
own."""
ROWS, ROWS_DIGEST = "rows", "rows_digest"
"""Metadata of a run over a table: how many rows it has results of, those of the run that it continues included, and
their digest."""


@dataclass(frozen=True, slots=True)
class RunAlike:
    """Run that asked the same of another content."""

    id: UUID
    state: BatchState
    key: str
    metadata: dict[str, str]

    @property
    def input_bytes(self) -> int:
        return int(self.metadata.get(INPUT_BYTES, "0"))

    @property
    def rows(self) -> int:
        """Rows of a table that it has results of; 0 of requests."""
        return int(self.metadata.get(ROWS, "0"))


@dataclass(frozen=True, slots=True)
class Beginning:
    """Beginning of an input that a run was over: of a file that has grown since, or of a table's rows."""

    run: RunAlike
    lines: int
    """Lines, or rows, of the beginning."""
    is_all: bool = False
    """Whether nothing comes after it: other bytes, and the same rows."""


def run_pool(batch_id: UUID) -> str:
    """Pool of a run's workers: its own, so that no server takes a part in it."""
    return f"run:{batch_id.hex}"


def is_run_pool(pool: str) -> bool:
    return pool.startswith("run:")


async def take_up_run(
    connection: Connection, batch_id: UUID, *, key: str | None, target: str, window: timedelta | None, now: Now = None
) -> None:
    """Let the command of now go on with a batch: with its target, under its key if that is named, and in its time."""
    window_s = None if window is None else window.total_seconds()
    parameters = {"id": batch_id, "key": key, "target": target, "window_s": window_s, "now": now}
    await connection.execute(_SQL["take_up_run"], parameters)


async def list_runs_alike(connection: Connection, owner: str, asked: str) -> list[RunAlike]:
    """List the newest runs that asked the same, whatever their input."""
    parameters = {"owner": owner, "alike": json.dumps({ASKED: asked}), "limit": _CANDIDATES}
    cursor = await connection.execute(_SQL["list_runs_alike"], parameters)
    return [RunAlike(row[0], BatchState(row[1]), row[2], row[3]) for row in await cursor.fetchall()]

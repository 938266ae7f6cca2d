"""Watches the batches while they run: each one's upload when it appears, and its counts again and again."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import asdict
from types import TracebackType
from typing import Self
from uuid import UUID

import psycopg

from penstock.batches.read import read_status
from penstock.db.pool import Connection
from tests.support.history import HistoryWriter

_EVERY_S = 0.2
_DEADLINE_S = 30.0


class Watcher:
    """Reads past the proxy. A read that fails has no end in the history: nobody knows what it would have said."""

    def __init__(self, database: str, history: HistoryWriter, lines: int) -> None:
        self.batches: list[UUID] = []
        """In the order in which they appeared."""
        self.settled = 0
        self._database = database
        self._history = history
        self._lines = lines
        self._over: set[UUID] = set()
        self._halt = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="watcher", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._halt.set()
        self._thread.join(_DEADLINE_S)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    async def _run(self) -> None:
        while not self._halt.is_set():
            try:
                async with await psycopg.AsyncConnection.connect(self._database, autocommit=True) as connection:
                    while not self._halt.is_set():
                        await self._look(connection)
                        await asyncio.sleep(_EVERY_S)
            except psycopg.Error:
                await asyncio.sleep(_EVERY_S)

    async def _look(self, connection: Connection) -> None:
        cursor = await connection.execute("SELECT id FROM penstock.batches ORDER BY created_at")
        for (batch,) in await cursor.fetchall():
            if batch not in self.batches:
                self._history.record("invoke", "upload", batch.hex, {"lines": self._lines})
                self._history.record("ok", "upload", batch.hex)
                self.batches.append(batch)
            if batch not in self._over:
                await self._read(connection, batch)

    async def _read(self, connection: Connection, batch: UUID) -> None:
        self._history.record("invoke", "status", batch.hex)
        status = await read_status(connection, batch)
        counts = asdict(status.counts)
        del counts["retried"]
        self._history.record("ok", "status", batch.hex, counts)
        self.settled = max(self.settled, status.counts.settled)
        if status.state.terminal:
            self._over.add(batch)

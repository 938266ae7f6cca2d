"""The coalescing writer: a process's results go through one buffer, one consumer, one statement per flush."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import monotonic
from uuid import UUID

import psycopg

from penstock.config import SettleLimits
from penstock.db.pool import Pool
from penstock.model import Again, Item, Lease, Outcome, OutcomeState
from penstock.settle.write import Changes, Settled, settle

_log = logging.getLogger("penstock.settle")

_FIRST_BACKOFF_S = 0.05
_LAST_BACKOFF_S = 5.0

# The row itself cannot be stored, whatever the database's health: trying again cannot help.
_DATA_ERRORS = (psycopg.DataError, psycopg.IntegrityError, UnicodeEncodeError)

_Key = tuple[int, int]
_Row = tuple[Item, Outcome | Again]


@dataclass(slots=True)
class Tally:
    """What this buffer has written so far."""

    outcomes: int = 0
    retries: int = 0
    given_back: int = 0
    fenced: int = 0
    flushes: int = 0
    unstorable: int = 0

    def add(self, settled: Settled) -> None:
        self.outcomes += settled.outcomes
        self.retries += settled.retries
        self.given_back += settled.given_back
        self.fenced += settled.fenced
        self.flushes += 1


class SettleBuffer:
    """Collects verdicts and writes them by size or by time, whichever comes first.

    Nothing is dropped: a failed flush keeps its rows and is tried again; above high water `on_pressure(True)` asks
    the producers to stop, below half of it `on_pressure(False)` lets them go on.
    """

    def __init__(
        self,
        pool: Pool,
        worker_id: UUID,
        limits: SettleLimits,
        *,
        on_pressure: Callable[[bool], None] = lambda _: None,
        on_settled: Callable[[Settled], None] = lambda _: None,
    ) -> None:
        self._pool = pool
        self._worker_id = worker_id
        self._limits = limits
        self._on_pressure = on_pressure
        self._on_settled = on_settled
        self._rows: dict[_Key, _Row] = {}
        self._bytes = 0
        self._backs: dict[Lease, list[tuple[int, int]]] = {}
        self._pressed = False
        self._full = asyncio.Event()
        self._some = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = False
        self.tally = Tally()
        self.trouble = ""
        """Why the last flush could not be written; empty when it was."""

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, item: Item, verdict: Outcome | Again) -> None:
        """Take one result. The same item twice keeps the later one."""
        key = (item.lease.id, item.ordinal)
        earlier = self._rows.get(key)
        if earlier is not None:
            self._bytes -= _weight(earlier[1])
        self._rows[key] = (item, verdict)
        self._bytes += _weight(verdict)
        self._wake()

    def give_back(self, lease: Lease, ranges: Iterable[tuple[int, int]]) -> None:
        """Return ordinals that were never dispatched, or whose call was cut short: no attempt is charged."""
        self._backs.setdefault(lease, []).extend(ranges)
        self._wake()

    def _wake(self) -> None:
        self._idle.clear()
        self._some.set()
        limits = self._limits
        if len(self._rows) >= limits.settle_max_rows or self._bytes >= limits.settle_max_bytes:
            self._full.set()
        if not self._pressed and (
            len(self._rows) >= limits.settle_capacity_rows or self._bytes >= limits.settle_capacity_bytes
        ):
            self._pressed = True
            _log.warning("results wait for the database: %d rows, %d bytes", len(self._rows), self._bytes)
            self._on_pressure(True)

    async def run(self) -> None:
        """Flush until closed and empty. Raises when the database refuses for longer than `settle_retry_s`."""
        while True:
            await self._some.wait()
            if not self._closing:
                await self._company()
            await self._flush(*self._take())
            self._relax()
            if not self._rows and not self._backs:
                self._some.clear()
                self._idle.set()
                if self._closing:
                    return

    async def _company(self) -> None:
        """Wait until a flush is worth it: enough rows, or the oldest has waited long enough."""
        try:
            async with asyncio.timeout(self._limits.settle_interval_s):
                await self._full.wait()
        except TimeoutError:
            pass

    async def drain(self) -> None:
        """Until everything put so far is written."""
        self._full.set()
        await self._idle.wait()

    def close(self) -> None:
        """Let `run` end once everything is written."""
        self._closing = True
        self._some.set()
        self._full.set()

    def _take(self) -> tuple[list[_Row], dict[Lease, list[tuple[int, int]]]]:
        rows: list[_Row] = []
        taken_bytes = 0
        keys: list[_Key] = []
        for key, row in itertools.islice(self._rows.items(), self._limits.settle_max_rows):
            taken_bytes += _weight(row[1])
            if rows and taken_bytes > self._limits.settle_max_bytes:
                taken_bytes -= _weight(row[1])
                break
            keys.append(key)
            rows.append(row)
        for key in keys:
            del self._rows[key]
        self._bytes -= taken_bytes
        backs, self._backs = self._backs, {}
        if len(self._rows) < self._limits.settle_max_rows:
            self._full.clear()
        return rows, backs

    def _relax(self) -> None:
        limits = self._limits
        if (
            self._pressed
            and len(self._rows) <= limits.settle_capacity_rows // 2
            and self._bytes <= limits.settle_capacity_bytes // 2
        ):
            self._pressed = False
            self._on_pressure(False)

    async def _flush(self, rows: list[_Row], backs: dict[Lease, list[tuple[int, int]]]) -> None:
        if not rows and not backs:
            return
        changes = Changes()
        for item, verdict in rows:
            changes.decide(item, verdict)
        for lease, ranges in backs.items():
            changes.give_back(lease, ranges)
        try:
            settled = await self._write(changes)
        except _DATA_ERRORS as error:
            await self._bisect(rows, backs, error)
            return
        self.tally.add(settled)
        if settled.fenced:
            _log.warning("refused %d results: their lease was taken back", settled.fenced)
        self._on_settled(settled)

    async def _write(self, changes: Changes) -> Settled:
        """One settle, retried while the database is away. A settle that was applied although its answer was lost
        matches nothing the second time, so repeating it is safe."""
        give_up = monotonic() + self._limits.settle_retry_s
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                async with self._pool.connection() as connection:
                    settled = await settle(connection, self._worker_id, changes)
                    self.trouble = ""
                    return settled
            except _DATA_ERRORS:
                raise
            except psycopg.Error as error:
                if monotonic() + backoff_s > give_up:
                    raise
                self.trouble = f"the database refuses: {str(error).strip().splitlines()[0]}"
                _log.warning("flush of %d rows failed, trying again: %s", len(changes), error)
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1))  # noqa: S311 -- jitter
            backoff_s = min(2 * backoff_s, _LAST_BACKOFF_S)

    async def _bisect(self, rows: list[_Row], backs: dict[Lease, list[tuple[int, int]]], error: Exception) -> None:
        """Find the row the database refuses, give it a typed failure, write the others."""
        if not rows:
            raise error
        if len(rows) == 1:
            item, verdict = rows[0]
            if isinstance(verdict, Outcome) and verdict.error_code == "unstorable_result":
                raise error
            self.tally.unstorable += 1
            _log.error("the result of %r cannot be stored: %s", item, error)
            reason = str(error).splitlines()[0].replace("\0", "")
            rows = [(item, _unstorable(reason, verdict))]
            await self._flush(rows, backs)
            return
        middle = len(rows) // 2
        await self._flush(rows[:middle], backs)
        await self._flush(rows[middle:], {})


def _weight(verdict: Outcome | Again) -> int:
    return len(verdict.body) if isinstance(verdict, Outcome) and verdict.body is not None else 0


def _unstorable(reason: str, verdict: Outcome | Again) -> Outcome:
    return Outcome(
        OutcomeState.FAILED,
        status_code=verdict.status_code,
        error_code="unstorable_result",
        error_message=f"The database refused this result: {reason}",
        duration_ms=verdict.duration_ms,
    )

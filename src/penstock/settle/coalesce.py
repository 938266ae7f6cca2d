"""Many small writes, few statements: one buffer, one consumer, one statement per flush.

What is written is a *kind*: it knows how to tell entries apart, how to merge two for the same thing, how to execute
many at once, and what to write in place of one that the database refuses. Everything else is here: when to flush, what
to do when a flush fails, and how to hold producers back.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Generic, Protocol, TypeVar

import psycopg

from penstock.config import SettleLimits
from penstock.db.pool import Connection, Pool, borrowed

_log = logging.getLogger("penstock.settle")

_FIRST_BACKOFF_S = 0.05
_LAST_BACKOFF_S = 5.0
_ALERT_FILL = 0.8
_REMEMBERED_FLUSHES = 1_000

# The entry itself cannot be stored, whatever the database's health: trying again cannot help.
_DATA_ERRORS = (psycopg.DataError, psycopg.IntegrityError, UnicodeEncodeError)

Entry = TypeVar("Entry")


class Kind(Protocol[Entry]):
    """What a coalescer writes."""

    def key(self, entry: Entry) -> Hashable:
        """Entries of the same key are about the same thing."""

    def merge(self, earlier: Entry, later: Entry) -> Entry:
        """What to write of two entries of one key."""

    def weight(self, entry: Entry) -> int:
        """Bytes it keeps in memory."""

    async def execute(self, connection: Connection, entries: Sequence[Entry], *, repeated: bool) -> None:
        """Write them in one statement. `repeated`: an earlier try may have been applied without our knowing."""

    def spoiled(self, entry: Entry, reason: str) -> Entry | None:
        """What to write instead of an entry that the database refuses; None if there is nothing."""


@dataclass(slots=True)
class Figures:
    """What a coalescer has done so far."""

    entries: int = 0
    flushes: int = 0
    repeats: int = 0
    """Flushes that failed and were tried again."""
    bisections: int = 0
    spoiled: int = 0
    pressed: int = 0
    """Times the producers were held back."""
    recent: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_FLUSHES))
    """(entries, seconds) of the last flushes."""

    def latency_s(self, share: float) -> float:
        """The time within which this share of recent flushes was written: 0.5, 0.95, 0.99."""
        times = sorted(seconds for _, seconds in self.recent)
        return times[min(len(times) - 1, int(share * len(times)))] if times else 0.0

    @property
    def mean_size(self) -> float:
        return self.entries / self.flushes if self.flushes else 0.0


class Coalescer(Generic[Entry]):
    """Collects entries and writes them by size or by time, whichever comes first.

    Nothing is dropped: a failed flush keeps its entries and is tried again; above high water `on_pressure(True)` asks
    the producers to stop, below half of it `on_pressure(False)` lets them go on.
    """

    def __init__(
        self,
        kind: Kind[Entry],
        pool: Pool,
        limits: SettleLimits,
        *,
        on_pressure: Callable[[bool], None] = lambda _: None,
        on_written: Callable[[], None] = lambda: None,
    ) -> None:
        self._kind = kind
        self._pool = pool
        self._limits = limits
        self._on_pressure = on_pressure
        self._on_written = on_written
        self._entries: dict[Hashable, Entry] = {}
        self._writing: Sequence[Entry] = ()
        self._bytes = 0
        self._pressed = False
        self._alerted = False
        self._some = asyncio.Event()
        self._full = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = False
        self.figures = Figures()
        self.trouble = ""
        """Why the last flush could not be written; empty when it was."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def unwritten(self) -> Iterator[Entry]:
        """What was put and is not known to be written."""
        return itertools.chain(self._writing, self._entries.values())

    @property
    def fill(self) -> float:
        """How full the buffer is, of what it may hold."""
        limits = self._limits
        return max(len(self._entries) / limits.settle_capacity_rows, self._bytes / limits.settle_capacity_bytes)

    def put(self, entry: Entry) -> None:
        kind = self._kind
        key = kind.key(entry)
        earlier = self._entries.get(key)
        if earlier is not None:
            self._bytes -= kind.weight(earlier)
            entry = kind.merge(earlier, entry)
        self._entries[key] = entry
        self._bytes += kind.weight(entry)
        self._wake()

    def _wake(self) -> None:
        if self._idle.is_set():
            self._idle.clear()
            self._some.set()
        limits = self._limits
        if len(self._entries) < limits.settle_max_rows and self._bytes < limits.settle_max_bytes:
            return
        self._full.set()
        fill = self.fill
        if fill >= _ALERT_FILL and not self._alerted:
            self._alerted = True
            _log.warning("results wait for the database: the buffer is %.0f %% full", 100 * fill)
        if fill >= 1 and not self._pressed:
            self._pressed = True
            self.figures.pressed += 1
            _log.warning("the buffer is full: no calls are started until it is half empty")
            self._on_pressure(True)

    async def run(self) -> None:
        """Flush until closed and empty. Raises when the database refuses for longer than `settle_retry_s`."""
        while True:
            await self._some.wait()
            if not self._closing:
                await self._company()
            entries = self._take()
            if entries:
                self._writing = entries
                await self._flush(entries)
                self._writing = ()
                self._on_written()
            self._relax()
            if not self._entries:
                self._some.clear()
                self._idle.set()
                if self._closing:
                    return

    async def _company(self) -> None:
        """Wait until a flush is worth it: enough entries, or the oldest has waited long enough."""
        if self._full.is_set():
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.settle_interval_s):
                await self._full.wait()

    def hurry(self) -> None:
        """Do not wait for company: somebody waits for what was put last."""
        self._full.set()

    async def drain(self) -> None:
        """Until everything put so far is written."""
        self.hurry()
        await self._idle.wait()

    def close(self) -> None:
        """Let `run` end once everything is written."""
        self._closing = True
        self._some.set()
        self._full.set()

    def _take(self) -> list[Entry]:
        entries: list[Entry] = []
        keys: list[Hashable] = []
        taken_bytes = 0
        for key, entry in itertools.islice(self._entries.items(), self._limits.settle_max_rows):
            weight = self._kind.weight(entry)
            if entries and taken_bytes + weight > self._limits.settle_max_bytes:
                break
            taken_bytes += weight
            keys.append(key)
            entries.append(entry)
        for key in keys:
            del self._entries[key]
        self._bytes -= taken_bytes
        if len(self._entries) < self._limits.settle_max_rows and self._bytes < self._limits.settle_max_bytes:
            self._full.clear()
        return entries

    def _relax(self) -> None:
        fill = self.fill
        if fill < _ALERT_FILL:
            self._alerted = False
        if self._pressed and fill <= 0.5:
            self._pressed = False
            self._on_pressure(False)

    async def _flush(self, entries: list[Entry]) -> None:
        began = monotonic()
        try:
            await self._write(entries)
        except _DATA_ERRORS as error:
            await self._bisect(entries, error)
            return
        self.figures.flushes += 1
        self.figures.entries += len(entries)
        self.figures.recent.append((len(entries), monotonic() - began))

    async def _write(self, entries: list[Entry]) -> None:
        """One statement, repeated while the database is away."""
        give_up_at = monotonic() + self._limits.settle_retry_s
        backoff_s = _FIRST_BACKOFF_S
        repeated = False
        while True:
            try:
                async with borrowed(self._pool) as connection:
                    await self._kind.execute(connection, entries, repeated=repeated)
            except _DATA_ERRORS:
                raise
            except psycopg.Error as error:
                self.trouble = f"the database refuses: {str(error).strip().splitlines()[0]}"
                _log.warning("a flush of %d failed, trying again: %s", len(entries), error)
                if monotonic() + backoff_s > give_up_at:
                    raise
            else:
                self.trouble = ""
                return
            repeated = True
            self.figures.repeats += 1
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1))  # noqa: S311 -- jitter
            backoff_s = min(2 * backoff_s, _LAST_BACKOFF_S)

    async def _bisect(self, entries: list[Entry], error: Exception) -> None:
        """Find the entry the database refuses, write something else for it, and write the others."""
        if len(entries) > 1:
            self.figures.bisections += 1
            middle = len(entries) // 2
            await self._flush(entries[:middle])
            await self._flush(entries[middle:])
            return
        instead = self._kind.spoiled(entries[0], str(error).splitlines()[0].replace("\0", ""))
        if instead is None:
            raise error
        _log.error("an entry cannot be stored: %s", error)
        self.figures.spoiled += 1
        await self._flush([instead])

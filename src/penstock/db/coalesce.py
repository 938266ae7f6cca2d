"""Coalescing writer: many small writes in few statements. One buffer, one consumer, one statement per flush.

A `WriteKind` knows how to tell entries apart, how to merge two of one key, how to write many at once, and what to do
with entries that the database rejects. Everything else is here: when to flush, what to do when a flush fails, and how
to hold producers back. Results of workers, requests of sessions and pieces of streamed answers are written so.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet

import psycopg

from penstock.backoff import Backoff
from penstock.db.pool import Connection, Pool, borrowed
from penstock.observe import catalogue
from penstock.observe.metrics import Sample, read_from

_log = logging.getLogger("penstock.coalesce")

_FIRST_BACKOFF_S = 0.05
_LAST_BACKOFF_S = 5.0
_ALERT_FILL = 0.8
_REMEMBERED_FLUSHES = 1_000

# The entry itself cannot be stored, whatever the database's health: trying again cannot help.
_DATA_ERRORS = (psycopg.DataError, psycopg.IntegrityError, UnicodeEncodeError)

Entry = TypeVar("Entry")


@dataclass(frozen=True, slots=True)
class CoalesceLimits:
    """The bounds of one coalescer."""

    max_rows: int
    """Most entries per flush."""
    max_bytes: int
    """Most bytes per flush."""
    interval_s: float
    """Longest an entry waits for more entries. 0: it only waits for the flush before it."""
    capacity_rows: int
    """Entries at which producers are held back (backpressure)."""
    capacity_bytes: int
    retry_s: float
    """How long a failing flush is tried again."""


class WriteKind(Protocol[Entry]):
    """Kind of entries that a coalescer writes, and how."""

    def key(self, entry: Entry) -> Hashable:
        """Key of the entry: two entries of the same key are merged."""

    def merge(self, earlier: Entry, later: Entry) -> Entry:
        """Merge two entries of one key into the one to write."""

    def weight(self, entry: Entry) -> int:
        """Bytes that the entry keeps in memory."""

    async def execute(self, connection: Connection, entries: Sequence[Entry], *, repeated: bool) -> None:
        """Write the entries in one statement. `repeated`: an earlier try failed, and may have been applied all the
        same."""

    def replace_rejected(self, entry: Entry, error: Exception) -> Entry | None:
        """Replace an entry that the database rejects by another to write instead; None to write nothing. Raises the
        error if the entry must not be left out."""

    async def give_up(self, entries: Sequence[Entry], error: Exception) -> None:
        """Give up entries whose flush failed for longer than `retry_s`. Raises the error if none may be left out."""


@dataclass(slots=True)
class Figures:
    """Figures of a coalescer so far."""

    entries: int = 0
    flushes: int = 0
    repeats: int = 0
    """Flushes that failed and were tried again."""
    rejected: int = 0
    """Entries that the database rejected for their content."""
    backpressured: int = 0
    """Times that producers were held back."""
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

    Nothing is dropped: a failed flush keeps its entries and is tried again. When the buffer is full,
    `on_backpressure(True)` asks the producers to stop; once it is half empty, `on_backpressure(False)` lets them go on.
    """

    def __init__(
        self,
        kind: WriteKind[Entry],
        pool: Pool,
        limits: CoalesceLimits,
        *,
        name: str,
        on_backpressure: Callable[[bool], None] = lambda _: None,
        on_written: Callable[[], None] = lambda: None,
    ) -> None:
        self._kind = kind
        self._pool = pool
        self._limits = limits
        self._name = name
        self.labels = (name.split()[0],)
        self._on_pressure = on_backpressure
        self._on_written = on_written
        self._entries: dict[Hashable, Entry] = {}
        self._writing: Sequence[Entry] = ()
        self._waiting_bytes = 0
        self._backpressure = False
        self._alerted = False
        self._some = asyncio.Event()
        self._full = asyncio.Event()
        self._closing = False
        self.figures = Figures()
        self.trouble = ""
        """Why the last flush could not be written; empty when it was."""
        _coalescers.add(self)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def unwritten(self) -> Iterator[Entry]:
        """Entries that were put and are not known to be written."""
        return itertools.chain(self._writing, self._entries.values())

    @property
    def fill(self) -> float:
        """Share of the buffer's capacity in use; 1 is full."""
        limits = self._limits
        return max(len(self._entries) / limits.capacity_rows, self._waiting_bytes / limits.capacity_bytes)

    def put(self, entry: Entry) -> None:
        kind = self._kind
        key = kind.key(entry)
        earlier = self._entries.get(key)
        if earlier is not None:
            self._waiting_bytes -= kind.weight(earlier)
            entry = kind.merge(earlier, entry)
        self._entries[key] = entry
        self._waiting_bytes += kind.weight(entry)
        self._wake()

    def _wake(self) -> None:
        self._some.set()
        limits = self._limits
        if len(self._entries) < limits.max_rows and self._waiting_bytes < limits.max_bytes:
            return
        self._full.set()
        fill = self.fill
        if fill >= _ALERT_FILL and not self._alerted:
            self._alerted = True
            _log.warning("%s wait for the database: the buffer is %.0f %% full", self._name, 100 * fill)
        if fill >= 1 and not self._backpressure:
            self._backpressure = True
            self.figures.backpressured += 1
            catalogue.BACKPRESSURE.add(self.labels)
            _log.warning(
                "%s wait for the database: the buffer is full, nothing is begun until it is half empty", self._name
            )
            self._on_pressure(True)

    async def run(self) -> None:
        """Flush until closed and empty. Raises what the kind raises for entries that cannot be written."""
        while True:
            await self._some.wait()
            if not self._closing:
                await self._wait_for_more()
            entries = self._take()
            if entries:
                self._writing = entries
                await self._flush(entries)
                self._writing = ()
                self._on_written()
            self._ease_backpressure()
            if not self._entries:
                self._some.clear()
                if self._closing:
                    return

    async def _wait_for_more(self) -> None:
        """Wait until a flush is worth it: enough entries, or the oldest has waited long enough."""
        if self._full.is_set() or not self._limits.interval_s:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.interval_s):
                await self._full.wait()

    def flush_soon(self) -> None:
        """Flush without waiting for more entries: a caller waits for the one put last."""
        self._full.set()

    def discard(self, key: Hashable) -> None:
        """Drop the entry that waits under this key."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._waiting_bytes -= self._kind.weight(entry)

    def close(self) -> None:
        """Let `run` end once everything is written."""
        self._closing = True
        self._some.set()
        self._full.set()

    def _take(self) -> list[Entry]:
        entries: list[Entry] = []
        keys: list[Hashable] = []
        taken_bytes = 0
        for key, entry in itertools.islice(self._entries.items(), self._limits.max_rows):
            weight = self._kind.weight(entry)
            if entries and taken_bytes + weight > self._limits.max_bytes:
                break
            taken_bytes += weight
            keys.append(key)
            entries.append(entry)
        for key in keys:
            del self._entries[key]
        self._waiting_bytes -= taken_bytes
        if len(self._entries) < self._limits.max_rows and self._waiting_bytes < self._limits.max_bytes:
            self._full.clear()
        return entries

    def _ease_backpressure(self) -> None:
        fill = self.fill
        if fill < _ALERT_FILL:
            self._alerted = False
        if self._backpressure and fill <= 0.5:
            self._backpressure = False
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
        seconds = monotonic() - began
        self.figures.recent.append((len(entries), seconds))
        catalogue.FLUSH_ROWS.observe(self.labels, len(entries))
        catalogue.FLUSH_DURATION.observe(self.labels, seconds)
        catalogue.note_latency(seconds)

    async def _write(self, entries: list[Entry]) -> None:
        """Write in one statement, repeated while the database is away."""
        give_up_at = monotonic() + self._limits.retry_s
        backoff = Backoff(_FIRST_BACKOFF_S, _LAST_BACKOFF_S)
        repeated = False
        while True:
            try:
                async with borrowed(self._pool) as connection:
                    await self._kind.execute(connection, entries, repeated=repeated)
            except _DATA_ERRORS:
                raise
            except psycopg.Error as error:
                self.trouble = f"the database refuses: {str(error).strip().splitlines()[0]}"
                catalogue.FLUSH_FAILURES.add(self.labels)
                if monotonic() + backoff.longest_s > give_up_at:
                    await self._kind.give_up(entries, error)
                    return
                _log.warning("a flush of %d failed, trying again: %s", len(entries), error)
            else:
                self.trouble = ""
                return
            repeated = True
            self.figures.repeats += 1
            await backoff.wait()

    async def _bisect(self, entries: list[Entry], error: Exception) -> None:
        """Find the entry that the database rejects, write its replacement, and write the others."""
        if len(entries) > 1:
            middle = len(entries) // 2
            await self._flush(entries[:middle])
            await self._flush(entries[middle:])
            return
        instead = self._kind.replace_rejected(entries[0], error)
        self.figures.rejected += 1
        catalogue.ROWS_REJECTED.add(self.labels)
        if instead is not None:
            _log.error("an entry of %s cannot be stored: %s", self._name, error)
            await self._flush([instead])


_coalescers: WeakSet[Coalescer[Any]] = WeakSet()


@read_from
def _read_fill() -> list[Sample]:
    return [Sample(catalogue.BUFFER_FILL, coalescer.labels, coalescer.fill) for coalescer in list(_coalescers)]

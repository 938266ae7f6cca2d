"""Results of a worker on their way to the database: how the coalescing writer keys, merges and writes them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol
from uuid import UUID

import msgspec

from penstock.config import SettleLimits, TableLimits
from penstock.db.coalesce import CoalesceLimits, Coalescer
from penstock.db.pool import Connection, Pool
from penstock.model import ROWS, Again, Item, Lease, Outcome, OutcomeState
from penstock.observe import catalogue
from penstock.observe.logs import event
from penstock.observe.traces import span
from penstock.settle.columns import ResultColumns
from penstock.settle.samples import Samples
from penstock.settle.write import Changes, Settled, count_applied, find_recorded, pass_over, settle

_log = logging.getLogger("penstock.settle")

Range = tuple[int, int]

_TABLES = TableLimits()

UNSTORABLE = "unstorable_result"
TOO_MANY_COLUMNS = "too_many_columns"


class Decided(msgspec.Struct, frozen=True):
    """An item with its verdict."""

    item: Item
    verdict: Outcome | Again


class GivenBack(msgspec.Struct, frozen=True):
    """Ordinals of a lease that were never called, or whose call was cut short: no attempt is charged."""

    lease: Lease
    ranges: list[Range]


SettleEntry = Decided | GivenBack


class Settle(Protocol):
    """What writes changes of leased items: `settle`, or one that does more in the same transaction."""

    async def __call__(self, connection: Connection, worker_id: UUID, changes: Changes, *, notify: bool) -> Settled: ...


class Answers(msgspec.Struct, frozen=True):
    """Answers of sessions that callers wait for, written a moment ago."""

    lanes: Collection[int]
    """Lanes of the sessions."""
    known: Sequence[Decided]
    """Everything that was written, the answers among it; empty if some of it was refused."""
    at: datetime


def _lease_of(entry: SettleEntry) -> Lease:
    return entry.item.lease if isinstance(entry, Decided) else entry.lease


@dataclass(slots=True)
class Tally:
    """Figures of what was really written, from the database's answers."""

    outcomes: int = 0
    retries: int = 0
    given_back: int = 0
    fenced: int = 0
    """Results refused because their lease was taken back."""
    already_applied: int = 0
    """Results written by a flush whose answer was lost."""


class SettleWrite:
    """Settles leases: the `WriteKind` of a worker's results."""

    def __init__(
        self,
        worker_id: UUID,
        on_more: Callable[[], None],
        on_answers: Callable[[Answers], None] | None,
        settle_growing: Settle | None,
        tables: TableLimits,
        samples: Samples | None,
        work_pool: str,
    ) -> None:
        self._worker_id = worker_id
        self._samples = samples
        self._labels = catalogue.pool_labels(work_pool)
        self._settle_growing = settle_growing
        self._on_more = on_more
        self._on_answers = on_answers
        self._columns = ResultColumns(tables)
        self.tally = Tally()
        self.suspects: set[Hashable] = set()
        """Keys of unwritten items of suspect leases: one more loss may fail them as `worker_lost`."""

    def key(self, entry: SettleEntry) -> Hashable:
        if isinstance(entry, Decided):
            return (entry.item.lease.nonce, entry.item.ordinal)
        return entry.lease.nonce

    def merge(self, earlier: SettleEntry, later: SettleEntry) -> SettleEntry:
        if isinstance(earlier, GivenBack) and isinstance(later, GivenBack):
            return GivenBack(later.lease, earlier.ranges + later.ranges)
        return later

    def weight(self, entry: SettleEntry) -> int:
        if not isinstance(entry, Decided) or not isinstance(entry.verdict, Outcome):
            return 0
        outcome = entry.verdict
        size = len(outcome.body) if outcome.body is not None else 0
        return size + sum(len(new.row) for new in outcome.discovered) if outcome.discovered else size

    async def execute(self, connection: Connection, entries: Sequence[SettleEntry], *, repeated: bool) -> None:
        changes = Changes()
        for entry in entries:
            if isinstance(entry, Decided):
                changes.decide(entry.item, entry.verdict)
            else:
                changes.give_back(entry.lease, entry.ranges)
        with span("settle", "INTERNAL", results=len(entries)):
            settled = await self._write(connection, changes)
        if changes.waited and self._on_answers is not None:
            # Where some were refused, it is not known here which.
            decided = [] if settled.fenced else [entry for entry in entries if isinstance(entry, Decided)]
            self._on_answers(Answers(changes.waited, decided, settled.at))
            await asyncio.sleep(0)  # waiting callers go first
        if settled.cancelled_next:
            await pass_over(connection, settled.cancelled_next)
        if settled.more or changes.agains or (changes.backs and any(_lease_of(entry).session for entry in entries)):
            self._on_more()
        known = 0
        if repeated and settled.fenced:
            # Some are refused now, perhaps because the flush whose answer was lost did write them: ask.
            items = [entry.item for entry in entries if isinstance(entry, Decided)]
            known = await count_applied(connection, items)
        written = changes.outcomes
        if settled.fenced:
            recorded = await find_recorded(connection, [(row[0], row[1]) for row in written])
            written = [row for place, row in enumerate(written) if place in recorded]
        self._count_items(written)
        if self.suspects:
            self.suspects.difference_update(map(self.key, entries))
        if self._samples is not None and (settled.outcomes or settled.retries):
            self._samples.count_settled(changes, settled.at)
        self._count(settled.outcomes, settled.retries, settled.given_back, settled.fenced - known, known)

    async def _write(self, connection: Connection, changes: Changes) -> Settled:
        await self._record_columns(connection, changes)
        write = self._settle_growing if self._settle_growing is not None and changes.discoverers else settle
        return await write(connection, self._worker_id, changes, notify=self._on_answers is None)

    async def _record_columns(self, connection: Connection, changes: Changes) -> None:
        """Record the columns of jobs' results before the results; those that have too many fail."""
        results = {
            place: (lease.batch_id, outcome.body)
            for place, (lease, _, _, _, outcome) in enumerate(changes.outcomes)
            if lease.endpoint == ROWS and outcome.body is not None
        }
        if not results:
            return
        for place, reason in (await self._columns.record(connection, results)).items():
            lease, ordinal, line, custom_id, outcome = changes.outcomes[place]
            failed = Outcome(
                OutcomeState.FAILED,
                error_code=TOO_MANY_COLUMNS,
                error_message=f"The result cannot be taken: {reason}.",
                duration_ms=outcome.duration_ms,
                usage=outcome.usage,
            )
            changes.outcomes[place] = (lease, ordinal, line, custom_id, failed)

    def _count_items(self, written: Sequence[tuple[Lease, int, int, str, Outcome]]) -> None:
        """Count recorded outcomes; each once, also where the answer of the flush that recorded it was lost."""
        # Nearly all are completed, and enums are slow to hash.
        completed = Counter(row[0].route for row in written if row[4].state is OutcomeState.COMPLETED)
        others = Counter((row[0].route, row[4].state) for row in written if row[4].state is not OutcomeState.COMPLETED)
        for route, count in completed.items():
            catalogue.ITEMS.add((*self._labels, catalogue.model_label(route), "completed"), count)
        for (route, state), count in others.items():
            catalogue.ITEMS.add((*self._labels, catalogue.model_label(route), state.value), count)

    def _count(self, outcomes: int, retries: int, given_back: int, fenced: int, known: int) -> None:
        tally = self.tally
        tally.outcomes += outcomes
        tally.retries += retries
        tally.given_back += given_back
        tally.already_applied += known
        figures = {"outcome": outcomes, "retry": retries, "given_back": given_back, "already_applied": known}
        for result, count in (*figures.items(), ("fenced", max(0, fenced))):
            catalogue.SETTLED.add((*self._labels, result), count)
        if known:
            _log.warning("%d results were already applied: only the answer had been lost", known)
        if fenced > 0:
            tally.fenced += fenced
            fields = event("results_fenced", count=fenced, worker=self._worker_id)
            _log.warning("refused %d results: their lease was taken back", fenced, extra=fields)

    def replace_rejected(self, entry: SettleEntry, error: Exception) -> SettleEntry:
        if isinstance(entry, GivenBack):
            raise error
        verdict = entry.verdict
        if isinstance(verdict, Outcome) and verdict.error_code == UNSTORABLE:
            raise error
        reason = str(error).splitlines()[0].replace("\0", "")
        outcome = Outcome(
            OutcomeState.FAILED,
            status_code=verdict.status_code,
            error_code=UNSTORABLE,
            error_message=f"The database refused this result: {reason}",
            duration_ms=verdict.duration_ms,
        )
        return Decided(entry.item, outcome)

    async def give_up(self, entries: Sequence[SettleEntry], error: Exception) -> None:  # noqa: ARG002 -- all of them count
        raise error


class SettleBuffer(Coalescer[SettleEntry]):
    """All results of one worker go through here."""

    def __init__(
        self,
        pool: Pool,
        worker_id: UUID,
        limits: SettleLimits,
        *,
        on_backpressure: Callable[[bool], None] = lambda _: None,
        on_written: Callable[[], None] = lambda: None,
        on_more: Callable[[], None] = lambda: None,
        on_answers: Callable[[Answers], None] | None = None,
        settle_growing: Settle | None = None,
        tables: TableLimits = _TABLES,
        samples: Samples | None = None,
        work_pool: str = "",
    ) -> None:
        """`on_written` is called after each flush; `on_more` when sessions are ready for their next request, or items
        are to be tried again; `on_answers` when answers that callers wait for have been written. With `on_answers`, to
        notify callers at other processes is left to it. `settle_growing` settles results that add rows to their job.
        `samples` counts what was written. `work_pool` is the pool whose results these are, for metrics."""
        self._write_kind = SettleWrite(worker_id, on_more, on_answers, settle_growing, tables, samples, work_pool)
        bounds = CoalesceLimits(
            limits.settle_max_rows,
            limits.settle_max_bytes,
            limits.settle_interval_s,
            limits.settle_capacity_rows,
            limits.settle_capacity_bytes,
            limits.settle_retry_s,
        )
        super().__init__(
            self._write_kind, pool, bounds, name="results", on_backpressure=on_backpressure, on_written=on_written
        )

    @property
    def tally(self) -> Tally:
        return self._write_kind.tally

    @property
    def holds_suspect(self) -> bool:
        """Whether results of a suspect lease wait to be written: a second could kill the worker before."""
        return bool(self._write_kind.suspects)

    @property
    def leases(self) -> set[int]:
        """Nonces of all leases of which results wait to be written."""
        return {_lease_of(entry).nonce for entry in self.unwritten}

    @property
    def batches(self) -> set[UUID]:
        """Batches, and sessions, of which results wait to be written."""
        return {_lease_of(entry).batch_id for entry in self.unwritten}

    def put(self, entry: SettleEntry) -> None:
        if _lease_of(entry).suspect:
            self._write_kind.suspects.add(self._write_kind.key(entry))
        super().put(entry)

    def decide(self, item: Item, verdict: Outcome | Again) -> None:
        """Take one result. The same item twice keeps the later one."""
        self.put(Decided(item, verdict))
        if item.waited:
            self.flush_soon()

    def give_back(self, lease: Lease, ranges: Iterable[Range]) -> None:
        """Give ordinals back untouched; they can be claimed again at once."""
        self.put(GivenBack(lease, list(ranges)))

    def report(self) -> str:
        """Figures of everything written so far, in a line for the log."""
        figures, tally = self.figures, self.tally
        p50, p95, p99 = (1000 * figures.latency_s(share) for share in (0.5, 0.95, 0.99))
        return (
            f"wrote {tally.outcomes} outcomes and {tally.retries} retries in {figures.flushes} flushes of"
            f" {figures.mean_size:.0f} on average, p50/p95/p99 {p50:.0f}/{p95:.0f}/{p99:.0f} ms; {tally.fenced} fenced,"
            f" {tally.already_applied} already applied, {figures.repeats} repeated"
        )

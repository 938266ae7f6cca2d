"""One batch of the old system becomes a batch with lanes: its answers are outcomes, everything else is derived."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

from psycopg import Connection

from penstock.errors import PenstockError
from penstock.model import OutcomeState, batch_public_id, new_id, public_id
from penstock.moving.ending import Ending, ending_of, figures_of, metadata_of, problems_of
from penstock.moving.file_import import split_target
from penstock.moving.lanes import NO_WAIT, Deferral, ImportLane, multirange
from penstock.moving.rows import (
    CANCELLED,
    NO_INPUT,
    NO_REQUEST,
    Answer,
    LineOrder,
    answer_of,
    line_bytes,
    pack_attempt,
    pack_outcome,
)
from penstock.moving.source import RequestState, Source, SourceBatch, SourceRequest
from penstock.moving.standing import Standing, make_room
from penstock.moving.target import SEGMENT_BYTES, SEGMENT_ROWS, SQL, StepWriter, copy_packed, step
from penstock.moving.watch import Watch

_EPOCH_S = 946_684_800
"""Seconds from 1970 to 2000, where PostgreSQL counts from."""

_NEVER_RUN = ("not_imported", "This batch had failed before the request was run.")
_WILL_NOT_RUN = {RequestState.MISSING: NO_REQUEST, RequestState.CANCELED: CANCELLED}


@dataclass(frozen=True, slots=True)
class BatchWishes:
    """How batches are taken over."""

    default_owner: str
    pool_of: Callable[[str], str]
    extend: timedelta | None = None
    """Time that unfinished batches have from now on, if their own would end sooner."""


@dataclass(slots=True)
class Figures:
    """What was written for a batch."""

    completed: int = 0
    failed: int = 0
    skipped: int = 0
    retried: int = 0
    output_bytes: int = 0
    error_bytes: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def settled(self) -> int:
        return self.completed + self.failed + self.skipped

    def add(self, line: int, answer: Answer) -> None:
        size = line_bytes(line, answer)
        if answer.state is OutcomeState.COMPLETED:
            self.completed += 1
            self.output_bytes += size
        else:
            self.error_bytes += size
            if answer.state is OutcomeState.FAILED:
                self.failed += 1
            else:
                self.skipped += 1
        if (usage := answer.usage) is not None:
            self.input_tokens += usage.input_tokens
            self.cached_tokens += usage.cached_tokens
            self.output_tokens += usage.output_tokens
            self.reasoning_tokens += usage.reasoning_tokens


@dataclass(slots=True)
class ImportedBatch:
    """A batch as it was found, and as it is now."""

    id: UUID
    state: str
    before: dict[str, int]
    after: dict[str, int]
    answer_bytes: int
    left: dict[str, int] = field(default_factory=dict)
    """Requests that were left behind, by reason."""
    notes: list[str] = field(default_factory=list)


def import_batch(
    source: Source, target: Connection, batch_id: UUID, wishes: BatchWishes, watch: Watch
) -> tuple[Standing, ImportedBatch | None]:
    """Bring a batch over, unless it is here as the source has it, or cannot be brought; says which."""
    with source.snapshot(), step(target) as writer:
        batch = source.batch(batch_id)
        if batch is None:
            return Standing.GONE, None
        standing = make_room(target, batch)
        if standing not in (Standing.NEW, Standing.REPLACED):
            return standing, _as_it_is(target, batch)
        return standing, _BatchImport(source, writer, batch, wishes, watch).run()


def _as_it_is(target: Connection, batch: SourceBatch) -> ImportedBatch | None:
    """A batch that is left as it is; None if it was deleted here."""
    row = target.execute(SQL["read_counts"], {"id": batch.id}).fetchone()
    if row is None:
        return None
    state, _, _, total, completed, failed, skipped = row
    rest = {"cancelled": "cancelled", "cancelling": "cancelled", "expired": "expired"}.get(state, "pending")
    after = {rest: total - completed - failed - skipped, "completed": completed, "failed": failed, "skipped": skipped}
    return ImportedBatch(batch.id, state, batch.before, after, 0)


class _BatchImport:
    """One batch under way."""

    def __init__(
        self, source: Source, writer: StepWriter, batch: SourceBatch, wishes: BatchWishes, watch: Watch
    ) -> None:
        self._source = source
        self._writer = writer
        self._target = writer.connection
        self._batch = batch
        self._owner = batch.owner or wishes.default_owner
        self._wishes = wishes
        self._watch = watch
        self._figures = Figures()
        self._lanes: dict[tuple[str, str, bool], ImportLane] = {}
        self._known: dict[tuple[bytes, bool], ImportLane] = {}
        self._answers: list[bytes] = []
        self._failures: list[bytes] = []
        self._segment_bytes = self._segment_rows = 0
        self._requests_left = batch.requests
        """Requests of the batch that were not read yet."""
        self._left: dict[str, int] = {}
        self._answer_bytes = 0

    def run(self) -> ImportedBatch:
        file = self._find_file()
        source_id = self._open_lanes(file)
        ending = ending_of(self._batch, has_file=file is not None)
        order = self._take_lines(file, ending)
        self._take_others(file, source_id, order, ending)
        self._write_segment()
        self._writer.flush()
        total = sum(lane.seen for lane in self._lanes.values())
        self._check_outcomes()
        self._insert(file, total, ending)
        return ImportedBatch(
            self._batch.id,
            ending.state,
            self._batch.before,
            self._after(total, ending),
            self._answer_bytes,
            self._left,
            ending.notes(self._batch, total),
        )

    # -- lanes

    def _find_file(self) -> UUID | None:
        """The batch's file, if it is here."""
        file_id = self._batch.file_id
        if file_id is None or self._target.execute(SQL["find_file"], {"id": file_id}).fetchone() is None:
            return None
        return file_id

    def _open_lanes(self, file_id: UUID | None) -> int:
        """Make the lanes of the file; returns the source id of the batch's lines."""
        if file_id is None:
            (source_id,) = self._target.execute(SQL["next_source"]).fetchall()[0]
            return int(source_id)
        ((source_id, _),) = self._target.execute(SQL["find_file"], {"id": file_id}).fetchall()
        listed = self._target.execute(SQL["list_file_lanes"], {"source_id": source_id}).fetchall()
        ids = self._target.execute(SQL["next_lanes"], {"count": len(listed)}).fetchall()
        for (lane_id,), (source_lane, route, endpoint, total) in zip(ids, listed, strict=True):
            pool = self._wishes.pool_of(route)
            lane = ImportLane(lane_id, source_id, source_lane, route, endpoint, pool, total)
            self._lanes[endpoint, route, True] = lane
        return int(source_id)

    def _lane_of_line(self, goes_to: bytes) -> ImportLane:
        lane = self._known.get((goes_to, True))
        if lane is None:
            path, model, _ = split_target(goes_to.decode())
            found = self._lanes.get((path, model, True))
            if found is None:
                raise self._changed()
            lane = self._known[goes_to, True] = found
        return lane

    def _lane_without_file(self, goes_to: bytes, source_id: int) -> ImportLane:
        lane = self._known.get((goes_to, False))
        if lane is None:
            path, model, _ = split_target(goes_to.decode())
            self._writer.flush()
            ((lane_id,),) = self._target.execute(SQL["next_lanes"], {"count": 1}).fetchall()
            pool = self._wishes.pool_of(model)
            lane = ImportLane(lane_id, source_id, len(self._lanes), model, path, pool, None)
            self._known[goes_to, False] = self._lanes[path, model, False] = lane
        return lane

    # -- requests

    def _take_lines(self, file_id: UUID | None, ending: Ending) -> LineOrder:
        """The lines of the batch's file, each with what became of it. Returns where the lines end."""
        order, last = LineOrder(), b""
        if file_id is None:
            return order
        for request in self._source.requests_of_file(self._batch.id, file_id):
            state = request.state
            self._requests_left -= state != RequestState.MISSING
            if request.id == last:
                self._leave("second rows for one line")
                continue
            last = request.id
            line = order.next(request.number)
            why = _WILL_NOT_RUN.get(state)
            stays = ending.derives_rest or (why is None and not ending.runs_nothing)
            self._take(self._lane_of_line(request.goes_to), request, line, None if stays else why or _NEVER_RUN)
        if any(lane.seen != lane.total for lane in self._lanes.values()):
            raise self._changed()
        return order

    def _take_others(self, file_id: UUID | None, source_id: int, order: LineOrder, ending: Ending) -> None:
        """Requests whose lines are gone: their answers are kept, behind those of the file."""
        batch = self._batch
        if self._requests_left == 0:
            return
        for request in self._source.requests_without_line(batch.id, file_id, batch.endpoint):
            line = order.next(request.number if file_id is None else 0)
            # Without a file nothing can ever be run again: the rest is cancelled with the batch.
            stays = ending.derives_rest and file_id is None
            why = CANCELLED if request.state == RequestState.CANCELED else NO_INPUT
            if request.state in (RequestState.PENDING, RequestState.CLAIMED, RequestState.PROCESSING):
                self._leave("requests to be run whose input is gone")
            self._take(self._lane_without_file(request.goes_to, source_id), request, line, None if stays else why)

    def _take(self, lane: ImportLane, request: SourceRequest, line: int, why: tuple[str, str] | None) -> None:
        if request.state == RequestState.UNKNOWN:
            raise PenstockError(
                f"request {UUID(bytes=request.id)} of {batch_public_id(self._batch.id)} is in a state that the layout"
                " does not have",
                hint="States are pending, claimed, processing, completed, failed and canceled.",
            )
        ordinal = lane.seen
        lane.seen += 1
        answer = answer_of(request, line, why)
        self._figures.retried += request.retries
        if answer is None:
            lane.wait(ordinal, request.retries + 1, request.not_before)
        else:
            lane.settle(ordinal, completed=answer.state is OutcomeState.COMPLETED)
            self._figures.add(line, answer)
            pack_outcome(self._answers, lane.id, ordinal, line, answer)
            if answer.state is OutcomeState.FAILED:
                pack_attempt(self._failures, lane.id, ordinal, answer, request.duration_ms)
            size = len(request.response or b"")
            self._answer_bytes += size
            self._segment_bytes += size + 200
        self._segment_rows += 1
        if self._segment_bytes >= SEGMENT_BYTES or self._segment_rows >= SEGMENT_ROWS:
            self._write_segment()

    def _leave(self, why: str) -> None:
        self._left[why] = self._left.get(why, 0) + 1

    def _changed(self) -> PenstockError:
        return PenstockError(
            f"the lines of {public_id('file', self._batch.file_id or UUID(int=0))} in the source are not those that"
            " were imported",
            hint=f"Lines were added or removed since. {batch_public_id(self._batch.id)} was left as it was.",
        )

    # -- writing

    def _write_segment(self) -> None:
        """Have what was taken so far written. Nothing of it stays in memory but the figures and the lanes' cursors."""
        decided = [lane for lane in self._lanes.values() if lane.decided]
        journal = [(lane.id, multirange(lane.completed), multirange(lane.others)) for lane in decided]
        for lane in decided:
            lane.completed, lane.others = [], []
        deferrals = [deferral for lane in self._lanes.values() for deferral in lane.take_deferrals()]
        answers, failures = b"".join(self._answers), b"".join(self._failures)
        self._answers, self._failures = [], []
        self._watch.add(self._segment_rows)
        self._segment_bytes = self._segment_rows = 0
        if answers or deferrals:
            self._writer.submit(partial(self._write, answers, failures, journal, deferrals))

    def _write(
        self,
        answers: bytes,
        failures: bytes,
        journal: Sequence[tuple[int, str, str]],
        deferrals: Sequence[Deferral],
        connection: Connection,
    ) -> None:
        batch_id = self._batch.id
        if answers:
            copy_packed(connection, SQL["copy_outcomes"], answers)
            lanes, completed, others = zip(*journal, strict=True)
            told = {"batch": batch_id, "lanes": list(lanes), "completed": list(completed), "others": list(others)}
            connection.execute(SQL["add_journal"], told)
        if failures:
            copy_packed(connection, SQL["copy_attempts"], failures)
        if deferrals:
            connection.execute(
                SQL["add_deferrals"],
                {
                    "batch": batch_id,
                    "owner": self._owner,
                    "lanes": [deferral.lane.id for deferral in deferrals],
                    "pools": [deferral.lane.pool for deferral in deferrals],
                    "routes": [deferral.lane.route for deferral in deferrals],
                    "ordinals": [multirange(deferral.ordinals) for deferral in deferrals],
                    "attempts": [deferral.attempt for deferral in deferrals],
                    "due": [_moment(deferral.due_at) for deferral in deferrals],
                },
            )

    def _check_outcomes(self) -> None:
        """Compare what the table holds with what the source said."""
        lanes = [lane.id for lane in self._lanes.values()]
        found: dict[str, int] = dict(self._target.execute(SQL["count_outcomes"], {"lanes": lanes}).fetchall())
        stored = (found.get("completed", 0), found.get("failed", 0))
        duplicates = self._left.get("second rows for one line", 0)
        told = (self._batch.completed, self._batch.failed)
        if (
            sum(stored) > sum(told)
            or sum(told) - sum(stored) > duplicates
            or sum(found.values()) != self._figures.settled
        ):
            raise PenstockError(
                f"{batch_public_id(self._batch.id)}: the source has {told[0]:,} completed and {told[1]:,} failed"
                f" requests, {stored[0]:,} and {stored[1]:,} would be stored",
                hint="Nothing of this batch was imported. Please report this.",
            )

    def _insert(self, file_id: UUID | None, total: int, ending: Ending) -> None:
        batch, figures = self._batch, self._figures
        output_file_id = None if batch.output_deleted else batch.output_file_id or new_id()
        error_file_id = None if batch.error_deleted else batch.error_file_id or new_id()
        deadline = ending.deadline(batch, self._wishes.extend)
        about: dict[str, Any] = {
            "id": batch.id,
            "batch": batch.id,
            "owner": self._owner,
            "file_id": file_id,
            "endpoint": batch.endpoint,
            "completion_window": batch.completion_window,
            "window_s": None if batch.expires_at is None else (batch.expires_at - batch.created_at).total_seconds(),
            "metadata": metadata_of(batch.metadata),
            "deadline": deadline or "infinity",
            "total": total,
            "created_at": batch.created_at,
            **ending.moments,
            "problems": problems_of(ending),
            "output_file_id": output_file_id,
            "error_file_id": error_file_id,
            **ending.frozen(figures),
        }
        self._target.execute(SQL["insert_batch"], about)
        self._insert_lanes(about, ending)
        if ending.ended_at is None:
            self._target.execute(SQL["add_progress"], {"id": batch.id, **{n: getattr(figures, n) for n in _PROGRESS}})
        else:
            error_lines = figures.failed + figures.skipped if file_id is None else total - figures.completed
            result = {
                "ended_at": ending.ended_at,
                "output_lines": figures.completed,
                "error_lines": error_lines,
                "output_bytes": figures.output_bytes,
                "error_bytes": figures.error_bytes,
                "output_expires_at": batch.output_expires_at,
                "error_expires_at": batch.error_expires_at,
            }
            self._target.execute(SQL["insert_results"], {**about, **result})
        said = {"id": batch.id, "kind": "batch", "figures": json.dumps(figures_of(batch))}
        self._target.execute(SQL["record_import"], said)

    def _insert_lanes(self, about: dict[str, Any], ending: Ending) -> None:
        lanes = sorted(self._lanes.values(), key=lambda lane: lane.id)
        running = ending.state == "in_progress"
        self._target.execute(
            SQL["insert_lanes"],
            {
                **about,
                "open": running or ending.state == "completed",
                "ended": not running and ending.state != "completed",
                "ids": [lane.id for lane in lanes],
                "pools": [lane.pool for lane in lanes],
                "routes": [lane.route for lane in lanes],
                "endpoints": [lane.endpoint for lane in lanes],
                "sources": [lane.source_id for lane in lanes],
                "source_lanes": [lane.source_lane for lane in lanes],
                "nexts": [lane.next for lane in lanes],
                "totals": [lane.seen for lane in lanes],
            },
        )
        if not running:
            self._target.execute(SQL["hold_deferrals"], {"batch": self._batch.id})

    def _after(self, total: int, ending: Ending) -> dict[str, int]:
        figures = self._figures
        rest = "cancelled" if ending.derives_rest else "pending"
        done = {"completed": figures.completed, "failed": figures.failed, "skipped": figures.skipped}
        return {rest: total - figures.settled, **done}


_PROGRESS = (
    *("completed", "failed", "skipped", "retried", "output_bytes", "error_bytes"),
    *("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens"),
)


def _moment(sent: int) -> datetime | None:
    """A time as PostgreSQL sends it; None for the beginning or the end of time, and for what Python cannot hold."""
    if sent <= NO_WAIT or sent >= 2**63 - 1:
        return None
    try:
        return datetime.fromtimestamp(_EPOCH_S + sent / 1_000_000, UTC)
    except (OverflowError, OSError, ValueError):
        return None

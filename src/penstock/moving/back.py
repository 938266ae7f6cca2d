"""The way back: what Penstock has answered, and what is left to do, as rows of the old system.

Each batch is written in one transaction. It is paused here before that, and marked as handed back after it, so that at
no moment both systems would call for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice, zip_longest
from time import monotonic
from typing import Any, NamedTuple
from uuid import NAMESPACE_OID, UUID, uuid5

from psycopg import Connection, Rollback

from penstock.db import sql
from penstock.errors import PenstockError, UsageError
from penstock.model import BatchState, OutcomeState, batch_public_id, public_id
from penstock.moving.old import OldDatabase
from penstock.moving.report import BatchLine, Report
from penstock.moving.rows import IMPORTED
from penstock.moving.target import SQL as MOVING
from penstock.moving.watch import Watch

_SQL = sql.load("penstock.moving", "back.sql")
_PAUSE = sql.load("penstock.batches", "steer.sql")["pause_if_running"]


_PAGE = 2_000
"""Requests that are written at a time."""


class _Batch(NamedTuple):
    id: UUID
    file_id: UUID | None
    state: str
    endpoint: str | None
    completion_window: str | None
    metadata: Any
    owner: str
    created_at: datetime
    expires_at: datetime | None
    cancelling_at: datetime | None
    completed_at: datetime | None
    failed_at: datetime | None
    cancelled_at: datetime | None
    output_file_id: UUID | None
    error_file_id: UUID | None
    total: int


@dataclass(frozen=True, slots=True)
class BackWishes:
    """How batches are handed back."""

    only: Sequence[UUID] = ()
    base_url: str | None = None
    """Endpoint of requests that the old system has no template for."""
    dry_run: bool = False


def check_stopped(here: Connection, grace_s: float) -> None:
    """Raise if Penstock's own workers seem alive."""
    alive = here.execute(_SQL["list_live_workers"], {"grace_s": grace_s}).fetchall()
    if alive:
        pool, host, pid, silent_s = alive[0]
        raise PenstockError(
            f"{len(alive)} processes of Penstock are at work: {pool} on {host} (process {pid}) was heard of"
            f" {silent_s:.0f} s ago",
            hint="Stop the servers and workers first: what they answer while batches are handed back would be lost.",
        )


class HandBack:
    """The way back, under way."""

    def __init__(self, here: Connection, old: OldDatabase, wishes: BackWishes, watch: Watch) -> None:
        self._here = here
        self._old = old
        self._wishes = wishes
        self._watch = watch
        self._report = Report(dry_run=wishes.dry_run)

    def run(self) -> Report:
        began = monotonic()
        ended = self._old.ended()
        only = list(self._wishes.only) or None
        for batch_id, state, imported_at, reruns in self._here.execute(_SQL["list_batches"], {"only": only}).fetchall():
            if ended.get(batch_id) and not self._has_news(batch_id, imported_at, reruns):
                continue
            if not self._wishes.dry_run and not BatchState(state).terminal:
                self._stop(batch_id)
            self._hand_back(batch_id, there=batch_id in ended)
        self._report.seconds = monotonic() - began
        self._report.rows = self._watch.done
        return self._report

    def _has_news(self, batch_id: UUID, imported_at: datetime | None, reruns: int) -> bool:
        """Whether Penstock has settled anything of a batch that ended in the old system."""
        if imported_at is None or reruns:
            return True
        about = {"id": batch_id, "imported_at": imported_at}
        return bool(self._here.execute(MOVING["has_settled_since"], about).fetchall()[0][0])

    def _stop(self, batch_id: UUID) -> None:
        with self._here.transaction():
            self._here.execute(MOVING["hold_batch_if_there"], {"id": batch_id})
            self._here.execute(_PAUSE, {"id": batch_id, "owner": None, "now": None})
            self._here.execute(_SQL["take_leases"], {"id": batch_id})

    def _hand_back(self, batch_id: UUID, *, there: bool) -> None:
        with self._here.transaction(), self._old.connection.transaction():
            batch = _Batch(*self._here.execute(_SQL["read_batch"], {"id": batch_id}).fetchall()[0])
            if batch.file_id is None:
                self._report.left_behind["batches whose file was deleted: the old system has them as it had"] += 1
                return
            before = self._old.states(batch_id)
            source_id = self._write_file(batch.file_id)
            if not there:
                self._write_batch(batch)
            self._old.begin_requests()
            rows = self._requests(batch, batch.file_id, source_id)
            while page := list(islice(rows, _PAGE)):
                self._old.add_requests(page)
                self._watch.add(len(page))
            self._old.apply(batch_id)
            self._old.end_batch(batch_id, _moments(batch))
            after = self._old.states(batch_id)
            self._report.batches.append(BatchLine(batch_id, "handed back", batch.state, before, after))
            if self._wishes.dry_run:
                raise Rollback
        if not self._wishes.dry_run:
            self._here.execute(_SQL["mark_handed_back"], {"id": batch_id, "kind": "batch"})

    # -- what is written

    def _write_file(self, file_id: UUID) -> int:
        """Make the file in the old system, if it has none; returns the source id that it has here."""
        (found,) = self._here.execute(_SQL["read_file"], {"id": file_id}).fetchall()
        _, source_id, filename, size, owner, created_at, expires_at, _ = found
        if self._old.has_file(file_id):
            return int(source_id)
        if self._wishes.base_url is None:
            raise UsageError(
                f"{public_id('file', file_id)} was made here, and the old system needs an endpoint for its requests",
                hint="Give it with --base-url, or name other batches with --only.",
            )
        row = {
            "id": file_id,
            "name": filename,
            "purpose": "batch",
            "size_bytes": size,
            "status": "processed",
            "uploaded_by": owner,
            "created_at": created_at,
            "expires_at": expires_at,
        }
        self._old.insert("files", row)
        listed = self._here.execute(_SQL["list_targets"], {"source_id": source_id}).fetchall()
        targets = {lane: (path, model) for lane, path, model in listed}
        lines = self._stream("read_lines", {"source_id": source_id})
        self._old.add_templates(
            {
                "id": uuid5(NAMESPACE_OID, f"{file_id} {line}"),
                "file_id": file_id,
                "line_number": line,
                "custom_id": custom_id,
                "endpoint": self._wishes.base_url,
                "method": "POST",
                "path": targets[lane][0],
                "body": body.decode(),
                "model": targets[lane][1],
                "api_key": "",
            }
            for line, custom_id, lane, body in lines
        )
        return int(source_id)

    def _write_batch(self, batch: _Batch) -> None:
        row = {
            "id": batch.id,
            "file_id": batch.file_id,
            "endpoint": batch.endpoint,
            "completion_window": batch.completion_window or "24h",
            "metadata": json.dumps(batch.metadata),
            "created_by": batch.owner,
            "created_at": batch.created_at,
            "expires_at": batch.expires_at,
            "total_requests": batch.total,
        }
        self._old.insert("batches", row)

    def _requests(self, batch: _Batch, file_id: UUID, source_id: int) -> Iterator[tuple[Any, ...]]:
        """What each line of the batch's file is to be in the old system."""
        lanes = self._here.execute(MOVING["list_lanes"], {"id": batch.id}).fetchall()
        outcomes = self._stream("read_outcomes", {"lanes": [lane[0] for lane in lanes]})
        listed = self._here.execute(_SQL["list_targets"], {"source_id": source_id}).fetchall()
        models = {lane: model for lane, _, model in listed}
        known = self._stream("read_line_numbers", {"source_id": source_id})
        outcome = next(outcomes, None)
        # Requests without an outcome: cancelled with their batch, or to be run by the old system.
        rest = ("pending", None) if batch.cancelled_at is None else ("canceled", batch.cancelled_at)
        lines = zip_longest(self._old.lines(file_id), known, fillvalue=(0, None, None))
        for (line, template_id, *_), (stored, custom_id, lane) in lines:
            if line != stored:
                raise PenstockError(
                    f"{public_id('file', file_id)} has not the same lines in both systems: {stored} here, {line} there",
                    hint=f"Lines were added or removed in the old system. {batch_public_id(batch.id)} was not written.",
                )
            while outcome is not None and outcome[0] < line:
                outcome = next(outcomes, None)
            about = (template_id, custom_id, models[lane])
            if outcome is None or outcome[0] != line:
                state, at = rest
                yield *about, True, state, None, None, None, None, at
            elif (row := _answered(outcome)) is not None:
                yield *about, *row

    def _stream(self, name: str, parameters: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
        """Rows of a statement, a few at a time, while others are read on the same connection."""
        with self._here.cursor(f"back_{name}", binary=True) as cursor:
            cursor.itersize = 500
            cursor.execute(_SQL[name], parameters)
            yield from cursor


def _moments(batch: _Batch) -> dict[str, Any]:
    return {
        "cancelling_at": batch.cancelling_at or batch.cancelled_at,
        "completed_at": batch.completed_at,
        "failed_at": batch.failed_at,
        "cancelled_at": batch.cancelled_at,
    }


def _answered(outcome: Sequence[Any]) -> tuple[Any, ...] | None:
    """Whether it is Penstock's own, state, retries, status, answer, error and time; None for a request that the old
    system had not run, and that its own row tells better."""
    _, lease_id, state, status, attempts, finished_at, code, message, response = outcome
    ours = lease_id != IMPORTED
    if not ours and state == OutcomeState.SKIPPED:
        return None
    completed = state == OutcomeState.COMPLETED
    error = None if completed else message or code or state
    answer = None if response is None else response.decode()
    return ours, "completed" if completed else "failed", max(attempts - 1, 0), status, answer, error, finished_at

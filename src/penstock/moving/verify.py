"""Both sides read again and compared: every line of every file, every answer of every batch, by digest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any
from uuid import UUID

from psycopg import Connection, IsolationLevel

from penstock.model import OutcomeState, batch_public_id, public_id, request_public_id
from penstock.moving.batch_import import BatchWishes
from penstock.moving.importing import Plan
from penstock.moving.report import Report
from penstock.moving.rows import IMPORTED, Answer, LineOrder, answer_of, custom_id_of
from penstock.moving.source import RequestState, Source, SourceFile
from penstock.moving.target import SQL
from penstock.moving.watch import Watch

_MOST_TOLD = 100
"""Differences that are told one by one."""


class Verification:
    """Compares a source with what was imported of it. Answers that Penstock has given since are its own."""

    def __init__(self, source: Source, target: Connection, plan: Plan, wishes: BatchWishes, watch: Watch) -> None:
        self._source = source
        self._target = target
        self._plan = plan
        self._wishes = wishes
        self._watch = watch
        self._report = plan.report

    def run(self) -> Report:
        self._watch.expect(self._plan.rows)
        self._target.isolation_level = IsolationLevel.REPEATABLE_READ
        for file in self._plan.files:
            with self._source.snapshot(), self._target.transaction():
                self._compare_file(file)
        for batch in self._plan.batches:
            with self._source.snapshot(), self._target.transaction():
                self._compare_batch(batch.id)
        self._target.isolation_level = None
        return self._report

    def _differ(self, what: str) -> None:
        self._report.verified["differences"] += 1
        if len(self._report.differences) < _MOST_TOLD:
            self._report.differences.append(what)

    # -- files

    def _compare_file(self, file: SourceFile) -> None:
        name = public_id("file", file.id)
        found = self._target.execute(SQL["find_file"], {"id": file.id}).fetchone()
        if found is None:
            if self._target.execute(SQL["read_import"], {"id": file.id}).fetchone() is None:
                self._differ(f"{name}: not imported")
            return
        stored = self._stream("read_templates_in_order", {"source_id": found[0]})
        order, count = LineOrder(), 0
        for line in self._source.lines(file.id):
            number = order.next(line.number)
            expected = (number, custom_id_of(line.custom_id, number).decode(), line.body)
            row = next(stored, None)
            if row is None or _digest(*row) != _digest(*expected):
                self._differ(f"{name} line {number}: differs from template {UUID(bytes=line.id)}")
            count += 1
        if next(stored, None) is not None:
            self._differ(f"{name}: has more lines than the source")
        self._report.verified.update(files=1, lines=count)
        self._watch.add(count)

    # -- batches

    def _compare_batch(self, batch_id: UUID) -> None:
        name = batch_public_id(batch_id)
        batch = self._source.batch(batch_id)
        found = self._target.execute(SQL["read_counts"], {"id": batch_id}).fetchone()
        if batch is None:
            return
        if found is None:
            if self._target.execute(SQL["read_import"], {"id": batch_id}).fetchone() is None:
                self._differ(f"{name}: not imported")
            return
        _, file_id, owner, _, completed, failed, _ = found
        if owner != (batch.owner or self._wishes.default_owner):
            self._differ(f"{name}: belongs to another owner")
        answers = self._answers(batch_id, file_id, batch.endpoint)
        counts = self._compare_answers(batch_id, answers)
        if completed < counts[OutcomeState.COMPLETED] or failed < counts[OutcomeState.FAILED]:
            self._differ(
                f"{name}: its figures say {completed:,} completed and {failed:,} failed, its rows say otherwise"
            )
        told = (batch.completed, batch.failed)
        if sum(counts.values()) + self._twice != sum(told):
            self._differ(f"{name}: the source has {sum(told):,} answers, {sum(counts.values()):,} are here")
        self._report.verified.update(batches=1, answers=sum(counts.values()))

    def _answers(
        self, batch_id: UUID, file_id: UUID | None, endpoint: str | None
    ) -> Iterator[tuple[int, bytes, Answer]]:
        """(line, id, answer) of everything that the source has answered, in the order of lines."""
        order, last = LineOrder(), b""
        self._twice = 0
        if file_id is not None:
            for request in self._source.requests_of_file(batch_id, file_id):
                if request.id == last:
                    self._twice += request.state in (RequestState.COMPLETED, RequestState.FAILED)
                    continue
                last = request.id
                line = order.next(request.number)
                if (answer := answer_of(request, line, None)) is not None:
                    yield line, request.id, answer
        for request in self._source.requests_without_line(batch_id, file_id, endpoint):
            line = order.next(request.number if file_id is None else 0)
            if (answer := answer_of(request, line, None)) is not None:
                yield line, request.id, answer

    def _compare_answers(self, batch_id: UUID, answers: Iterator[tuple[int, bytes, Answer]]) -> dict[OutcomeState, int]:
        lanes = [row[0] for row in self._target.execute(SQL["list_lanes"], {"id": batch_id}).fetchall()]
        stored = self._stream("read_outcomes_in_order", {"lanes": lanes})
        counts = {OutcomeState.COMPLETED: 0, OutcomeState.FAILED: 0}
        row = next(stored, None)
        for line, key, answer in answers:
            while row is not None and row[0] < line:
                self._surplus(batch_id, row)
                row = next(stored, None)
            counts[answer.state] += 1
            if row is None or row[0] != line:
                self._differ(f"{request_public_id(batch_id, line)}: the answer of request {_id(key)} is not here")
                continue
            if row[1] == IMPORTED and _digest(*row[2:]) != _digest(*_columns(answer)):
                self._differ(f"{request_public_id(batch_id, line)}: differs from the answer of request {_id(key)}")
            row = next(stored, None)
            if sum(counts.values()) % 1_000 == 0:
                self._watch.add(1_000)
        while row is not None:
            self._surplus(batch_id, row)
            row = next(stored, None)
        return counts

    def _surplus(self, batch_id: UUID, row: tuple[Any, ...]) -> None:
        """An outcome that the source has no answer for: Penstock's own, or a request that was never run."""
        if row[1] == IMPORTED and row[2] in (OutcomeState.COMPLETED, OutcomeState.FAILED):
            self._differ(f"{request_public_id(batch_id, row[0])}: is not in the source")

    def _stream(self, name: str, parameters: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
        with self._target.cursor(binary=True) as cursor:
            yield from cursor.stream(SQL[name], parameters, size=100)


def _columns(answer: Answer) -> tuple[Any, ...]:
    return (
        answer.state.value,
        answer.custom_id.decode(),
        answer.status,
        answer.attempts,
        answer.error_code,
        answer.error_message,
        answer.response,
    )


def _digest(*values: Any) -> bytes:
    """Digest of some values; each is told apart from its neighbours, and NULL from nothing."""
    digest = hashlib.sha256()
    for value in values:
        data = value if isinstance(value, bytes) else repr(value).encode()
        digest.update(b"%d:" % len(data))
        digest.update(data)
    return digest.digest()


def _id(key: bytes) -> UUID:
    return UUID(bytes=key)

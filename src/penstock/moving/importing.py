"""The import as a whole: what there is to bring, whether it may be brought now, and one step after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from time import monotonic
from uuid import UUID

from psycopg import Connection

from penstock.config import IntakeLimits
from penstock.errors import PenstockError, UsageError
from penstock.model import batch_public_id
from penstock.moving.batch_import import BatchWishes, import_batch
from penstock.moving.file_import import import_file
from penstock.moving.report import BatchLine, Report
from penstock.moving.source import Activity, ListedBatch, Source, SourceFile
from penstock.moving.standing import Standing
from penstock.moving.target import SQL
from penstock.moving.watch import Watch

QUIET_S = 600.0
"""Seconds without a claim, a start or an answer after which the source's workers are taken for stopped."""

_BROKEN = frozenset({"error", "failed", "uploading", "deleted"})
"""States of files of which not all lines may be there."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What there is to bring."""

    files: list[SourceFile]
    batches: list[ListedBatch]
    report: Report

    @property
    def rows(self) -> int:
        return sum(file.lines for file in self.files) + sum(batch.requests for batch in self.batches)


def make_plan(source: Source, only: Collection[UUID], serves: Callable[[str], bool]) -> Plan:
    """List what is to be brought, all of it or some batches; note what stays behind."""
    report = Report()
    with source.snapshot():
        files, batches = source.files(), source.batches()
        outside, lost, orphans = source.left_behind()
        models = source.open_models()
    unknown = set(only) - {batch.id for batch in batches}
    if unknown:
        raise UsageError(
            f"the source has no batch {', '.join(map(str, sorted(unknown)))}", hint="Check --only and --schema."
        )
    chosen = [batch for batch in batches if not only or batch.id in only]
    left = report.left_behind
    left["deleted batches"] = sum(batch.deleted for batch in chosen)
    left["requests of deleted batches"] = sum(batch.requests for batch in chosen if batch.deleted)
    chosen = [batch for batch in chosen if not batch.deleted]
    if not only:
        left["requests outside batches"] = outside
        left["requests of batches that are not there"] = lost
        left["templates without a file"] = orphans
    results = {file_id for batch in batches for file_id in (batch.output_file_id, batch.error_file_id)}
    kept = _choose_files(files, chosen, results, bool(only), left)
    report.notes["API keys stored with requests, not taken over: providers have their own"] = sum(f.keys for f in kept)
    for model, count in models.items():
        if not serves(model):
            report.notes[f"requests to be run for {model!r}, which no provider serves"] = count
    return Plan(kept, chosen, report)


def _choose_files(
    files: list[SourceFile],
    batches: list[ListedBatch],
    results: Collection[UUID | None],
    only_needed: bool,
    left: Counter[str],
) -> list[SourceFile]:
    """Files that are brought. Files of results come with their batches."""
    needed = {batch.file_id for batch in batches}
    running = {batch.file_id for batch in batches if batch.pending or batch.claimed or batch.processing}
    kept: list[SourceFile] = []
    for file in files:
        if file.id in results or (only_needed and file.id not in needed):
            continue
        if file.deleted:
            left["deleted files"] += 1
            left["lines of deleted files"] += file.lines
        elif file.expired and file.id not in running:
            left["expired files"] += 1
            left["lines of expired files"] += file.lines
        elif file.status in _BROKEN and file.id not in running:
            left[f"files in state {file.status!r}"] += 1
        elif file.lines == 0 and file.purpose != "batch":
            left[f"files for {file.purpose!r} without requests"] += 1
        else:
            kept.append(file)
    return kept


def check_quiet(activity: Activity) -> None:
    """Raise if the source's workers seem alive."""
    quiet_s = activity.quiet_s
    if quiet_s is None or quiet_s >= QUIET_S:
        return
    raise PenstockError(
        f"the source's workers seem alive: {activity.claimed:,} requests are claimed and {activity.processing:,} in"
        f" process, and the last was claimed, begun or answered {max(quiet_s, 0):,.0f} s ago",
        hint=f"Stop them and wait {QUIET_S / 60:.0f} minutes; or, if you know that they are stopped, add"
        " --workers-stopped. For a rehearsal while they run: what they answer later is brought by the next import.",
    )


class Import:
    """An import under way."""

    def __init__(
        self, source: Source, target: Connection, plan: Plan, wishes: BatchWishes, limits: IntakeLimits, watch: Watch
    ) -> None:
        self._source = source
        self._target = target
        self._plan = plan
        self._wishes = wishes
        self._limits = limits
        self._watch = watch
        self._report = plan.report

    def run(self) -> Report:
        """Bring files, then batches, each in a transaction of its own."""
        began = monotonic()
        known = {row[0] for row in self._target.execute(SQL["list_imported_files"]).fetchall()}
        self._watch.expect(self._plan.rows)
        for file in self._plan.files:
            if file.id in known:
                self._skip_file(file)
            else:
                self._bring_file(file)
        for batch in self._plan.batches:
            self._bring_batch(batch)
        self._report.seconds = monotonic() - began
        self._report.rows = self._watch.done
        return self._report

    def _skip_file(self, file: SourceFile) -> None:
        self._watch.expect(-file.lines)
        there = self._target.execute(SQL["find_file"], {"id": file.id}).fetchone()
        self._report.files["already here" if there is not None else "deleted here"] += 1
        if there is not None and there[1] != file.lines:
            raise PenstockError(
                f"file {file.id} had {there[1]:,} lines when it was imported and has {file.lines:,} in the source now",
                hint="A file that batches run over does not change. Delete it here first if it is to be imported anew.",
            )

    def _bring_file(self, file: SourceFile) -> None:
        owner = file.owner or self._wishes.default_owner
        figures = import_file(self._source, self._target, file, owner, self._limits, self._watch)
        if figures is None:
            self._report.files["already here"] += 1
            return
        self._report.files.update(imported=1, lines=figures.lines, body_bytes=figures.body_bytes)
        self._report.notes["lines without a custom id, now named after their number"] += figures.named

    def _bring_batch(self, batch: ListedBatch) -> None:
        standing, imported = import_batch(self._source, self._target, batch.id, self._wishes, self._watch)
        line = BatchLine(batch.id, standing)
        self._report.batches.append(line)
        if standing is Standing.CONFLICT:
            self._report.differences.append(
                f"{batch_public_id(batch.id)}: the source has changed since it was imported, and Penstock has worked on"
                " it since: nothing was changed here"
            )
        if standing not in (Standing.NEW, Standing.REPLACED):
            self._watch.expect(-batch.requests)
        if imported is None:
            return
        line.state, line.before, line.after = imported.state, imported.before, imported.after
        line.answer_bytes, line.notes = imported.answer_bytes, imported.notes
        self._report.left_behind.update(imported.left)

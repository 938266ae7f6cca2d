"""What an import would bring, from the source alone."""

from __future__ import annotations

from penstock.moving.ending import ending_of
from penstock.moving.importing import Plan
from penstock.moving.report import BatchLine, Report
from penstock.moving.source import Source


def foresee(source: Source, plan: Plan) -> Report:
    """Report what an import of all this would do, if nothing of it was imported before."""
    report = plan.report
    report.dry_run = True
    kept = {file.id for file in plan.files}
    report.files.update(
        found=len(plan.files),
        lines=sum(file.lines for file in plan.files),
        body_bytes=sum(file.body_bytes for file in plan.files),
    )
    for listed in plan.batches:
        with source.snapshot():
            batch = source.batch(listed.id)
        if batch is None:
            continue
        ending = ending_of(batch, has_file=batch.file_id in kept)
        rest = "cancelled" if ending.derives_rest else "pending" if ending.state == "in_progress" else "skipped"
        waiting = batch.open + (batch.canceled if ending.derives_rest else 0)
        after = {rest: waiting, "completed": batch.completed, "failed": batch.failed}
        if not ending.derives_rest:
            after["skipped"] = after.get("skipped", 0) + batch.canceled
        notes = ending.notes(batch, listed.requests)
        line = BatchLine(batch.id, "found", ending.state, batch.before, after, listed.answer_bytes, notes)
        report.batches.append(line)
    return report

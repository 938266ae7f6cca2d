"""Summary of a run that has ended, for a person or as JSON."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TextIO

import click

from penstock.batches.error_groups import list_error_groups
from penstock.batches.read import Batch
from penstock.cli.figures import count_text
from penstock.cli.known_run import missed, public_name
from penstock.cli.plan import Plan
from penstock.cli.progress import duration
from penstock.db.pool import Connection
from penstock.errors import ExitCode, plain
from penstock.export.jsonl import Exported
from penstock.model import Counts

# Kinds of failures that are told, and kinds of a batch that are read: of more, it is the most frequent of these.
_KINDS_TOLD = 3
_KINDS_READ = 1_000
_REASON_CHARS = 200


@dataclass(frozen=True, slots=True)
class Failures:
    """Failures of one kind: how many, and what one of them says."""

    count: int
    reason: str


async def read_failures(connection: Connection, batches: Sequence[Batch]) -> list[Failures]:
    """Read why rows of a run failed: the kinds with most rows."""
    counts: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    for batch in batches:
        for group in await list_error_groups(connection, batch.id, None, _KINDS_READ):
            said = group.message if group.message.startswith("HTTP ") else f"{group.code}: {group.message}"
            counts[group.fingerprint] += group.rows
            reasons[group.fingerprint] = plain(said, _REASON_CHARS)
    return [Failures(count, reasons[kind]) for kind, count in counts.most_common(_KINDS_TOLD)]


def print_summary(
    plan: Plan,
    batches: Sequence[Batch],
    exported: Exported | None,
    seconds: float,
    code: ExitCode,
    out: TextIO,
    reasons: Sequence[str] = (),
    failures: Sequence[Failures] = (),
) -> None:
    """Print the figures, the files written, and what can be done now. It goes to standard error where the answers go to
    standard output."""
    file = sys.stderr if plan.to_stdout else out
    if plan.as_json:
        print(json.dumps(_as_dict(batches, exported, seconds, code, reasons, failures)), file=file, flush=True)
        return
    counts = add_counts(batches)
    unit = "request" if plan.rows is None else "row"
    click.echo(f"{_verb(code)} in {duration(seconds)}: {_figures(counts, unit)}", file=file)
    if exported is not None:
        _print_files(plan, counts, exported, file)
    for batch in batches:
        click.echo(f"  {'job' if batch.dialect == 'job' else 'batch':<7} {public_name(batch)}", file=file)
    for reason in reasons:
        click.echo(f"  reason  {reason}", err=True)
    # What the reason of a pause says is not said twice.
    for kind in () if reasons else failures:
        click.echo(f"  reason  {kind.count:,} × {kind.reason}", file=file)
    for line in _what_next(plan, batches, exported, code):
        click.echo(line, file=file)


def _print_files(plan: Plan, counts: Counts, exported: Exported, file: TextIO) -> None:
    if not plan.to_stdout:
        noun = "line" if plan.rows is None else "row"
        click.echo(f"  output  {exported.output}  ({count_text(exported.output_lines, noun)})", file=file)
    if exported.errors is not None:
        # A row that its processor left out is listed there too, and is no error.
        label = "errors" if exported.error_lines > counts.skipped else "skipped"
        click.echo(f"  {label:<7} {exported.errors}  ({count_text(exported.error_lines, 'line')})", file=file)


def _what_next(plan: Plan, batches: Sequence[Batch], exported: Exported | None, code: ExitCode) -> list[str]:
    if not plan.command:
        return []
    name, lines = public_name(batches[-1]), []
    answers = "answers.jsonl" if plan.rows is None else "answers.csv"
    if code is ExitCode.PAUSED:
        lines = ["Nothing is lost. Mend the cause, then go on with the same command:", f"  {plan.command_with()}"]
    elif code is ExitCode.INTERRUPTED:
        lines = ["To go on:", f"  {plan.command_with()}"]
    elif any(missed(batch) for batch in batches):
        lines = ["To run only those again that failed:", f"  {plan.command_with('--retry-failed')}"]
        if plan.to_stdout and plan.rows is None:
            lines += ["To see why they failed:", f"  {plan.other_command('show', name)}"]
    if code in (ExitCode.PAUSED, ExitCode.INTERRUPTED) and exported is None and add_counts(batches).settled:
        lines += [
            "To have what is there so far:",
            f"  {plan.other_command('export', name, '-o', f'partial-{answers}')}",
        ]
    return lines


def add_counts(batches: Sequence[Batch]) -> Counts:
    """Figures of all batches of a run."""
    return Counts(**{field.name: sum(getattr(one.counts, field.name) for one in batches) for field in fields(Counts)})


def _verb(code: ExitCode) -> str:
    return {ExitCode.PAUSED: "paused", ExitCode.INTERRUPTED: "interrupted"}.get(code, "done")


def _figures(counts: Counts, unit: str) -> str:
    parts = [count_text(counts.total, unit), f"{counts.completed:,} completed"]
    for name in ("failed", "not_found", "skipped", "cancelled", "expired", "in_flight", "pending", "retried"):
        figure = getattr(counts, name)
        if figure:
            parts.append(f"{figure:,} {name.replace('_', ' ')}")
    return ", ".join(parts)


def _as_dict(
    batches: Sequence[Batch],
    exported: Exported | None,
    seconds: float,
    code: ExitCode,
    reasons: Sequence[str],
    failures: Sequence[Failures],
) -> dict[str, object]:
    return {
        "batch": public_name(batches[-1]),
        "state": batches[-1].state,
        **asdict(add_counts(batches)),
        "seconds": round(seconds, 3),
        "output": str(exported.output) if exported else None,
        "errors": str(exported.errors) if exported and exported.errors else None,
        "reasons": list(reasons),
        "failures": [asdict(kind) for kind in failures],
        "exit_code": code,
    }

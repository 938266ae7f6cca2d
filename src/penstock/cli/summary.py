"""Summary of a run that has ended, for a person or as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import click

from penstock.batches.read import Batch
from penstock.cli.progress import duration
from penstock.errors import ExitCode
from penstock.export.jsonl import Exported
from penstock.model import Counts, batch_public_id


def print_summary(
    batch: Batch,
    exported: Exported | None,
    seconds: float,
    code: ExitCode,
    *,
    as_json: bool,
    reasons: list[str] | None = None,
    unit: str = "request",
) -> None:
    """Print the figures, the files written, and how to go on if the run is not finished."""
    if as_json:
        print(json.dumps(_as_dict(batch, exported, seconds, code, reasons or [])))
        return
    counts = batch.counts
    click.echo(f"{_verb(code)} in {duration(seconds)}: {_figures(counts, unit)}")
    if exported is not None:
        click.echo(
            f"  output  {exported.output}  ({_count(exported.output_lines, 'row' if unit == 'row' else 'line')})"
        )
        if exported.errors is not None:
            click.echo(f"  errors  {exported.errors}  ({_count(exported.error_lines, 'line')})")
    click.echo(f"  batch   {batch_public_id(batch.id)}")
    for reason in reasons or []:
        click.echo(f"  reason  {reason}", err=True)
    if code is ExitCode.PAUSED:
        click.echo("Nothing is lost and no attempt was charged. Mend the cause, then run the same command to go on.")
    elif code is ExitCode.INTERRUPTED:
        click.echo(f"To go on, run the same command again:\n  {_command()}")


def _verb(code: ExitCode) -> str:
    return {ExitCode.PAUSED: "paused", ExitCode.INTERRUPTED: "interrupted"}.get(code, "done")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _figures(counts: Counts, unit: str) -> str:
    parts = [_count(counts.total, unit), f"{counts.completed:,} completed"]
    for name in ("failed", "not_found", "skipped", "cancelled", "expired", "in_flight", "pending", "retried"):
        figure = getattr(counts, name)
        if figure:
            parts.append(f"{figure:,} {name.replace('_', ' ')}")
    return ", ".join(parts)


def _as_dict(
    batch: Batch, exported: Exported | None, seconds: float, code: ExitCode, reasons: list[str]
) -> dict[str, object]:
    return {
        "batch": batch_public_id(batch.id),
        "state": batch.state,
        **asdict(batch.counts),
        "seconds": round(seconds, 3),
        "output": str(exported.output) if exported else None,
        "errors": str(exported.errors) if exported and exported.errors else None,
        "reasons": reasons,
        "exit_code": code,
    }


def _command() -> str:
    import shlex

    return shlex.join(["penstock", *sys.argv[1:]])

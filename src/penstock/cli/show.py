"""`penstock show`: everything known of one batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from penstock.cli.client import CommandContext, Json, client_command, print_json
from penstock.cli.figures import (
    age,
    counts_text,
    error_text,
    has_ended,
    moment,
    print_row,
    problem_lines,
    size_text,
    state_of,
)
from penstock.errors import plain

if TYPE_CHECKING:
    from penstock.client.api import Api


_LISTED = 5
_OF_RUNS = ("asked", "input_bytes", "size", "mtime_ns")
"""Metadata by which `penstock run` knows its input again; nothing for people."""


@click.command(short_help="Show one batch or job: figures, times, problems.")
@click.argument("name", metavar="ID")
@client_command()
async def show(context: CommandContext, name: str) -> None:
    """Show the batch or job ID: its figures and times, the problems for which it could not run, and the first failures.

    ID may be cut short as long as it is unique. With --json, the batch as the API shows it, with `filename`,
    `failures` (requests that failed) and, while it runs, `retried` (attempts that failed) added.
    """
    from penstock.cli.jobs import show_job
    from penstock.cli.lookup import BATCH, JOB, find
    from penstock.cli.ls import read_file

    found = await find(context.api, name, BATCH, JOB)
    if found["id"].startswith(JOB.prefix):
        await show_job(context, found)
        return
    file = await read_file(context.api, found["input_file_id"]) if found["input_file_id"] else None
    failures = await _first(context.api, f"/v1/batches/{found['id']}/results", {"status": "failed"})
    retried = [] if has_ended(found) else await _first(context.api, f"/v1/batches/{found['id']}/attempts", {})
    if context.as_json:
        filename = None if file is None else file["filename"]
        print_json({**found, "filename": filename, "failures": failures, "retried": retried})
        return
    _print(found, file, [_failure_text(failure) for failure in failures], [_attempt_text(one) for one in retried])
    if found["status"] in ("validating", "in_progress"):
        await context.say_idle(found["id"])


async def _first(api: Api, path: str, query: dict[str, str]) -> list[Json]:
    found: list[Json] = (await api.get(path, {**query, "limit": _LISTED}))["data"]
    return found


def _print(batch: Json, file: Json | None, failures: list[str], retried: list[str]) -> None:
    from penstock.cli.progress import duration

    click.echo(f"{batch['id']}  {state_of(batch)}")
    print_row("file", f"{plain(file['filename'])}  {file['id']}" if file else "(deleted)")
    if batch.get("target"):
        print_row("run", plain(batch["target"]))
    print_row("endpoint", f"{batch['endpoint']}" + (f"  model {plain(batch['model'])}" if batch["model"] else ""))
    print_row("requests", counts_text(batch))
    results = batch.get("result_bytes", 0)
    if file is not None or results:
        print_row("size", f"{size_text(file['bytes'] if file else 0)} in, {size_text(results)} out")
    if batch.get("eta_seconds") is not None and not has_ended(batch):
        print_row("ETA", duration(batch["eta_seconds"]))
    usage = batch.get("usage")
    if usage and usage["total_tokens"]:
        cached, thought = (
            usage["input_tokens_details"]["cached_tokens"],
            usage["output_tokens_details"]["reasoning_tokens"],
        )
        print_row(
            "tokens",
            f"{usage['input_tokens']:,} in" + (f" ({cached:,} cached)" if cached else "") + ", "
            f"{usage['output_tokens']:,} out" + (f" ({thought:,} reasoning)" if thought else ""),
        )
    if batch.get("priority"):
        print_row("priority", str(batch["priority"]))
    own = _OF_RUNS if batch.get("target") else ()
    for key, value in sorted((batch["metadata"] or {}).items()):
        if key in own:
            continue
        print_row("metadata", f"{plain(key)}={plain(value)}")
    _print_times(batch)
    for label in ("output", "error"):
        if batch[f"{label}_file_id"]:
            print_row("errors" if label == "error" else label, batch[f"{label}_file_id"])
    for label, lines in (("problems", problem_lines(batch)), ("failed", failures), ("attempts", retried)):
        for number, line in enumerate(lines):
            print_row("" if number else label, line)


def _print_times(batch: Json) -> None:
    print_row("created", f"{moment(batch['created_at'])}  ({age(batch['created_at'])} ago)")
    for field, label in (
        ("in_progress_at", "started"),
        ("paused_at", "paused"),
        ("cancelling_at", "cancelling"),
        ("completed_at", "completed"),
        ("failed_at", "failed"),
        ("expired_at", "expired"),
        ("cancelled_at", "cancelled"),
    ):
        if batch.get(field):
            print_row(label, moment(batch[field]))
    if batch["expires_at"]:
        window = f"{batch['completion_window']}, " if batch["completion_window"] else ""
        print_row("window", f"{window}until {moment(batch['expires_at'])}")


def _failure_text(request: Json) -> str:
    return f"line {request['line']}, {plain(request['custom_id'], 60)}: {plain(error_text(request), 160)}"


def _attempt_text(attempt: Json) -> str:
    who = plain(attempt["custom_id"] or attempt["request_id"] or "(erased)", 60)
    said = f"{attempt['error']['code']}: {attempt['error']['message']}"
    return f"{who}, attempt {attempt['attempt']}, {age(attempt['ended_at'])} ago: {plain(said, 160)}"

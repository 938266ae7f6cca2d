"""`penstock watch`: a batch as it moves, until it ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import click

from penstock.cli.client import CommandContext, Json, client_command, print_json
from penstock.errors import ExitCode

if TYPE_CHECKING:
    from penstock.cli.progress import Display
    from penstock.client.api import Answer, Api


_POLL_S = 1.0
_PATIENCE_S = 300.0
# No events come: from an older server, or through a proxy that holds streams back.
_NO_EVENTS = (404, 405, 406, 501)


@click.command(short_help="Follow a batch or job until it ends.")
@click.argument("name", metavar="ID")
@client_command()
async def watch(context: CommandContext, name: str) -> ExitCode:
    """Follow the batch or job ID until it ends. ID may be cut short as long as it is unique.

    The exit code is the batch's: 0 if every request was completed, 3 if some were not, 2 if the file could not
    be run at all, 4 if it was paused. With --json, a line for every change; the last has the exit code.
    """
    from penstock.cli.figures import exit_code_of
    from penstock.cli.job_watch import watch_job
    from penstock.cli.lookup import BATCH, JOB, find

    found = await find(context.api, name, BATCH, JOB)
    if found["id"].startswith(JOB.prefix):
        return await watch_job(context, found)
    if not _at_rest(found):
        await context.say_idle(found["id"])
    if context.as_json:
        return await print_changes(_follow(context.api, found, None), _at_rest, exit_code_of)
    ended = await watch_until_end(context, found)
    print_end(context, ended)
    return exit_code_of(ended)


async def watch_until_end(context: CommandContext, batch: Json) -> Json:
    """Show the batch's progress until it ends or is paused. Returns the batch as it is then."""
    from penstock.cli.progress import Display

    with Display(quiet=context.as_json) as display:
        display.stage(batch["status"])
        async for now in _follow(context.api, batch, display):
            _show(display, now)
    return now


def print_end(context: CommandContext, batch: Json, *, output: str | None = None) -> None:
    """Print how the batch ended, and what can be done now. With the output `-` all of it goes to standard error:
    standard output is for the results alone."""
    from penstock.cli.figures import counts_text, problem_lines, state_of
    from penstock.cli.progress import duration

    state, name = state_of(batch), batch["id"]
    ended_at = next(
        (batch[f"{s}_at"] for s in ("completed", "failed", "expired", "cancelled") if batch[f"{s}_at"]), None
    )
    lasted = f" after {duration(ended_at - batch['created_at'])}" if ended_at is not None else ""
    figures = counts_text(batch) if state != "failed" else "it could not be run"
    for line in (f"{state}{lasted}: {figures}", *(f"  {problem}" for problem in problem_lines(batch))):
        click.echo(line, err=output == "-")
    if state == "paused":
        context.say(f"To go on: {context.command('resume', name)}")
    elif (batch["output_file_id"] or batch["error_file_id"]) and output is None:
        context.say(f"Results: {context.command('export', name, '-o', 'answers.jsonl')}")
    elif state == "failed":
        context.say("Correct the file, then submit it again.")


async def print_changes(
    states: AsyncIterator[Json], at_rest: Callable[[Json], bool], exit_code: Callable[[Json], ExitCode]
) -> ExitCode:
    """Print an object at every change, one line of JSON each; the last has the exit code, which is returned."""
    shown: Json = {}
    async for now in states:
        if at_rest(now):
            shown = {**now, "exit_code": exit_code(now)}
            print_json(shown)
        elif now != shown:
            shown = now
            print_json(shown)
    return ExitCode(shown["exit_code"])


async def _follow(api: Api, batch: Json, display: Display | None) -> AsyncIterator[Json]:
    """Follow a batch: as it is now and at every change, up to its end or a pause.

    From the server's events; where they do not come or break off, by polling.
    """
    import asyncio

    from penstock.client.api import Refused, Unreachable

    path, events = f"/v1/batches/{batch['id']}", True
    while True:
        yield batch
        if _at_rest(batch):
            return
        if events:
            try:
                async with api.stream(f"{path}/events", accept="text/event-stream") as answer:
                    events = "event-stream" in answer.headers.get("content-type", "")
                    async for batch in _progress(answer):
                        yield batch
                        if _at_rest(batch):
                            return
            except Refused as refusal:
                events = refusal.status not in _NO_EVENTS
            except Unreachable as error:
                if display is not None:
                    display.say(f"{error.message}: trying again")
        await asyncio.sleep(_POLL_S)
        batch = await api.get(path, patience_s=_PATIENCE_S)


async def _progress(answer: Answer) -> AsyncIterator[Json]:
    """Batch objects in the server's events."""
    import json

    from penstock.client.events import read_events

    async for name, data in read_events(answer.pieces):
        if name in ("progress", "done"):
            batch = json.loads(data)
            if "status" in batch:  # the last event of a deleted batch has none
                yield batch
        if name == "done":
            return


def _at_rest(batch: Json) -> bool:
    from penstock.cli.figures import has_ended, state_of

    return has_ended(batch) or state_of(batch) == "paused"


def _show(display: Display, batch: Json) -> None:
    from penstock.cli.figures import state_of
    from penstock.cli.progress import duration

    counts = batch["request_counts"]
    done, total = counts["completed"] + counts["failed"], counts["total"]
    figures = [f"{done:,}/{total:,}", f"{display.rate(done):,.0f}/s"]
    if batch.get("eta_seconds") is not None and done < total:
        figures.append(f"ETA {duration(batch['eta_seconds'])}")
    if (failed := counts["failed"] - batch.get("skipped", 0)) > 0:
        figures.append(f"{failed:,} failed")
    display.show(state_of(batch), done, total or None, "  ".join(figures))

"""`penstock jobs watch`: a job as it moves, until it ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import click

from penstock.cli.client import CommandContext, Json, client_command
from penstock.errors import ExitCode

if TYPE_CHECKING:
    from penstock.cli.progress import Display
    from penstock.client.api import Api

_POLL_S = 1.0
_PATIENCE_S = 300.0

JOB_HINTS = {
    404: "`penstock jobs ls` lists the jobs of this key on this server.",
    409: "`penstock jobs show` tells the job's state.",
}
"""What to do about a server's refusals of commands on jobs."""


@click.command(short_help="Follow a job until it ends.")
@click.argument("job", metavar="JOB")
@client_command(hints=JOB_HINTS)
async def watch(context: CommandContext, job: str) -> ExitCode:
    """Follow JOB until it ends. JOB is an id, which may be cut short as long as it is unique.

    The exit code is the job's: 0 if every row was done or skipped, 3 if some failed, were not found or were not run,
    2 if its file could not be read to the end, 4 if it was paused. With --json, a line for every change; the last has
    the exit code.
    """
    from penstock.cli.lookup import find_job

    return await watch_job(context, await find_job(context.api, job))


async def watch_job(context: CommandContext, found: Json) -> ExitCode:
    """Follow a job that was found."""
    from penstock.cli.figures import job_at_rest, job_exit_code
    from penstock.cli.watch import print_changes

    if not job_at_rest(found):
        await context.say_idle(found["id"])
    if context.as_json:
        return await print_changes(_follow(context.api, found), job_at_rest, job_exit_code)
    ended = await watch_job_until_end(context, found)
    print_job_end(context, ended)
    return job_exit_code(ended)


async def watch_job_until_end(context: CommandContext, job: Json) -> Json:
    """Show the job's progress until it ends or is paused. Returns the job as it is then."""
    from penstock.cli.progress import Display

    with Display(quiet=context.as_json) as display:
        display.stage(job["state"])
        async for now in _follow(context.api, job):
            _show(display, now)
    return now


def print_job_end(context: CommandContext, job: Json, *, output: str | None = None) -> None:
    """Print how the job ended, and what can be done now. With the output `-` all of it goes to standard error:
    standard output is for the sheet alone."""
    from penstock.cli.figures import job_counts_text, job_moment
    from penstock.cli.progress import duration
    from penstock.errors import plain

    lasted = ""
    if job["endedAt"] is not None:
        lasted = f" after {duration(job_moment(job['endedAt']) - job_moment(job['createdAt']))}"
    click.echo(f"{job['state']}{lasted}: {job_counts_text(job)}", err=output == "-")
    if job["ingest"]["problem"] is not None:
        click.echo(f"  {plain(job['ingest']['problem'])}", err=output == "-")
    if job["state"] == "PAUSED":
        context.say(f"To go on: {context.command('jobs', 'resume', job['id'])}")
    elif output is None:
        context.say(f"Its sheet: {context.command('export', job['id'], '-o', 'sheet.xlsx')}")


async def _follow(api: Api, job: Json) -> AsyncIterator[Json]:
    """Follow a job: as it is now and every second, up to its end or a pause."""
    import asyncio

    from penstock.cli.figures import job_at_rest

    while True:
        yield job
        if job_at_rest(job):
            return
        await asyncio.sleep(_POLL_S)
        job = await api.get(f"/api/jobs/{job['id']}", patience_s=_PATIENCE_S)


def _show(display: Display, job: Json) -> None:
    from penstock.cli.progress import duration

    done, total = job["processed"], job["total"]
    figures = [f"{done:,}/{total:,}", f"{display.rate(done):,.0f}/s"]
    if not job["ingest"]["done"]:
        figures.append("reading more rows")
    elif job["etaSeconds"] is not None and done < total:
        figures.append(f"ETA {duration(job['etaSeconds'])}")
    failed = job["failed"] + job["notFound"]
    if failed:
        figures.append(f"{failed:,} failed")
    display.show(job["state"], done, total or None, "  ".join(figures))

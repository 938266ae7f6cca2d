"""`penstock jobs`: tables and images worked off row by row on a server; list, follow, steer and erase them."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.client import CommandContext, Json, client_command, print_json
from penstock.cli.figures import age, count_text, is_run, job_counts_text, job_moment, moment, print_row, size_text
from penstock.cli.job_submit import submit
from penstock.cli.job_watch import JOB_HINTS, watch
from penstock.errors import plain

if TYPE_CHECKING:
    from penstock.client.api import Api

_LIMIT = 20
_LISTED = 5
_PAGE_MAX = 100
_CELL_CHARS = 60
_ROW_CHARS = 400
_UNLUCKY = "ERROR,NOT_FOUND"

_ID = click.argument("job", metavar="JOB")


@click.group(short_help="Do something with every row of a table, on a server.")
def jobs() -> None:
    """Jobs: a table or images in, the same done with every row, a sheet out.

    \b
    penstock jobs submit products.csv --processor price -o prices.xlsx
    penstock export JOB -o sheet.xlsx
    """


jobs.add_command(submit)
jobs.add_command(watch)


# -- looking


@jobs.command(short_help="List jobs, newest first.")
@click.option("--limit", type=click.IntRange(min=1), help=f"How many at most.  [default: {_LIMIT}]")
@click.option("--all", "everything", is_flag=True, help="Every one.")
@client_command(hints=JOB_HINTS)
async def ls(context: CommandContext, limit: int | None, everything: bool) -> None:
    """List jobs, newest first: id, state, progress, age, type and file.

    With --json, one object: {"jobs": [jobs as the API shows them], "has_more": whether there are others}.
    """
    from penstock.cli.lookup import walk_jobs

    most = limit or (None if everything else _LIMIT)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    kept: list[Json] = []
    shown, more = 0, False
    async for job in walk_jobs(context.api, None, _PAGE_MAX if most is None else min(_PAGE_MAX, most + 1)):
        if most is not None and shown >= most:
            more = True
            break
        if context.as_json:
            kept.append(job)
        else:
            _print_job(job, headed=shown > 0, width=width)
        shown += 1
    if context.as_json:
        print_json({"jobs": kept, "has_more": more})
    elif not shown:
        context.say("no jobs yet: `penstock jobs submit FILE --processor NAME` makes one")
    elif more:
        context.say(f"(the newest {shown:,}; --all shows every one)")


def _print_job(job: Json, *, headed: bool, width: int | None) -> None:
    row = "{:<36}  {:<9}  {:<22}  {:>4}  {}"
    if not headed:
        click.echo(row.format("ID", "STATE", "PROGRESS", "AGE", "TYPE AND FILE")[:width])
    failed = job["failed"] + job["notFound"]
    progress = f"{job['processed']:,}/{job['total']:,}" + (f" {failed:,} failed" if failed else "")
    about = f"{plain(job['jobType'], _CELL_CHARS)}  {plain(job['filename'] or '(deleted)')}"
    cells = (job["id"], job["state"], progress if job["total"] else "-", age(job_moment(job["createdAt"])), about)
    click.echo(row.format(*cells)[:width].rstrip())


@jobs.command(short_help="Show one job: figures, times, the first failures.")
@_ID
@client_command(hints=JOB_HINTS)
async def show(context: CommandContext, job: str) -> None:
    """Show JOB: its figures and times, and the first rows that failed. JOB is an id, which may be cut short as long
    as it is unique.

    With --json, the job as the API shows it, with `failures` (rows that failed) added.
    """
    from penstock.cli.lookup import find_job

    await show_job(context, await find_job(context.api, job))


async def show_job(context: CommandContext, found: Json) -> None:
    """Show a job that was found."""
    failures = await _page(context.api, found["id"], _LISTED, {"statuses": _UNLUCKY})
    if context.as_json:
        print_json({**found, "failures": failures["items"]})
        return
    _print_details(found, failures["items"])
    if found["endedAt"] is None and found["state"] != "PAUSED":
        await context.say_idle(found["id"])


def _print_details(job: Json, failures: list[Json]) -> None:
    from penstock.cli.progress import duration

    click.echo(f"{job['id']}  {job['state']}")
    print_row("type", plain(job["jobType"]))
    print_row("file", plain(job["filename"] or "(deleted)"))
    print_row("rows", job_counts_text(job))
    print_row("size", size_text(job["storedBytes"]))
    if not job["ingest"]["done"]:
        print_row("reading", f"{job['ingest']['rows']:,} rows of the file so far")
    if job["ingest"]["problem"] is not None:
        print_row("problem", plain(job["ingest"]["problem"]))
    if job["endedAt"] is None and job["etaSeconds"] is not None:
        print_row("pace", f"{job['ratePerSecond']:,.1f}/s, {duration(job['etaSeconds'])} left")
    if job["columns"]:
        print_row("columns", plain(", ".join(job["columns"])))
    created_at = job_moment(job["createdAt"])
    print_row("created", f"{moment(created_at)}  ({age(created_at)} ago), from {plain(job['client'])}")
    if job["endedAt"] is not None:
        print_row("ended", moment(job_moment(job["endedAt"])))
    for number, item in enumerate(failures):
        print_row("" if number else "failed", f"row {item['row']:,}: {_end_of(item)}")


@jobs.command(short_help="Show rows of a job with their results.")
@_ID
@click.option("--status", metavar="STATUSES", help="Only these: DONE, ERROR, NOT_FOUND, SKIPPED, PENDING, PROCESSING.")
@click.option("--from", "from_row", type=click.IntRange(min=1), default=1, help="First row to show.  [default: 1]")
@click.option("--limit", type=click.IntRange(min=1), help=f"How many at most.  [default: {_LIMIT}]")
@click.option("--all", "everything", is_flag=True, help="Every one.")
@client_command(hints=JOB_HINTS)
async def items(
    context: CommandContext, job: str, status: str | None, from_row: int, limit: int | None, everything: bool
) -> None:
    """Show rows of JOB in their order: number, status, attempts, input, and the result or the error.

    With --json, one line for each row, as the API shows it.
    """
    from penstock.cli.lookup import find_job

    found = await find_job(context.api, job)
    most = limit or (None if everything else _LIMIT)
    narrow: dict[str, str | int] = {"from": from_row}
    if status is not None:
        narrow["statuses"] = status.upper()
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    shown, following = 0, True
    while following and (most is None or shown < most):
        page = await _page(
            context.api, found["id"], _PAGE_MAX if most is None else min(_PAGE_MAX, most - shown), narrow
        )
        for item in page["items"]:
            if context.as_json:
                print_json(item)
            else:
                _print_item(item, headed=shown > 0, width=width)
            shown += 1
        following = page["next"] is not None
        narrow["from"] = page["next"] or 0
    if not shown:
        context.say("no such row")
    elif following:
        context.say(f"(more follow: --from {narrow['from']}, or --all)")


def _print_item(item: Json, *, headed: bool, width: int | None) -> None:
    row = "{:>7}  {:<10}  {:>8}  {}"
    if not headed:
        click.echo(row.format("ROW", "STATUS", "ATTEMPTS", "INPUT -> RESULT")[:width])
    said = _end_of(item)
    shown = f"{_pairs(item['input'])}{' -> ' if said else ''}{said}"
    click.echo(row.format(f"{item['row']:,}", item["status"], item["attempts"], shown)[:width].rstrip())


def _end_of(item: Json) -> str:
    """Result of a row, or its error."""
    if item["result"] is not None:
        return _pairs(item["result"])
    return plain(item["error"] or "", _ROW_CHARS)


def _pairs(columns: Any) -> str:
    """`title=Chair sku=17`: the columns that have a value."""
    import json

    texts = (
        f"{name}={plain(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), _CELL_CHARS)}"
        for name, value in columns.items()
        if value is not None
    )
    return plain(" ".join(texts), _ROW_CHARS)


async def _page(api: Api, name: str, size: int, narrow: dict[str, str | int]) -> Json:
    return await api.get(f"/api/jobs/{name}/items", {"pageSize": size, **narrow})


# -- steering


@jobs.command(short_help="Start no more rows of a job.")
@_ID
@client_command(hints=JOB_HINTS)
async def pause(context: CommandContext, job: str) -> None:
    """Start no more rows of JOB. Calls in flight finish."""
    await steer_job(context, await _find(context, job), "pause")


@jobs.command(short_help="Go on with a paused job.")
@_ID
@client_command(hints=JOB_HINTS)
async def resume(context: CommandContext, job: str) -> None:
    """Go on with the paused JOB."""
    await steer_job(context, await _find(context, job), "resume")


@jobs.command(short_help="End a job; what is done is kept.")
@_ID
@client_command(hints=JOB_HINTS)
async def cancel(context: CommandContext, job: str) -> None:
    """End JOB. Calls in flight finish, results so far are kept, and the other rows are not run."""
    await steer_job(context, await _find(context, job), "cancel")


async def _find(context: CommandContext, text: str) -> Json:
    from penstock.cli.lookup import find_job

    return await find_job(context.api, text)


async def steer_job(context: CommandContext, found: Json, verb: str) -> None:
    """Steer a job that was found, print its state, and say what can be done now."""
    name: str = found["id"]
    job = await context.api.post(f"/api/jobs/{name}/{verb}")
    if context.as_json:
        print_json(job)
        return
    click.echo(f"{name}  {job['state']}: {job_counts_text(job)}")
    if verb == "pause":
        context.say(f"To go on: {context.command('jobs', 'resume', name)}")
    elif verb == "cancel":
        context.say(f"What was done: {context.command('export', name, '-o', 'sheet.xlsx')}")
    else:
        context.say(f"To follow it: {context.command('jobs', 'watch', name)}")
        await context.say_idle(name)


@jobs.command(short_help="Run a job's failed rows again.")
@_ID
@click.option(
    "--status", metavar="STATUSES", default=_UNLUCKY, show_default=True, help="Rows with these, separated by commas."
)
@client_command(hints=JOB_HINTS)
async def retry(context: CommandContext, job: str, status: str) -> None:
    """Run rows of JOB again that failed or were not found. Each keeps its last result until the new one is there.

    With --json, {"operationId": ...}, the operation that does it; of a run that nothing works off, {"id", "rows"}.
    """
    await retry_job(context, await _find(context, job), status)


async def retry_job(context: CommandContext, found: Json, status: str = _UNLUCKY) -> None:
    """Run rows of a job again that was found."""
    name: str = found["id"]
    if is_run(found) and status == _UNLUCKY and (idle := await context.api.say_idle(name)) is not None:
        rows = await context.api.retry_run(name)
        if context.as_json:
            print_json({"id": name, "rows": rows})
        else:
            click.echo(f"{name}  {count_text(rows or 0, 'row')} to run again")
            context.say(idle if rows else "None of its rows has failed.")
        return
    asked: Json = {"scope": "job", "statuses": status.upper().split(",")}
    operation = await context.api.post(f"/api/jobs/{name}/reprocess", asked)
    if context.as_json:
        print_json(operation)
    else:
        click.echo(f"{name}  {operation['operationId']}")
        context.say(f"To follow it: {context.command('jobs', 'watch', name)}")


@jobs.command(short_help="Erase a job with its rows and results.")
@_ID
@client_command(hints=JOB_HINTS)
async def rm(context: CommandContext, job: str) -> None:
    """Erase JOB, its rows and its results. There is no way back.

    With --json, {"id": ..., "deleted": true}.
    """
    name: str = (await _find(context, job))["id"]
    await context.api.delete(f"/api/jobs/{name}")
    if context.as_json:
        print_json({"id": name, "deleted": True})
    else:
        click.echo(f"{name}  deleted")
    await context.api.purge()

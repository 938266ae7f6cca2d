"""`penstock ls`: batches and jobs, newest first."""

from __future__ import annotations

import shutil
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import click

from penstock.cli.client import CommandContext, Json, client_command, print_json
from penstock.cli.submit import parse_pairs

if TYPE_CHECKING:
    from penstock.client.api import Api


_PAGE_MAX = 100
_LIMIT = 20
# Calls at a time: enough to hide the round trip, few enough to be no burden.
_FILES_AT_ONCE = 8


@click.command(short_help="List batches and jobs, newest first.")
@click.option(
    "--status",
    metavar="STATES",
    help="Only batches in these: in_progress, paused, completed, ...; with commas between.",
)
@click.option(
    "--metadata", metavar="KEY=VALUE", multiple=True, callback=parse_pairs, help="Only batches with this; repeatable."
)
@click.option("--limit", type=click.IntRange(min=1), help=f"How many at most.  [default: {_LIMIT}]")
@click.option("--all", "everything", is_flag=True, help="Every one.")
@client_command()
async def ls(
    context: CommandContext, status: str | None, metadata: dict[str, str], limit: int | None, everything: bool
) -> None:
    """List batches and jobs, newest first: id, state, progress, age, size of input and results, and file. Runs of
    `penstock run` are among them.

    With --json, one object: {"data": [batches as the API shows them], "jobs": [jobs as the API shows them], "has_more":
    whether there are others}.
    """
    from penstock.cli.lookup import JOB, walk_jobs

    most = limit or (None if everything else _LIMIT)
    page = _PAGE_MAX if most is None else min(_PAGE_MAX, most + 1)
    narrow = {f"metadata[{name}]": value for name, value in metadata.items()}
    if status is not None:
        narrow["status"] = status
    batches = context.api.walk("/v1/batches", page=page, **narrow)
    lists = [batches] if narrow else [batches, walk_jobs(context.api, None, page)]
    kept: list[Json] = []
    shown, more, table = 0, False, _Table(context.api)
    async for one in _newest_first(*lists):
        if most is not None and shown + len(kept) >= most:
            more = True
            break
        kept.append(one)
        if not context.as_json and len(kept) == _PAGE_MAX:
            await table.print(kept)
            shown, kept = shown + len(kept), []
    if context.as_json:
        listed = [one for one in kept if one["id"].startswith(JOB.prefix)]
        print_json({"object": "list", "data": [o for o in kept if o not in listed], "jobs": listed, "has_more": more})
        return
    await table.print(kept)
    shown += len(kept)
    if not shown:
        context.say(
            "no such batch" if narrow else "nothing yet: `penstock run FILE` or `penstock submit FILE` makes one"
        )
    elif more:
        context.say(f"(the newest {shown:,}; --all shows every one)")


async def _newest_first(*lists: AsyncIterator[Json]) -> AsyncIterator[Json]:
    """Objects of several lists, the newest of their heads each time: ids begin with the time."""
    heads = [await anext(one, None) for one in lists]
    while any(head is not None for head in heads):
        place = max(range(len(heads)), key=lambda at: "" if (head := heads[at]) is None else head["id"].split("_")[1])
        head = heads[place]
        if head is not None:
            yield head
        heads[place] = await anext(lists[place], None)


class _Table:
    """Table printed page by page, so the columns' widths are fixed. On a narrow terminal an object has two lines."""

    _ROW = "{:<38}  {:<11}  {:<22}  {:>4}  {:>9}  {}"
    _NARROW = 72

    def __init__(self, api: Api) -> None:
        self._api = api
        self._files: dict[str, Json | None] = {}
        self._headed = False
        self._width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None

    async def print(self, page: list[Json]) -> None:
        await self._learn_files({one["input_file_id"] for one in page if one.get("input_file_id")})
        narrow = self._width is not None and self._width < self._NARROW
        if page and not self._headed and not narrow:
            self._headed = True
            self._echo(self._ROW.format("ID", "STATE", "PROGRESS", "AGE", "SIZE", "FILE"))
        for one in page:
            name, *cells = self._cells(one)
            if narrow:
                click.echo(name)
                self._echo("  " + "  ".join(cell for cell in cells if cell))
            else:
                self._echo(self._ROW.format(name, *cells))

    def _cells(self, one: Json) -> list[str]:
        from penstock.cli.figures import age, job_moment, size_text, state_of
        from penstock.errors import plain

        if "jobType" in one:
            failed = one["failed"] + one["notFound"]
            progress = _progress(one["processed"], one["total"], failed)
            file, size = one["filename"] or "(deleted)", one["storedBytes"]
            return [one["id"], one["state"], progress, age(job_moment(one["createdAt"])), size_text(size), plain(file)]
        counts = one["request_counts"]
        failed = counts["failed"] - one.get("skipped", 0)
        progress = _progress(counts["completed"] + counts["failed"], counts["total"], failed)
        known = self._files.get(one["input_file_id"])
        file, size = known["filename"] if known else "(deleted)", one.get("result_bytes", 0)
        size += known["bytes"] if known else 0
        return [one["id"], state_of(one), progress, age(one["created_at"]), size_text(size), plain(file)]

    def _echo(self, row: str) -> None:
        click.echo(row[: self._width].rstrip())

    async def _learn_files(self, ids: set[str]) -> None:
        import asyncio

        gate = asyncio.Semaphore(_FILES_AT_ONCE)

        async def learn(file_id: str) -> None:
            async with gate:
                self._files[file_id] = await read_file(self._api, file_id)

        await asyncio.gather(*(learn(file_id) for file_id in ids - self._files.keys()))


async def read_file(api: Api, file_id: str) -> Json | None:
    """Read an uploaded file's object; None if it was deleted."""
    from penstock.client.api import Refused

    try:
        return await api.get(f"/v1/files/{file_id}")
    except Refused as refusal:
        if refusal.status != 404:
            raise
        return None


def _progress(done: int, total: int, failed: int) -> str:
    if not total:
        return "-"
    return f"{done:,}/{total:,}" + (f" {failed:,} failed" if failed else "")

"""`penstock ls`: batches, newest first."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

import click

from penstock.cli.client import CommandContext, Json, client_command, print_json
from penstock.cli.submit import parse_pairs

if TYPE_CHECKING:
    from penstock.cli.api import Api


_PAGE_MAX = 100
_LIMIT = 20
# Calls at a time: enough to hide the round trip, few enough to be no burden.
_NAMES_AT_ONCE = 8


@click.command(short_help="List batches, newest first.")
@click.option(
    "--status", metavar="STATES", help="Only these: in_progress, paused, completed, ...; separated by commas."
)
@click.option(
    "--metadata", metavar="KEY=VALUE", multiple=True, callback=parse_pairs, help="Only with this; repeatable."
)
@click.option("--limit", type=click.IntRange(min=1), help=f"How many at most.  [default: {_LIMIT}]")
@click.option("--all", "everything", is_flag=True, help="Every one.")
@client_command()
async def ls(
    context: CommandContext, status: str | None, metadata: dict[str, str], limit: int | None, everything: bool
) -> None:
    """List batches, newest first: id, state, progress, age and file.

    With --json, one object: {"data": [batches as the API shows them], "has_more": whether there are others}.
    """
    most = limit or (None if everything else _LIMIT)
    query: dict[str, str | int] = {f"metadata[{name}]": value for name, value in metadata.items()}
    if status is not None:
        query["status"] = status
    table = None if context.as_json else _Table(context.api)
    kept: list[Json] = []
    shown, more = 0, True
    while more and (most is None or shown < most):
        query["limit"] = _PAGE_MAX if most is None else min(_PAGE_MAX, most - shown)
        page = await context.api.get("/v1/batches", query)
        batches = page["data"]
        more = bool(page["has_more"] and batches)
        if table is None:
            kept += batches
        else:
            await table.print(batches)
        shown += len(batches)
        if batches:
            query["after"] = batches[-1]["id"]
    if context.as_json:
        print_json({"object": "list", "data": kept, "has_more": more})
    elif not shown:
        filtered = status is not None or metadata
        context.say("no such batch" if filtered else "no batches yet: `penstock submit FILE` makes one")
    elif more:
        context.say(f"(the newest {shown:,}; --all shows every one)")


class _Table:
    """Table printed page by page, so the columns' widths are fixed."""

    _ROW = "{:<38}  {:<11}  {:<22}  {:>4}  {}"

    def __init__(self, api: Api) -> None:
        self._api = api
        self._names: dict[str, str] = {}
        self._headed = False
        self._width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None

    async def print(self, batches: list[Json]) -> None:
        from penstock.cli.figures import age, plain, state_of

        await self._learn_names({batch["input_file_id"] for batch in batches if batch["input_file_id"]})
        if batches and not self._headed:
            self._headed = True
            self._echo(self._ROW.format("ID", "STATE", "PROGRESS", "AGE", "FILE"))
        for batch in batches:
            file = self._names.get(batch["input_file_id"], "(deleted)")
            self._echo(
                self._ROW.format(batch["id"], state_of(batch), _progress(batch), age(batch["created_at"]), plain(file))
            )

    def _echo(self, row: str) -> None:
        click.echo(row[: self._width].rstrip())

    async def _learn_names(self, ids: set[str]) -> None:
        import asyncio

        gate = asyncio.Semaphore(_NAMES_AT_ONCE)

        async def learn(file_id: str) -> None:
            async with gate:
                self._names[file_id] = await file_name(self._api, file_id)

        await asyncio.gather(*(learn(file_id) for file_id in ids - self._names.keys()))


async def file_name(api: Api, file_id: str) -> str:
    """Name under which a file was uploaded."""
    from penstock.cli.api import Refused

    try:
        return str((await api.get(f"/v1/files/{file_id}"))["filename"])
    except Refused as refusal:
        if refusal.status != 404:
            raise
        return "(deleted)"


def _progress(batch: Json) -> str:
    counts = batch["request_counts"]
    if not counts["total"]:
        return "-"
    failed = f" {counts['failed']:,} failed" if counts["failed"] else ""
    return f"{counts['completed'] + counts['failed']:,}/{counts['total']:,}{failed}"

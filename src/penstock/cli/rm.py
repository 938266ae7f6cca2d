"""`penstock rm` and `penstock prune`: batches and jobs erased with their inputs and results, their space given back."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import click

from penstock.cli.client import CommandContext, Json, client_command, print_json
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.client.api import Api

_PAGE = 100


@click.command(short_help="Erase batches or jobs, and give their space back.")
@click.argument("names", metavar="ID...", nargs=-1, required=True)
@client_command()
async def rm(context: CommandContext, names: tuple[str, ...]) -> None:
    """Erase the batches or jobs ID, each with its results, and its input unless another batch is over it. There is no
    way back. IDs may be cut short as long as they are unique.

    With --json, {"removed": [ids], "database_bytes": {"before": ..., "after": ...}}; the last is null where a server
    removes the rows.
    """
    from penstock.cli.lookup import BATCH, JOB, find

    found = [await find(context.api, name, BATCH, JOB) for name in names]
    await _remove(context, [one["id"] for one in found])


@click.command(short_help="Erase what ended long ago, and give its space back.")
@click.option("--older-than", metavar="TIME", required=True, help="How long ago it ended: 12h, 30d.")
@click.option("--dry-run", is_flag=True, help="Say what would be erased; erase nothing.")
@client_command()
async def prune(context: CommandContext, older_than: str, dry_run: bool) -> None:
    """Erase every batch and job that ended longer ago than --older-than, as `penstock rm` does. Others stay.

    The setting keep_s does the same by itself.
    """
    from penstock.cli.options import parse_span

    seconds = parse_span(older_than, digits=6)
    if not seconds:
        raise UsageError(f"--older-than {older_than}: not a time span", hint="Write 90m, 12h or 30d.")
    before = time.time() - seconds
    old = [one["id"] async for one in _walk(context.api) if (ended := _ended_at(one)) is not None and ended < before]
    if dry_run:
        if context.as_json:
            print_json({"would_remove": old})
        else:
            for name in old:
                click.echo(name)
            context.say(f"({len(old):,} would be erased)")
        return
    if not old:
        context.say("nothing ended so long ago")
    await _remove(context, old)


async def _walk(api: Api) -> AsyncIterator[Json]:
    """Every batch and every job."""
    from penstock.cli.lookup import BATCH, JOB

    for kind in (BATCH, JOB):
        async for one in kind.walk(api, None, _PAGE):
            yield one


def _ended_at(one: Json) -> float | None:
    from penstock.cli.figures import job_moment

    if "endedAt" in one:
        return None if one["endedAt"] is None else job_moment(one["endedAt"])
    return next((one[f"{s}_at"] for s in ("completed", "failed", "expired", "cancelled") if one[f"{s}_at"]), None)


async def _remove(context: CommandContext, names: list[str]) -> None:
    from penstock.cli.figures import count_text, size_text
    from penstock.client.api import Refused

    removed = []
    for name in names:
        path = f"/api/jobs/{name}" if name.startswith("job_") else f"/v1/batches/{name}"
        try:
            await context.api.delete(path, {} if name.startswith("job_") else {"with_input": "true"})
        except Refused as refusal:
            if refusal.status != 404:
                raise
            continue  # somebody else removed it meanwhile
        removed.append(name)
        if not context.as_json:
            click.echo(f"{name}  removed")
    purged = await context.api.purge() if names else None
    if context.as_json:
        sizes = None if purged is None else {"before": purged.before, "after": purged.after}
        print_json({"removed": removed, "database_bytes": sizes})
    elif purged is not None:
        given = max(0, purged.before - purged.after)
        context.say(
            f"{count_text(len(removed), 'object')} removed: {size_text(given)} given back to the disk, "
            f"the database has {size_text(purged.after)}"
            + ("" if purged.shrunk else "; what else is free is used again, since others use the database now")
        )

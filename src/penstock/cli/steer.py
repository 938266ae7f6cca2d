"""`penstock pause`, `resume`, `cancel` and `retry`."""

from __future__ import annotations

import click

from penstock.cli.client import CommandContext, Json, client_command, print_json
from penstock.errors import UsageError

_ID = click.argument("batch", metavar="ID")


@click.command(short_help="Start no more requests of a batch.")
@_ID
@client_command()
async def pause(context: CommandContext, batch: str) -> None:
    """Start no more requests of the batch ID. Calls in flight finish; the batch's deadline stays."""
    name = await _steer(context, batch, "pause")
    context.say(f"To go on: penstock resume {name}")


@click.command(short_help="Go on with a paused batch.")
@_ID
@client_command()
async def resume(context: CommandContext, batch: str) -> None:
    """Go on with the paused batch ID."""
    name = await _steer(context, batch, "resume")
    context.say(f"To follow it: penstock watch {name}")


@click.command(short_help="End a batch; what is done is kept.")
@_ID
@client_command()
async def cancel(context: CommandContext, batch: str) -> None:
    """End the batch ID. Calls in flight finish, results so far are kept, and the other requests are not run."""
    name = await _steer(context, batch, "cancel")
    context.say(f"What was done: penstock export {name} -o answers.jsonl")


@click.command(short_help="Run a batch's failed requests again.")
@_ID
@click.option("--failed", is_flag=True, help="Everything that failed or was not run; this is the default.")
@click.option("--custom-id", "custom_ids", multiple=True, metavar="ID", help="Only this request; repeatable.")
@client_command()
async def retry(context: CommandContext, batch: str, failed: bool, custom_ids: tuple[str, ...]) -> None:
    """Run requests of the batch ID again that failed or were not run. Completed requests are never run again.

    A batch that has ended is opened again, with as much time as it had at first.
    """
    if failed and custom_ids:
        raise UsageError("--failed and --custom-id at once", hint="--failed is everything that failed. Give one.")
    name = await _steer(context, batch, "retry", {"custom_ids": list(custom_ids)} if custom_ids else None)
    context.say(f"To follow it: penstock watch {name}")


async def _steer(context: CommandContext, text: str, verb: str, body: Json | None = None) -> str:
    """Steer a batch, print its state, and return its id."""
    from penstock.cli.figures import counts_text, state_of
    from penstock.cli.lookup import find_batch

    found = await find_batch(context.api, text)
    name: str = found["id"]
    batch = await context.api.post(f"/v1/batches/{name}/{verb}", body)
    if context.as_json:
        print_json(batch)
    else:
        click.echo(f"{name}  {state_of(batch)}: {counts_text(batch)}")
        if verb in ("resume", "retry") and not await context.api.is_served():
            context.say("Nothing works it off until a server runs on this data: penstock serve")
    return name

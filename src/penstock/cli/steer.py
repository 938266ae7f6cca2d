"""`penstock pause`, `resume`, `cancel` and `retry`."""

from __future__ import annotations

import click

from penstock.cli.client import CommandContext, Json, client_command, print_json
from penstock.errors import UsageError

_ID = click.argument("name", metavar="ID")


@click.command(short_help="Start no more requests of a batch.")
@_ID
@client_command()
async def pause(context: CommandContext, name: str) -> None:
    """Start no more requests of the batch or job ID. Calls in flight finish; its deadline stays."""
    await _steer(context, name, "pause")


@click.command(short_help="Go on with a paused batch.")
@_ID
@client_command()
async def resume(context: CommandContext, name: str) -> None:
    """Go on with the paused batch or job ID."""
    await _steer(context, name, "resume")


@click.command(short_help="End a batch; what is done is kept.")
@_ID
@client_command()
async def cancel(context: CommandContext, name: str) -> None:
    """End the batch or job ID. Calls in flight finish, results so far are kept, and the other requests are not run."""
    await _steer(context, name, "cancel")


@click.command(short_help="Run a batch's failed requests again.")
@_ID
@click.option("--failed", is_flag=True, help="Everything that failed or was not run; this is the default.")
@click.option("--custom-id", "custom_ids", multiple=True, metavar="ID", help="Only this request; repeatable.")
@client_command()
async def retry(context: CommandContext, name: str, failed: bool, custom_ids: tuple[str, ...]) -> None:
    """Run requests of the batch or job ID again that failed or were not run. Completed requests are never run again.

    A batch that has ended is opened again, with as much time as it had at first.
    """
    if failed and custom_ids:
        raise UsageError("--failed and --custom-id at once", hint="--failed is everything that failed. Give one.")
    await _steer(context, name, "retry", {"custom_ids": list(custom_ids)} if custom_ids else None)


async def _steer(context: CommandContext, text: str, verb: str, body: Json | None = None) -> None:
    """Steer a batch or job, print its state, and say what can be done now."""
    from penstock.cli.figures import counts_text, state_of
    from penstock.cli.jobs import retry_job, steer_job
    from penstock.cli.lookup import BATCH, JOB, find

    found = await find(context.api, text, BATCH, JOB)
    name: str = found["id"]
    if name.startswith(JOB.prefix):
        if body is not None:
            raise UsageError(f"--custom-id: {name} is a job, whose rows have none", hint="Leave it out.")
        await (retry_job(context, found) if verb == "retry" else steer_job(context, found, verb))
        return
    batch = await context.api.post(f"/v1/batches/{name}/{verb}", body)
    if context.as_json:
        print_json(batch)
        return
    click.echo(f"{name}  {state_of(batch)}: {counts_text(batch)}")
    if verb == "pause":
        context.say(f"To go on: {context.command('resume', name)}")
    elif verb == "cancel":
        context.say(f"What was done: {context.command('export', name, '-o', 'answers.jsonl')}")
    else:
        context.say(f"To follow it: {context.command('watch', name)}")
        await context.say_idle(name)

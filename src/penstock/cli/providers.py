"""`penstock providers`: list providers with their closed gates, and open halted ones."""

from __future__ import annotations

import click

from penstock.cli.client import CommandContext, Json, client_command, print_json


class _ListByDefault(click.Group):
    """`penstock providers` alone is `penstock providers list`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] != "--help"):
            args = ["list", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_ListByDefault, short_help="List providers, and let halted ones go on.")
def providers() -> None:
    """List providers, and let halted ones go on.

    Without a command, they are listed.
    """


@providers.command("list", short_help="List providers, and what they wait for.")
@client_command()
async def list_(context: CommandContext) -> None:
    """List providers, what they wait for, and work that none of them has."""
    found = await context.api.get("/v1/providers")
    if context.as_json:
        print_json(found)
        return
    if not found["data"]:
        context.say("no providers: those of a running server are listed with --server URL")
    for provider in found["data"]:
        _show(provider)
    for left in found["unserved"]:
        click.echo(f"{left['pool']}  unserved: no provider has this work  {' '.join(left['models'])}")


@providers.command("resume", short_help="Let a halted provider go on.")
@click.argument("name")
@client_command()
async def resume(context: CommandContext, name: str) -> None:
    """Let the workers of the halted provider NAME go on, once the cause is fixed."""
    from urllib.parse import quote

    resumed = await context.api.post(f"/v1/providers/{quote(name, safe='')}/resume")
    if context.as_json:
        print_json(resumed)
        return
    _show(resumed)


def _show(provider: Json) -> None:
    halted = any(gate["state"] == "halted" for gate in provider["gates"])
    state = "halted" if halted else "waiting" if provider["gates"] else "open"
    click.echo(f"{provider['name']}  {state:<7}  {' '.join(provider['models'])}")
    for gate in provider["gates"]:
        state = "halted for every owner" if gate["state"] == "halted" else gate["state"]
        click.echo(f"  {gate['model']}  {state}: {gate['code']}: {gate['message']}")
    for limit in provider["limits"]:
        rate = "" if limit["max_per_second"] is None else f", {limit['max_per_second']:g} calls/s"
        most = f"{limit['in_flight']} of {limit['max_in_flight']:.0f} in flight{rate}"
        click.echo(f"  {limit['model']}  {most}  ({limit['reason']})")

"""`penstock keys`: make, list and revoke API keys, on a server or in the database itself."""

from __future__ import annotations

import click

from penstock.cli.client import CommandContext, Json, client_command, print_json
from penstock.cli.options import parse_span
from penstock.errors import UsageError

_PAGE = 100


@click.group(short_help="Create, list and revoke API keys.")
def keys() -> None:
    """Create, list and revoke API keys.

    Once there is a key, the server refuses every call without one.
    """


@keys.command("create", short_help="Make a key and show it, once.")
@click.option("--owner", default="local", show_default=True, help="Owner whose batches and files it opens.")
@click.option("--name", default="", help="Note on its use.")
@click.option("--role", type=click.Choice(["user", "admin"]), default="user", show_default=True)
@click.option("--expires", metavar="TIME", help="Time it is valid for: 12h, 90d.  [default: until revoked]")
@client_command(makes_database=True)
async def create(context: CommandContext, owner: str, name: str, role: str, expires: str | None) -> None:
    """Make a key and show it, once: only a hash of it is kept.

    An owner's keys open the same files and batches. "local" owns everything that was made before there were keys.
    """
    wanted: Json = {"owner": owner, "name": name, "role": role}
    if expires is not None:
        wanted["expires_after_s"] = _life_s(expires)
    made = await context.api.post("/v1/keys", wanted)
    if context.as_json:
        print_json(made)
        return
    context.say(f"{made['id']} for {made['owner']} ({made['role']}); this is shown once:")
    click.echo(made["key"])


@keys.command("list", short_help="List keys, newest first.")
@client_command()
async def list_(context: CommandContext) -> None:
    """List keys, newest first. Their secrets are not stored."""
    found = [key async for key in context.api.walk("/v1/keys", page=_PAGE)]
    if context.as_json:
        print_json({"object": "list", "data": found, "has_more": False})
        return
    if not found:
        context.say("no keys: the server has one user and listens on its own machine only")
    for key in found:
        line = f"{key['id']}  {key['prefix']}-...  {key['role']:<5}  {_state(key):<8}  {key['owner']}  {key['name']}"
        click.echo(line.rstrip())


@keys.command("revoke", short_help="Make a key useless.")
@click.argument("key", metavar="ID")
@client_command()
async def revoke(context: CommandContext, key: str) -> None:
    """Revoke the key ID: its id, or the beginning of the id or of the key, as far as it is the only one."""
    if key.startswith("sk-penstock-"):
        key = key[: len("sk-penstock-") + 12]  # the rest is secret, and not stored
    matches = [
        found
        async for found in context.api.walk("/v1/keys", page=_PAGE)
        if found["id"].startswith(key) or found["prefix"].startswith(key)
    ]
    if len(matches) != 1:
        word = "no key begins" if not matches else f"{len(matches)} keys begin"
        raise UsageError(f"{word} with '{key}'", hint="`penstock keys list` shows them all.")
    revoked = await context.api.post(f"/v1/keys/{matches[0]['id']}/revoke")
    if context.as_json:
        print_json(revoked)
    else:
        context.say(f"{revoked['id']} is revoked; servers refuse it within seconds (key_cache_s)")


def _life_s(text: str) -> int:
    seconds = parse_span(text, digits=18)
    if not seconds:
        raise UsageError(f"--expires {text}: not a time", hint="A number and a unit: 3600s, 30m, 12h or 90d.")
    return seconds


def _state(key: Json) -> str:
    import time

    if key["revoked_at"] is not None:
        return "revoked"
    return "expired" if key["expires_at"] is not None and key["expires_at"] <= time.time() else "active"

"""`penstock db limit`: limits of an owner, and what it uses of them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.client import print_json
from penstock.cli.figures import print_row, size_text
from penstock.cli.options import DatabaseOptions, database_options, load_config
from penstock.db.start import explain_database_errors, start_database
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.config import QuotaLimits
    from penstock.quotas.quotas import OwnQuota, Quota, Use

_CHECK = "Check --database-url (or PENSTOCK_DATABASE_URL), the user's rights, and that the server runs."
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SIZE = re.compile(r"(\d{1,15})\s*([kmgt]?)b?", re.IGNORECASE)


class _Figure(click.ParamType[Any]):
    """A limit: a number, or `default` for the configured one."""

    def __init__(self, high: int, *, size: bool = False) -> None:
        self.name = "size" if size else "number"
        self._high = high
        self._size = size

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str) or value == "default":
            return value
        match = _SIZE.fullmatch(value)
        figure = None if match is None else int(match[1]) * _UNITS[match[2].lower()]
        if figure is None or figure > self._high or not (self._size or value.isdigit()):
            example = "10GB" if self._size else "10"
            self.fail(
                f"'{value}': write a {self.name} such as {example}, at most {self._high:,}, or default.", param, ctx
            )
        return figure


@click.command("limit", short_help="Show or set the limits of an owner.")
@click.argument("owner", required=False)
@click.option("--open-batches", "max_open_batches", type=_Figure(1_000_000), help="Open batches and jobs.")
@click.option("--stored", "max_stored_bytes", type=_Figure(2**50, size=True), help="Stored bytes: 500MB, 10GB.")
@click.option("--rpm", "requests_per_minute", type=_Figure(10_000_000), help="Requests to the API a minute.")
@click.option("--max-priority", type=_Figure(100), help="Highest priority that may be asked for.")
@click.option("--unset", is_flag=True, help="Drop all limits that were set for OWNER.")
@database_options
@click.option("--json", "as_json", is_flag=True, help="Answer as JSON.")
def limit_command(owner: str | None, unset: bool, database: DatabaseOptions, as_json: bool, **wanted: Any) -> None:
    """Limit OWNER, and show its limits with what it uses. Without OWNER, list who has limits of their own.

    0 is no limit; "default" is the configured limit of all owners (owner_max_open_batches and so on). Servers know a
    change within seconds (key_cache_s). What was accepted before stays.
    """
    import asyncio

    changes = {name: None if value == "default" else value for name, value in wanted.items() if value is not None}
    if owner is None and (changes or unset):
        raise UsageError(
            "it is not said whose limits", hint="Name the owner: penstock db limit OWNER --open-batches 10"
        )
    if changes and unset:
        raise UsageError("--unset drops every limit of the owner", hint="Set one back with --rpm default, for example.")
    config = load_config(database)
    with start_database(config) as conninfo, explain_database_errors(_CHECK):
        if owner is None:
            _print_all(asyncio.run(_list(conninfo)), as_json=as_json)
        else:
            change = dict.fromkeys(wanted) if unset else changes
            _print_one(*asyncio.run(_change(conninfo, config.quotas, owner, change)), as_json=as_json)


async def _list(conninfo: str) -> list[OwnQuota]:
    from psycopg import AsyncConnection

    from penstock.quotas.quotas import list_own_quotas

    async with await AsyncConnection.connect(conninfo, autocommit=True) as connection:
        return await list_own_quotas(connection)


async def _change(
    conninfo: str, default: QuotaLimits, owner: str, changes: dict[str, Any]
) -> tuple[OwnQuota, Quota, Use]:
    """Change some limits of an owner; returns its own, those in force, and its use."""
    from msgspec.structs import replace
    from psycopg import AsyncConnection

    from penstock.quotas.quotas import hold_owner, quota_in_force, read_own_quota, read_use, set_own_quota

    async with await AsyncConnection.connect(conninfo, autocommit=True) as connection:
        if changes:
            async with connection.transaction():
                await hold_owner(connection, owner)
                await set_own_quota(connection, replace(await read_own_quota(connection, owner), **changes))
        own = await read_own_quota(connection, owner)
        return own, quota_in_force(own, default), await read_use(connection, owner)


def _print_all(found: list[OwnQuota], *, as_json: bool) -> None:
    from msgspec import to_builtins

    if as_json:
        print_json({"limits": [to_builtins(own) for own in found]})
        return
    for own in found:
        told = {name: value for name, value in to_builtins(own).items() if name != "owner" and value is not None}
        click.echo(f"{own.owner}  " + "  ".join(f"{name}={value}" for name, value in told.items()))
    if not found:
        click.echo("no owner has limits of its own")


def _print_one(own: OwnQuota, quota: Quota, use: Use, *, as_json: bool) -> None:
    from dataclasses import asdict

    from msgspec import to_builtins

    if as_json:
        print_json({"owner": own.owner, "own": to_builtins(own), "limits": to_builtins(quota), "used": asdict(use)})
        return
    click.echo(own.owner)
    print_row("open", _of(f"{use.open_batches:,}", quota.max_open_batches) + " batches and jobs")
    print_row("stored", _of(size_text(use.stored_bytes), quota.max_stored_bytes, in_bytes=True))
    print_row("requests", _of(f"{use.requests_this_minute:,}", quota.requests_per_minute) + " this minute")
    print_row("in flight", f"{use.in_flight:,} items")
    print_row("priority", f"at most {quota.max_priority}")


def _of(used: str, limit: int, *, in_bytes: bool = False) -> str:
    if not limit:
        return f"{used} (no limit)"
    return f"{used} of {size_text(limit) if in_bytes else f'{limit:,}'}"

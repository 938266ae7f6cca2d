"""`penstock db`: migrations, how owners share the work, and their limits."""

from __future__ import annotations

import click

from penstock.cli.client import print_json
from penstock.cli.limit import limit_command
from penstock.cli.options import DatabaseOptions, database_options, load_config
from penstock.cli.seal import seal_command
from penstock.db.start import explain_database_errors, start_database
from penstock.errors import ExitCode, PenstockError

_CHECK = "Check --database-url (or PENSTOCK_DATABASE_URL), the user's rights, and that the server runs."


@click.group(short_help="Migrate or inspect the database, share out its work.")
def db() -> None:
    """Migrate or inspect the database, share out its work."""


db.add_command(limit_command)
db.add_command(seal_command)


@db.command("migrate")
@database_options
@click.option("--post", is_flag=True, help="Also remove what only older versions need; no such process may run.")
@click.option("--json", "as_json", is_flag=True, help="Answer as JSON.")
def migrate_command(database: DatabaseOptions, post: bool, as_json: bool) -> None:
    """Apply the migrations this version brings. Safe to repeat, and from several machines at once.

    Processes of the version before go on working meanwhile and afterwards. Once none is left, --post removes what only
    they needed.
    """
    from penstock.db.migrate import migrate, read_standing

    config = load_config(database)
    with start_database(config) as conninfo, explain_database_errors(_CHECK):
        applied = migrate(
            conninfo,
            post=post,
            on_step=lambda m: None if as_json else click.echo(f"applying {m.name}"),
            on_wait=lambda m, holders: click.echo(f"{m.name} waits: its tables are in use by {holders}", err=True),
        )
        left = [migration.name for migration in read_standing(conninfo).missing]
    if as_json:
        print_json({"applied": [migration.name for migration in applied], "left": left})
        return
    if not applied:
        click.echo("up to date")
    for name in left:
        click.echo(f"left     {name}  (once no older version runs: penstock db migrate --post)")


@db.command("status")
@database_options
@click.option("--json", "as_json", is_flag=True, help="Answer as JSON.")
def status_command(database: DatabaseOptions, as_json: bool) -> None:
    """Show which migrations the database has. Changes nothing; exit code 1 if this version cannot work on it."""
    from penstock.db.migrate import read_standing

    config = load_config(database)
    if config.database_url is None and not (config.data_dir / "pg").is_dir():
        raise PenstockError(
            f"{config.data_dir} holds no database yet",
            hint="The first `penstock run` or `penstock db migrate` makes one.",
        )
    with start_database(config) as conninfo, explain_database_errors(_CHECK):
        found = read_standing(conninfo)
    if as_json:
        print_json(
            {
                "applied": [migration.name for migration in found.applied],
                "missing": [migration.name for migration in found.missing],
                "unknown": found.unknown,
            }
        )
    else:
        for migration in found.applied:
            click.echo(f"applied  {migration.name}")
        for migration in found.missing:
            click.echo(f"{'missing' if migration.phase == 'pre' else 'left   '}  {migration.name}")
        for name in found.unknown:
            click.echo(f"unknown  {name}  (from a newer Penstock)")
    if not found.ready:
        raise SystemExit(ExitCode.OPERATIONAL)


@db.command("share", short_help="Show or set an owner's share of the work.")
@click.argument("owner", required=False)
@click.argument("weight", type=click.FloatRange(0.01, 100), required=False)
@database_options
@click.option("--json", "as_json", is_flag=True, help="Answer as JSON.")
def share_command(owner: str | None, weight: float | None, database: DatabaseOptions, as_json: bool) -> None:
    """Give OWNER's batches WEIGHT times the work of an owner without a weight, while both have work waiting.

    Holds for OWNER's waiting batches, and for those to come. Without a WEIGHT, shows the shares.
    """
    import asyncio

    from psycopg import AsyncConnection

    from penstock.batches.owners import list_weights, set_weight

    config = load_config(database)

    async def share(conninfo: str) -> list[tuple[str, float]]:
        async with await AsyncConnection.connect(conninfo, autocommit=True) as connection:
            if owner is not None and weight is not None:
                await set_weight(connection, owner, weight)
            return await list_weights(connection, owner)

    with start_database(config) as conninfo, explain_database_errors(_CHECK):
        found = asyncio.run(share(conninfo))
    if as_json:
        print_json({"shares": [{"owner": name, "weight": round(each, 4)} for name, each in found]})
        return
    for name, each in found:
        click.echo(f"{each:8.4g}  {name}")
    if not found:
        click.echo(
            "every owner has the same share" if owner is None else f"{owner} has the same share as every owner: 1"
        )

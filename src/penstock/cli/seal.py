"""`penstock db seal`: the secrets that the database keeps, sealed with the first of the configured keys."""

from __future__ import annotations

import click

from penstock.cli.client import print_json
from penstock.cli.options import DatabaseOptions, database_options, load_config
from penstock.db.start import explain_database_errors, start_database
from penstock.errors import ExitCode

_CHECK = "Check --database-url (or PENSTOCK_DATABASE_URL), the user's rights, and that the server runs."


@click.command("seal", short_help="Seal stored secrets with the current key.")
@database_options
@click.option("--json", "as_json", is_flag=True, help="Answer as JSON.")
def seal_command(database: DatabaseOptions, as_json: bool) -> None:
    """Seal the signing secrets of webhooks with the first key of secrets_key_file, or of PENSTOCK_SECRETS_KEY.

    To change the key, put the new one before the old one, restart every server, run this, and take the old one away.
    After an upgrade from a version that kept secrets unsealed, run it once no process of that version is left.
    """
    import asyncio

    from psycopg import AsyncConnection

    from penstock.deliver.endpoints import seal_all
    from penstock.deliver.sealing import secret_box

    config = load_config(database)

    async def seal(conninfo: str) -> tuple[int, int]:
        async with await AsyncConnection.connect(conninfo, autocommit=True) as connection:
            return await seal_all(connection, secret_box(config))

    with start_database(config) as conninfo, explain_database_errors(_CHECK):
        sealed, stuck = asyncio.run(seal(conninfo))
    if as_json:
        print_json({"sealed": sealed, "not_opened": stuck})
    else:
        click.echo(f"sealed {sealed} webhook endpoints anew")
        if stuck:
            click.echo(f"{stuck} cannot be opened with these keys: add theirs, or rotate their secrets", err=True)
    if stuck:
        raise SystemExit(ExitCode.OPERATIONAL)

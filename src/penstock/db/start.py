"""Database of a process: the configured one, or the embedded one, started if need be."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.errors import PenstockError, UsageError

if TYPE_CHECKING:
    from penstock.config import Config

GO_ON = "What was stored is safe: once the database works again, the same command goes on."
"""What a run that the database failed says."""


@contextlib.contextmanager
def start_database(config: Config) -> Iterator[str]:
    """Yield the conninfo of the configured database, or of the embedded one, which is started if need be."""
    if config.database_url is not None:
        yield check_conninfo(config.database_url, "--database-url (or PENSTOCK_DATABASE_URL)")
        return
    from penstock.db.embedded import postgres

    with postgres.acquire(config.data_dir) as server:
        yield server.conninfo


def check_conninfo(database_url: str, option: str) -> str:
    """The address of a database, as an option gave it; raises if it is none."""
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    try:
        conninfo_to_dict(database_url)
    except psycopg.Error:
        # Neither the address nor the driver's message is shown: both may hold the password.
        raise UsageError(
            f"{option} is not the address of a PostgreSQL",
            hint="Write it as postgresql://user@host:5432/name",
        ) from None
    return database_url


def migrate_database(conninfo: str) -> None:
    """Bring a database up to date, turning the driver's errors into Penstock's."""
    import psycopg

    from penstock.db.migrate import migrate

    try:
        migrate(conninfo)
    except psycopg.OperationalError as error:
        raise PenstockError(
            f"cannot reach the database: {str(error).strip().splitlines()[0]}",
            hint="Check --database-url (or PENSTOCK_DATABASE_URL) and that the server accepts connections.",
        ) from error
    except psycopg.Error as error:
        raise PenstockError(
            f"the database cannot be brought up to date: {str(error).strip().splitlines()[0]}",
            hint="Penstock needs PostgreSQL 15 or later, writable, and a user who owns the schema 'penstock'.",
        ) from error


@contextlib.contextmanager
def explain_database_errors(hint: str) -> Iterator[None]:
    """Turn the driver's errors into Penstock's, with what to do next."""
    import psycopg

    try:
        yield
    except psycopg.Error as error:
        raise PenstockError(f"the database failed: {str(error).strip().splitlines()[0]}", hint=hint) from error

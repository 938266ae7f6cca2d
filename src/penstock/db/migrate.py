"""Numbered migrations: run once each, in order, under a lock, and never changed afterwards.

A file is named `NNNN_words_pre.sql` or `NNNN_words_post.sql`: *pre* runs before new code is deployed (old code
must work on the schema it leaves), *post* once no old code runs any more. Each file is one transaction unless its
first line is `-- transaction: off` (for CREATE INDEX CONCURRENTLY); such a file must be safe to run again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files

import psycopg
from psycopg import sql

from penstock.errors import PenstockError

# One number for all of Penstock: two migrators of one database wait for each other.
_LOCK_KEY = 0x50454E53544F434B

_NAME = re.compile(r"(\d{4})_\w+_(pre|post)\.sql")

_BOOTSTRAP = b"""
CREATE TABLE IF NOT EXISTS penstock.migrations (
  number      int4 PRIMARY KEY,
  name        text NOT NULL,
  checksum    text NOT NULL,
  applied_at  timestamptz NOT NULL DEFAULT now()
);
"""


@dataclass(frozen=True, slots=True)
class Migration:
    number: int
    name: str
    phase: str
    text: str

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def transactional(self) -> bool:
        return not self.text.startswith("-- transaction: off")


@dataclass(frozen=True, slots=True)
class Standing:
    """What a database has and lacks."""

    applied: list[Migration]
    missing: list[Migration]
    unknown: list[str]
    """Applied by a newer Penstock than this one."""

    @property
    def ready(self) -> bool:
        return not [m for m in self.missing if m.phase == "pre"] and not self.unknown


def available() -> list[Migration]:
    found = []
    for entry in files("penstock.db").joinpath("migrations").iterdir():
        match = _NAME.fullmatch(entry.name)
        if match:
            found.append(Migration(int(match[1]), entry.name.removesuffix(".sql"), match[2], entry.read_text("utf-8")))
    return sorted(found, key=lambda migration: migration.number)


def standing(conninfo: str) -> Standing:
    """Compare the database with this version's migrations, changing nothing."""
    with _connect(conninfo) as connection:
        known = connection.execute("SELECT to_regclass('penstock.migrations')").fetchone()
        rows = {}
        if known is not None and known[0] is not None:
            rows = _applied(connection)
        return _compare(rows)


def migrate(conninfo: str, *, on_step: Callable[[Migration], None] = lambda _: None) -> list[Migration]:
    """Bring the database up to this version. Safe to run from many processes at once, and again after a kill."""
    with _connect(conninfo) as lock, _connect(conninfo) as connection:
        # Held by a transaction that stays open meanwhile, on a connection of its own. A lock of the session would
        # outlive us behind a pooler, which keeps the session.
        lock.autocommit = False
        lock.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK_KEY])
        _bootstrap(connection)
        found = _compare(_applied(connection))
        if found.unknown:
            raise PenstockError(
                f"the database was migrated by a newer Penstock (it has {', '.join(found.unknown)})",
                hint="Upgrade this Penstock, or point it at another database.",
            )
        for migration in found.missing:
            on_step(migration)
            _apply(connection, migration)
        return found.missing


def _connect(conninfo: str) -> psycopg.Connection:
    return psycopg.connect(conninfo, autocommit=True, prepare_threshold=None)


def _bootstrap(connection: psycopg.Connection) -> None:
    try:
        # Asked for first: IF NOT EXISTS needs the right to create schemas even where there is nothing to create.
        if connection.execute("SELECT to_regnamespace('penstock')").fetchone() == (None,):
            connection.execute("CREATE SCHEMA penstock")
        connection.execute(_BOOTSTRAP)
    except psycopg.errors.InsufficientPrivilege as error:
        raise PenstockError(
            "the database user may not create the schema 'penstock'",
            hint="Run once as an owner: CREATE SCHEMA penstock AUTHORIZATION <this user>;",
        ) from error


def _applied(connection: psycopg.Connection) -> dict[int, tuple[str, str]]:
    rows = connection.execute("SELECT number, name, checksum FROM penstock.migrations").fetchall()
    return {number: (name, checksum) for number, name, checksum in rows}


def _compare(rows: dict[int, tuple[str, str]]) -> Standing:
    ours = available()
    for migration in ours:
        if migration.number in rows and rows[migration.number][1] != migration.checksum:
            raise PenstockError(
                f"migration {migration.name} differs from the one this database ran",
                hint="A migration never changes once it has run. Use the Penstock release that matches the "
                "database, or restore the file.",
            )
    numbers = {migration.number for migration in ours}
    return Standing(
        applied=[m for m in ours if m.number in rows],
        missing=[m for m in ours if m.number not in rows],
        unknown=sorted(name for number, (name, _) in rows.items() if number not in numbers),
    )


def _apply(connection: psycopg.Connection, migration: Migration) -> None:
    note = sql.SQL("INSERT INTO penstock.migrations (number, name, checksum) VALUES ({}, {}, {})").format(
        migration.number, migration.name, migration.checksum
    )
    if migration.transactional:
        with connection.transaction():
            connection.execute(migration.text.encode())
            connection.execute(note)
    else:
        for statement in migration.text.split(";\n"):
            if statement.strip():
                connection.execute(statement.encode())
        connection.execute(note)

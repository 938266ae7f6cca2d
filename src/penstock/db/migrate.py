"""Numbered migrations: run once each, in order, under a lock, and never changed afterwards.

A file is named `NNNN_words_pre.sql` or `NNNN_words_post.sql`. *Pre* steps run before new code is deployed, and by
themselves when a process starts: code from before them goes on working on the schema they leave, whether it knows them
or not. *Post* steps take away what only that older code needs. They run when an operator says that none of it is left
(`penstock db migrate --post`); only a database that has never seen Penstock gets them at once.

Each file is one transaction, unless its first line is `-- transaction: off`. Such a file holds a single statement that
PostgreSQL refuses inside a transaction (CREATE INDEX CONCURRENTLY IF NOT EXISTS), and is run again after a kill.

No step waits long for a lock: claims and settles would queue behind it. It gives up after a moment, lets them pass, and
tries again.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files

import psycopg
from psycopg import sql

from penstock.errors import PenstockError
from penstock.observe.logs import event

_log = logging.getLogger("penstock.migrations")

# One number for all of Penstock: two migrators of one database wait for each other.
_LOCK_KEY = 0x50454E53544F434B
_LOCK_POLL_S = 0.1

# A statement that waits for a table's lock makes every later one wait behind it: it waits so long, then pauses.
_LOCK_TIMEOUT_MS = 500
_LOCK_PAUSE_S = 1.0

_NAME = re.compile(r"(\d{4})_\w+_(pre|post)\.sql")

_BOOTSTRAP = b"""
CREATE TABLE IF NOT EXISTS penstock.migrations (
  number      int4 PRIMARY KEY,
  name        text NOT NULL,
  checksum    text NOT NULL,
  applied_at  timestamptz NOT NULL DEFAULT now()
);
"""

_INVALID_INDEXES = """
SELECT c.relname FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
 WHERE c.relnamespace = 'penstock'::regnamespace AND NOT i.indisvalid
"""

_LONG_READERS = """
SELECT pid, application_name, extract(epoch FROM now() - xact_start)::int FROM pg_stat_activity
 WHERE datname = current_database() AND pid <> pg_backend_pid()
   AND pid IN (SELECT l.pid FROM pg_locks l JOIN pg_class c ON c.oid = l.relation
                WHERE c.relnamespace = 'penstock'::regnamespace AND l.granted)
 ORDER BY xact_start LIMIT 3
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
    """Migrations that a database has and lacks."""

    applied: list[Migration]
    missing: list[Migration]
    unknown: list[str]
    """Applied by a newer Penstock than this one."""

    @property
    def ready(self) -> bool:
        """Whether this version can work on the database: nothing it needs is missing or was taken away."""
        return not [m for m in self.missing if m.phase == "pre"] and not self.too_new

    @property
    def too_new(self) -> list[str]:
        """Steps of a newer Penstock that take away what older ones need."""
        return [name for name in self.unknown if not name.endswith("_pre")]


def list_migrations() -> list[Migration]:
    found = []
    for entry in files("penstock.db").joinpath("migrations").iterdir():
        match = _NAME.fullmatch(entry.name)
        if match:
            found.append(Migration(int(match[1]), entry.name.removesuffix(".sql"), match[2], entry.read_text("utf-8")))
    return sorted(found, key=lambda migration: migration.number)


def read_standing(conninfo: str) -> Standing:
    """Compare the database with this version's migrations, changing nothing."""
    with _connect(conninfo) as connection:
        known = connection.execute("SELECT to_regclass('penstock.migrations')").fetchone()
        rows = {}
        if known is not None and known[0] is not None:
            rows = _read_applied(connection)
        return _compare(rows)


def migrate(
    conninfo: str,
    *,
    post: bool = False,
    wait_s: float = 600.0,
    on_step: Callable[[Migration], None] = lambda _: None,
    on_wait: Callable[[Migration, str], None] = lambda _, __: None,
) -> list[Migration]:
    """Apply the pre steps this version brings, and with `post` the post steps too; returns what was applied.

    Safe to run from many processes at once, and again after a kill. `on_wait` is called when a step has to wait for
    other transactions, with their names; after `wait_s` of waiting the step is given up.
    """
    with _lock(conninfo), _connect(conninfo) as connection:
        _bootstrap(connection)
        rows = _read_applied(connection)
        found = _compare(rows)
        if found.too_new:
            raise PenstockError(
                f"the database was migrated by a newer Penstock (it has {', '.join(found.too_new)})",
                hint="Upgrade this Penstock, or point it at another database.",
            )
        steps = found.missing if post or not rows else _pre_steps(found.missing)
        for migration in steps:
            on_step(migration)
            _apply_patiently(connection, migration, wait_s, on_wait)
            fields = event("migration_applied", migration=migration.name)
            _log.info("applied migration %s", migration.name, extra=fields)
        return steps


def _pre_steps(missing: list[Migration]) -> list[Migration]:
    """Pre steps: those that may run while older code does."""
    steps = [migration for migration in missing if migration.phase == "pre"]
    left = [migration for migration in missing if migration.phase == "post"]
    if steps and left and left[0].number < steps[-1].number:
        raise PenstockError(
            f"{left[0].name}, a step of an earlier release, has not been run on this database",
            hint="Once no process of an older Penstock runs on it: penstock db migrate --post",
        )
    return steps


@contextmanager
def _lock(conninfo: str) -> Iterator[None]:
    """Let one migrator run at a time. The lock belongs to a transaction on a connection of its own: behind a pooler, a
    session lock would outlive this process. It is asked for again and again, since a statement that waits holds a
    snapshot, and an index that is built concurrently waits for every snapshot to end."""
    with _connect(conninfo, "penstock migration lock") as lock:
        while True:
            with lock.transaction():
                lock.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
                # The number is part of the text: a statement with parameters leaves a portal behind, and its snapshot.
                if lock.execute(sql.SQL("SELECT pg_try_advisory_xact_lock({})").format(_LOCK_KEY)).fetchone() == (
                    True,
                ):
                    yield
                    return
            time.sleep(_LOCK_POLL_S)


def _connect(conninfo: str, name: str = "penstock migration") -> psycopg.Connection:
    return psycopg.connect(conninfo, autocommit=True, prepare_threshold=None, application_name=name)


def _bootstrap(connection: psycopg.Connection) -> None:
    try:
        # The schema is looked for first: IF NOT EXISTS needs the right to create schemas even where it exists.
        if connection.execute("SELECT to_regnamespace('penstock')").fetchone() == (None,):
            connection.execute("CREATE SCHEMA penstock")
        connection.execute(_BOOTSTRAP)
    except psycopg.errors.InsufficientPrivilege as error:
        raise PenstockError(
            "the database user may not create the schema 'penstock'",
            hint="Run once as an owner: CREATE SCHEMA penstock AUTHORIZATION <this user>;",
        ) from error


def _read_applied(connection: psycopg.Connection) -> dict[int, tuple[str, str]]:
    rows = connection.execute("SELECT number, name, checksum FROM penstock.migrations").fetchall()
    return {number: (name, checksum) for number, name, checksum in rows}


def _compare(rows: dict[int, tuple[str, str]]) -> Standing:
    ours = list_migrations()
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


def _apply_patiently(
    connection: psycopg.Connection, migration: Migration, wait_s: float, on_wait: Callable[[Migration, str], None]
) -> None:
    give_up_at = time.monotonic() + wait_s
    while True:
        try:
            _apply(connection, migration)
        except psycopg.errors.LockNotAvailable as error:
            holders = _holders(connection)
            if time.monotonic() > give_up_at:
                raise PenstockError(
                    f"{migration.name} could not be applied: its tables are in use by {holders}",
                    hint="End that transaction, or run the migration again later. Nothing was changed.",
                ) from error
            on_wait(migration, holders)
            time.sleep(_LOCK_PAUSE_S)
        else:
            return


def _holders(connection: psycopg.Connection) -> str:
    rows = connection.execute(_LONG_READERS).fetchall()
    return ", ".join(f"process {pid} ({name or 'unnamed'}) for {age_s} s" for pid, name, age_s in rows) or "others"


def _apply(connection: psycopg.Connection, migration: Migration) -> None:
    note = sql.SQL("INSERT INTO penstock.migrations (number, name, checksum) VALUES ({}, {}, {})").format(
        migration.number, migration.name, migration.checksum
    )
    if migration.transactional:
        with connection.transaction():
            connection.execute(sql.SQL("SET LOCAL lock_timeout = {}").format(_LOCK_TIMEOUT_MS))
            connection.execute(migration.text.encode())
            connection.execute(note)
    else:
        # An index whose build was cut short exists, is unusable, and IF NOT EXISTS would leave it so.
        for (index,) in connection.execute(_INVALID_INDEXES).fetchall():
            connection.execute(sql.SQL("DROP INDEX CONCURRENTLY penstock.{}").format(sql.Identifier(index)))
        connection.execute(migration.text.encode())
        connection.execute(note)

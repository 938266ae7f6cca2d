"""Checks of the database server: version, rights, migrations, clock, connections, settings, old snapshots."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from time import time

from penstock.db import sql
from penstock.db.migrate import read_standing
from penstock.db.pool import fetch_one
from penstock.errors import PenstockError
from penstock.observe.doctor.finding import Database, Finding, Installation, plural, refused

SQL = sql.load("penstock.observe.doctor", "database.sql")

_LEAST_VERSION = 150_000
# Certificates are valid from a moment on, and a Retry-After may be a date.
_SKEW_WARNING_S = 2.0
_SKEW_PROBLEM_S = 60.0
_SHORT_TIMEOUT_MS = 60_000

# name -> (value that hurts, what it costs, what to do)
_HARMFUL = {
    "fsync": ("off", "a crash of the machine can destroy the database", "ALTER SYSTEM SET fsync = on"),
    "full_page_writes": (
        "off",
        "a crash of the machine can leave torn pages",
        "ALTER SYSTEM SET full_page_writes = on",
    ),
    "synchronous_commit": (
        "off",
        "a crash loses requests that were accepted and answers that were recorded",
        "ALTER SYSTEM or ALTER ROLE ... SET synchronous_commit = on",
    ),
    "autovacuum": ("off", "the small hot tables grow, and claims get slower", "ALTER SYSTEM SET autovacuum = on"),
}
_TIMEOUTS = {
    "statement_timeout": "cuts statements that are not Penstock's pools': migrations, intake, exports",
    "transaction_timeout": "cuts exports and intakes",
    "idle_in_transaction_session_timeout": "cuts exports whose reader is slow",
    "idle_session_timeout": "cuts connections that wait for work",
}


async def check_version(_: Installation, database: Database) -> AsyncIterator[Finding]:
    number = database.connection.info.server_version
    version = f"PostgreSQL {number // 10_000}.{number % 10_000}"
    if number < _LEAST_VERSION:
        yield Finding("version", "problem", version, "Penstock needs PostgreSQL 15 or later: upgrade the server.")
    else:
        yield Finding("version", "ok", version)


async def check_rights(_: Installation, database: Database) -> AsyncIterator[Finding]:
    row = await fetch_one(database.connection, SQL["read_role"], {})
    if row is None:
        return
    role, read_only, may_create, has_schema, owns, unusable = row
    if read_only:
        remedy = (
            "Name the primary, or all hosts with target_session_attrs=read-write; or end default_transaction_read_only."
        )
        yield Finding("rights", "problem", "the server takes no writes: a standby, or read-only by setting", remedy)
    elif not has_schema and not may_create:
        remedy = f"Run once as an owner: CREATE SCHEMA penstock AUTHORIZATION {role};"
        yield Finding("rights", "problem", f"role {role} may not create the schema 'penstock'", remedy)
    elif unusable:
        remedy = f"Grant the rights, or ALTER SCHEMA penstock OWNER TO {role} with its tables."
        yield Finding("rights", "problem", f"role {role} may not use {', '.join(unusable[:3])}", remedy)
    elif has_schema and not owns:
        remedy = "Migrations need the owner: run `penstock db migrate` as that role before each upgrade."
        yield Finding("rights", "warning", f"role {role} does not own the schema 'penstock'", remedy)
    else:
        yield Finding("rights", "ok", f"role {role}")


async def check_migrations(_: Installation, database: Database) -> AsyncIterator[Finding]:
    try:
        standing = await asyncio.to_thread(read_standing, database.conninfo)
    except PenstockError as error:
        yield refused("migrations", error)
        return
    pre = [migration.name for migration in standing.missing if migration.phase == "pre"]
    post = [migration.name for migration in standing.missing if migration.phase == "post"]
    if standing.too_new:
        seen = f"a newer Penstock removed what this one needs: {', '.join(standing.too_new)}"
        yield Finding("migrations", "problem", seen, "Upgrade this Penstock.")
    elif not standing.applied:
        remedy = "`penstock db migrate` makes the tables; so does the first start."
        yield Finding("migrations", "warning", "the database has never been used by Penstock", remedy)
    elif pre:
        remedy = "`penstock db migrate` applies them; so does the next start of this version."
        yield Finding("migrations", "problem", f"pending: {', '.join(pre)}", remedy)
    elif standing.unknown:
        remedy = "Upgrade this Penstock too, before the newer one runs `penstock db migrate --post`."
        yield Finding("migrations", "warning", f"from a newer Penstock: {', '.join(standing.unknown)}", remedy)
    elif post:
        remedy = "Once no process of an older version runs: penstock db migrate --post"
        yield Finding("migrations", "warning", f"left: {', '.join(post)}", remedy)
    else:
        yield Finding("migrations", "ok", f"{len(standing.applied)} applied")


async def check_clock(_: Installation, database: Database) -> AsyncIterator[Finding]:
    before = time()
    row = await fetch_one(database.connection, SQL["read_clock"], {})
    after = time()
    if row is None:
        return
    # The database looked at its clock at some time in between.
    skew = max(0.0, row[0] - after, before - row[0])
    seen = f"{skew:,.1f} s between this machine and the database"
    remedy = "Let both machines follow a time server: certificates and Retry-After dates are judged by this one."
    if skew > _SKEW_PROBLEM_S:
        yield Finding("clock", "problem", seen, remedy)
    elif skew > _SKEW_WARNING_S:
        yield Finding("clock", "warning", seen, remedy)
    else:
        yield Finding("clock", "ok", seen)


async def check_connections(installation: Installation, database: Database) -> AsyncIterator[Finding]:
    row = await fetch_one(database.connection, SQL["read_connections"], {})
    if row is None:
        return
    allowed, of_database, of_role, used, ours = row
    allowed = min([allowed, *(limit for limit in (of_database, of_role) if limit >= 0)])
    needed, others = installation.connections, used - ours
    processes = plural(installation.workers, "worker process").replace("processs", "processes")
    seen = f"{allowed} allowed, {used} in use ({ours} by Penstock); a server with {processes} needs {needed}"
    remedy = "Raise max_connections, or lower api_pool_max, pool_max or --workers, or put PgBouncer in between."
    if database.pooled:
        yield Finding("connections", "ok", f"{seen}; a pooler shares them out")
    elif needed > allowed:
        yield Finding("connections", "problem", seen, remedy)
    elif needed > allowed - others:
        yield Finding("connections", "warning", seen, remedy)
    else:
        yield Finding("connections", "ok", seen)


async def check_settings(installation: Installation, database: Database) -> AsyncIterator[Finding]:
    cursor = await database.connection.execute(SQL["read_settings"], {"names": [*_HARMFUL, *_TIMEOUTS]})
    settings: dict[str, str] = dict(await cursor.fetchall())
    fine = True
    for name, (value, cost, cure) in _HARMFUL.items():
        if settings[name] == value:
            fine = False
            yield Finding("settings", "problem", f"{name} is {value}: {cost}", f"{cure}, then SELECT pg_reload_conf().")
    for name, cost in _TIMEOUTS.items():
        limit_ms = int(settings.get(name, 0))
        if 0 < limit_ms < _SHORT_TIMEOUT_MS:
            fine = False
            remedy = f"ALTER ROLE ... SET {name} = '60s' or more, or 0."
            yield Finding("settings", "warning", f"{name} of this role is {limit_ms:,} ms: {cost}", remedy)
    if database.pooled and not int(settings["statement_timeout"]):
        fine = False
        limit_s = installation.config.database.statement_timeout_s
        remedy = f"ALTER ROLE ... SET statement_timeout = '{limit_s:g}s': behind a pooler Penstock sets none itself."
        yield Finding("settings", "warning", "statements have no time limit behind the pooler", remedy)
    if fine:
        yield Finding("settings", "ok", "nothing that hurts")


async def check_pooler(_: Installation, database: Database) -> AsyncIterator[Finding]:
    if database.pooled:
        remedy = "Nothing is wrong: new work is found by polling, within claim_poll_s. For notices, connect directly."
        yield Finding("pooler", "warning", "a pooler answers for the server: notices do not arrive", remedy)
    else:
        yield Finding("pooler", "ok", "none")


async def check_snapshots(installation: Installation, database: Database) -> AsyncIterator[Finding]:
    older_s = installation.config.observe.old_snapshot_s
    held = await (await database.connection.execute(SQL["list_old_snapshots"], {"older_s": older_s})).fetchall()
    for holder, age_s, cure in held:
        since = "" if age_s is None else f" for {age_s:,.0f} s"
        seen = f"{holder} keeps dead rows{since}: claims get slower"
        yield Finding("snapshots", "warning", seen, f"If it is not needed: {cure};")
    if not held:
        yield Finding("snapshots", "ok", f"none older than {older_s:g} s")


CHECKS = (
    ("version", check_version),
    ("rights", check_rights),
    ("migrations", check_migrations),
    ("clock", check_clock),
    ("connections", check_connections),
    ("pooler", check_pooler),
    ("settings", check_settings),
    ("snapshots", check_snapshots),
)

"""Examination as a whole: every check in turn. One that cannot be made is a problem, and does not stop the others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import psycopg

from penstock.db.embedded.postgres import check_usable
from penstock.db.pool import BACKEND_PID, Connection, is_pooled
from penstock.db.start import start_database
from penstock.deliver.sealing import check_sealing_keys
from penstock.errors import PenstockError
from penstock.observe.doctor import database as server
from penstock.observe.doctor import machine, work
from penstock.observe.doctor.finding import Database, Finding, Installation, Report, refused
from penstock.observe.doctor.providers import check_providers
from penstock.observe.logs import redacted

_CONNECT_WITHIN_S = 10


async def examine(installation: Installation, report: Report) -> None:
    """Make every check, and report each finding as it comes."""
    for check in machine.CHECKS:
        for finding in check(installation):
            report(finding)
    for finding in _check_secrets(installation):
        report(finding)
    await _examine_database(installation, report)
    for finding in await check_providers(installation):
        report(finding)


def _check_secrets(installation: Installation) -> list[Finding]:
    findings = []
    for sink in installation.config.sinks:
        try:
            sink.secret()
        except PenstockError as error:
            findings.append(refused(f"sink {sink.name}", error))
    try:
        check_sealing_keys(installation.config)
    except PenstockError as error:
        findings.append(refused("sealing keys", error))
    return findings


async def _examine_database(installation: Installation, report: Report) -> None:
    config = installation.config
    if config.database_url is None and not (config.data_dir / "pg").is_dir():
        report(_describe_missing(config.data_dir))
        return
    try:
        with contextlib.ExitStack() as held:
            conninfo = await asyncio.to_thread(held.enter_context, start_database(config))
            async with _connect(conninfo) as found:
                await _examine_found(installation, found, report)
    except PenstockError as error:
        report(refused("database", error))
    except psycopg.Error as error:
        remedy = "Check --database-url (or PENSTOCK_DATABASE_URL), the password, and that the server runs."
        report(Finding("database", "problem", f"cannot connect: {_first_line(error)}", remedy))


def _describe_missing(data_dir: Path) -> Finding:
    try:
        check_usable(data_dir)
    except PenstockError as error:
        return refused("database", error)
    remedy = "The first `penstock run`, `serve` or `db migrate` makes one."
    return Finding("database", "warning", f"{data_dir} holds no database yet", remedy)


@contextlib.asynccontextmanager
async def _connect(conninfo: str) -> AsyncIterator[Database]:
    connection: Connection
    async with await psycopg.AsyncConnection.connect(
        conninfo,
        autocommit=True,
        prepare_threshold=None,
        connect_timeout=_CONNECT_WITHIN_S,
        application_name="penstock doctor",
    ) as connection:
        pooled = is_pooled(connection, await (await connection.execute(BACKEND_PID)).fetchone())
        yield Database(connection, conninfo, pooled)


async def _examine_found(installation: Installation, found: Database, report: Report) -> None:
    usable = True
    for name, check in (*server.CHECKS, *work.CHECKS):
        if not usable and (name, check) in work.CHECKS:
            continue  # there are no tables yet
        try:
            async for finding in check(installation, found):
                report(finding)
                if name == "migrations" and finding.result != "ok":
                    usable = await _has_tables(found)
        except psycopg.Error as error:
            report(Finding(name, "problem", f"could not be checked: {_first_line(error)}", "Mend what is above first."))


async def _has_tables(found: Database) -> bool:
    cursor = await found.connection.execute("SELECT to_regclass('penstock.workers')")
    return await cursor.fetchone() != (None,)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return redacted(lines[0]) if lines else type(error).__name__

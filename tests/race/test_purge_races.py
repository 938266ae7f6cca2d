"""Purges beside each other and beside whoever else is at the same rows: none waits, and no report comes too early."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from uuid import UUID, uuid4

import pytest

from penstock.batches.finish import finish_batch
from penstock.batches.read import get_batch
from penstock.batches.steer import cancel_batch
from penstock.claim import liveness
from penstock.config import LivenessLimits
from penstock.db import sql
from penstock.db.pool import Connection
from penstock.erase import erase, purge
from penstock.model import Again, OutcomeState
from tests.support.db import one, with_connection
from tests.support.engine import make_file
from tests.support.interleave import Interleaver, Play, Statement, interleaver
from tests.support.sessions import DEAD, DONE, OWNER, end, send, take_items
from tests.support.thorough import thorough
from tests.support.wishes import WORKER, answer, ask_for, defer, take

# Deleted in this order, each lists some of the rows that those before it have listed.
OVERLAPS = [
    ("input", "batch"),
    ("errors", "output"),
    ("errors", "input"),
    ("errors", "batch"),
    ("output", "batch"),
    ("errors", "output", "input", "batch"),
    ("archive", "batch"),
]
ROWS = 5

_LEFT = """
SELECT (SELECT count(*) FROM penstock.outcomes WHERE state = 'completed')::int4 AS completed,
       (SELECT count(*) FROM penstock.outcomes WHERE state <> 'completed')::int4 AS not_completed,
       (SELECT count(*) FROM penstock.attempts)::int4 AS attempts,
       (SELECT count(*) FROM penstock.reclaims)::int4 AS reclaims,
       (SELECT count(*) FROM penstock.deferrals)::int4 AS deferrals,
       (SELECT count(*) FROM penstock.journal)::int4 AS journal
"""
_FORGET = b"TRUNCATE penstock.outcomes, penstock.deferrals, penstock.journal, penstock.erasures"
_RESULTS = {"completed", "not_completed", "attempts", "reclaims", "deferrals", "journal"}
# What is gone once a report says so. The history goes with the errors if they are deleted before the output.
_COVERED = {
    "file": {"attempts", "reclaims", "deferrals"},
    "errors": {"not_completed", "attempts", "reclaims"},
    "output": {"completed"},
    "batch": _RESULTS,
    "message_batch": _RESULTS,
    "message_batch_results": _RESULTS,
}


async def make_ended_batch(connection: Connection, dialect: str) -> UUID:
    """Cancelled halfway: with answers, failures, a history, and requests that waited for another try."""
    batch = await ask_for(connection, await make_file(connection, [ROWS]), dialect=dialect, now=datetime.now(UTC))
    await take(connection, 1, worker=uuid4())
    await liveness.reclaim(connection, uuid4(), LivenessLimits(), stuck_s=1e6)
    await defer(connection, await take(connection, 1))
    await answer(connection, await take(connection, 2), OutcomeState.FAILED)
    await answer(connection, await take(connection, 1))
    assert await cancel_batch(connection, batch)
    assert await finish_batch(connection, batch)
    return batch


async def delete(connection: Connection, batch_id: UUID, what: str) -> None:
    batch = await get_batch(connection, batch_id, None)
    assert batch is not None
    if what == "batch":
        assert await erase.delete_batch(connection, batch_id, None)
    elif what == "archive":
        assert await erase.archive_batches(connection, 1, now=datetime.now(UTC) + 2 * erase.MESSAGE_RESULTS_KEPT)
    else:
        files = {"input": batch.file_id, "output": batch.output_file_id, "errors": batch.error_file_id}
        file_id = files[what]
        assert file_id is not None
        assert await erase.delete_file(connection, file_id, None)


def purging(rows: int) -> Statement:
    return lambda connection: purge.purge_step(connection, rows)


async def no_report_comes_too_early(connection: Connection) -> None:
    cursor = await connection.execute(_LEFT.encode())
    left = dict(zip([column.name for column in cursor.description or ()], await cursor.fetchone() or (), strict=True))
    for report in await purge.list_erasures(connection, None):
        if report.finished_at is not None and report.kind in _COVERED:
            assert not any(left[what] for what in _COVERED[report.kind]), (report.kind, left)


async def purged_to_the_end(connection: Connection) -> None:
    while await purge.purge_step(connection, 100):
        await no_report_comes_too_early(connection)
    assert all(report.finished_at for report in await purge.list_erasures(connection, None))
    assert await one(connection, "SELECT count(*) FROM penstock.erasure_pieces") == (0,)
    await no_report_comes_too_early(connection)


def taking_turns(conninfo: str, sessions: int, body: Callable[[Interleaver], Awaitable[None]]) -> None:
    async def run() -> None:
        async with interleaver(conninfo, sessions) as turns:
            await body(turns)

    asyncio.run(run())


@pytest.mark.parametrize("overlap", OVERLAPS, ids="-".join)
def test_two_purges_never_meet_on_rows_that_two_deletions_listed(database: str, overlap: tuple[str, ...]) -> None:
    """One has deleted some rows and not committed, wherever that is; the other does everything it can get."""

    async def body(turns: Interleaver) -> None:
        db, done = turns.observer, 0
        for rows in range(1, 40, 1 if thorough() else 3):
            batch = await make_ended_batch(db, "anthropic" if "archive" in overlap else "openai")
            for what in overlap:
                await delete(db, batch, what)
            # The third looks while the first has still not committed.
            play = await turns.play((0, 1, 1, 2, 2, 0), [purging(rows), purging(1_000), no_report_comes_too_early])
            assert not play.was_blocked(1), f"by somebody who had deleted {rows} rows"
            done = play.answers[0]
            await purged_to_the_end(db)
            await db.execute(_FORGET)
            if done < rows:
                break
        assert done < rows, "it was everywhere"

    taking_turns(database, 3, body)


def test_a_purge_passes_over_what_another_one_has_listed_before_it(database: str) -> None:
    """It does what is next, and what it passed over is done as soon as the other is through."""

    async def body(turns: Interleaver) -> None:
        db = turns.observer
        first, second = [await make_ended_batch(db, "openai") for _ in range(2)]
        for what in ("input", "batch"):
            await delete(db, first, what)
        await delete(db, second, "batch")
        # Everything of the input is gone but not committed; the batch's own rows are free, those they share are not.
        ((rows,),) = await (
            await db.execute("SELECT sum(total) FROM penstock.erasure_pieces WHERE what = 'templates'")
        ).fetchall()
        play = await turns.play((0, 1, 1, 0), [purging(rows + 1), purging(1_000)])
        assert not play.was_blocked(1)
        assert await get_batch(db, second, None) is None
        left = await (
            await db.execute("SELECT DISTINCT what FROM penstock.erasure_pieces WHERE next < total ORDER BY what")
        ).fetchall()
        assert left == [("attempts",)]
        await purged_to_the_end(db)

    taking_turns(database, 2, body)


async def _held(turns: Interleaver, lock: bytes) -> Play:
    """A purge while somebody holds a row."""

    async def hold(connection: Connection) -> int:
        return len(await (await connection.execute(lock)).fetchall())

    async def purge_some(connection: Connection) -> int:
        return sum([await purge.purge_step(connection, 100) for _ in range(3)])

    play = await turns.play((0, 1, 1, 2, 2, 0), [hold, purge_some, lambda c: purge.list_erasures(c, None)])
    assert play.answers[0] == 1
    assert not play.was_blocked(1)
    assert play.answers[1] > 3, "what is free goes, and there is more to do"
    return play


@pytest.mark.parametrize("what", ["input", "batch"])
def test_a_purge_passes_over_deferrals_that_somebody_has_looked_at(database: str, what: str) -> None:
    """A claim locks what it finds before it knows whether it may have it, housekeeping what it holds or releases."""

    async def body(turns: Interleaver) -> None:
        db = turns.observer
        batch = await make_ended_batch(db, "openai")
        await delete(db, batch, what)
        play = await _held(turns, b"SELECT FROM penstock.deferrals ORDER BY id DESC LIMIT 1 FOR UPDATE")
        assert [report.finished_at for report in play.answers[2]] == [None]
        await purged_to_the_end(db)

    taking_turns(database, 3, body)


@pytest.mark.parametrize(
    ("table", "before"), [("deferrals", 0), ("session_requests", 0), ("session_requests", 1), ("session_stream", 3)]
)
def test_a_purge_passes_over_a_session_that_somebody_is_at(database: str, table: str, before: int) -> None:
    """Who announces answers, moves requests to another pool or forgets pieces does not know of the deletion."""

    async def body(turns: Interleaver) -> None:
        db = turns.observer
        await send(db, *"aaaa")
        for verdict in (DONE, DEAD, Again("busy", "m", 0.0, True)):
            await end(db, WORKER, await take_items(db, WORKER), verdict)
        await db.execute(
            "INSERT INTO penstock.session_stream SELECT id, n, 1, 'x' FROM penstock.session_requests,"
            " generate_series(1, 2) AS n"
        )
        assert await erase.delete_session(db, OWNER, "a")
        play = await _held(turns, f"SELECT FROM penstock.{table} LIMIT 1 OFFSET {before} FOR UPDATE".encode())
        assert [report.finished_at for report in play.answers[2]] == [None]
        await purged_to_the_end(db)
        for name in ("session_requests", "session_stream", "deferrals", "outcomes", "lanes", "sessions"):
            assert await one(db, f"SELECT count(*) FROM penstock.{name}") == (0,), name

    taking_turns(database, 3, body)


def test_no_table_gives_the_space_of_what_was_deleted_back(database: str) -> None:
    """Vacuum would take a lock for it that purges, claims and readers wait for."""

    async def body(connection: Connection) -> None:
        statements = b" ".join(statement.text for statement in sql.load("penstock.erase", "erase.sql")).decode()
        cursor = await connection.execute(
            "SELECT c.relname FROM pg_class c LEFT JOIN pg_class t ON t.oid = c.reltoastrelid"
            " WHERE c.relnamespace = 'penstock'::regnamespace AND c.relkind = 'r'"
            "   AND NOT ('vacuum_truncate=off' = ANY (coalesce(c.reloptions, '{}'))"
            "            AND (t.oid IS NULL OR 'vacuum_truncate=off' = ANY (coalesce(t.reloptions, '{}'))))"
        )
        giving = {name for (name,) in await cursor.fetchall()}
        assert giving, "some are never deleted from"
        assert giving & set(re.findall(r"penstock\.(\w+)", statements)) == set()

    with_connection(database, body)

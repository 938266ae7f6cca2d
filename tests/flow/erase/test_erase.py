"""Deleting files and batches: at once for everybody, then out of the tables, and never back."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from penstock.batches.create import create_batch, find_batch_by_key
from penstock.batches.finish import finish_batch
from penstock.batches.read import find_batch_of_result, get_batch, list_batches, read_status
from penstock.batches.run_again import NotRetryable, retry_batch
from penstock.batches.steer import pause_batch
from penstock.batches.upkeep import list_unfinished
from penstock.batches.validate import request_batch, validate_batch
from penstock.claim import claim as claims
from penstock.claim import liveness
from penstock.config import IntakeLimits, LivenessLimits
from penstock.db.pool import Connection
from penstock.erase import erase
from penstock.erase import purge as erase_purge
from penstock.intake.intake import FileIntake
from penstock.model import BatchState, Lease, OutcomeState, new_id
from tests.support.db import connected, one, with_connection
from tests.support.dump import dumped
from tests.support.engine import count_leased, make_file
from tests.support.wishes import ENDPOINT, POOL, answer, ask_for, defer, make_wish, take, traces

FAILED = OutcomeState.FAILED
CANARY = b"canary-in-the-coal-mine"


async def purge(connection: Connection, rows: int = 1_000) -> int:
    steps = 0
    while await erase_purge.purge_step(connection, rows):
        steps += 1
    return steps


async def add_chunks(connection: Connection, file_id: UUID, count: int, content: bytes = b"x") -> None:
    await connection.execute("UPDATE penstock.files SET chunks = %s WHERE id = %s", [count, file_id])
    await connection.execute(
        "INSERT INTO penstock.file_chunks SELECT source_id, n, 1, %s FROM penstock.files, generate_series(0, %s) n"
        " WHERE id = %s",
        [content, count - 1, file_id],
    )


async def count_rows(connection: Connection) -> dict[str, int]:
    tables = (
        *("files", "file_lanes", "file_chunks", "templates", "batches", "lanes", "leases", "deferrals"),
        *("outcomes", "attempts", "reclaims", "progress", "journal", "samples", "erasure_pieces"),
    )
    counts = {name: (await one(connection, f"SELECT count(*) FROM penstock.{name}"))[0] for name in tables}
    return {name: count for name, count in counts.items() if count}


async def add_webhook(connection: Connection, *types: str) -> None:
    await connection.execute(
        "INSERT INTO penstock.webhook_endpoints (id, owner, name, url, event_types, secret, created_at, updated_at)"
        " VALUES (%s, 'local', 'n', 'https://x', %s, 'x', now(), now())",
        [uuid4(), list(types)],
    )


class TestDeletingAFile:
    def test_takes_everything_unfinished_from_its_workers_in_one_commit(self, database: str) -> None:
        async def body(connection: Connection) -> None:
            file_id = await make_file(connection, [10, 5])
            await add_webhook(connection, "batch.cancelled", "batch.completed")
            running = await ask_for(connection, file_id)
            await answer(connection, await take(connection, 2))
            failed = await take(connection, 1)
            await answer(connection, failed, FAILED)
            await defer(connection, await take(connection, 1))
            held = await take(connection, 2)
            waiting = await ask_for(connection, file_id, validated=False)
            paused = await ask_for(connection, file_id)
            await pause_batch(connection, paused)

            assert await erase.delete_file(connection, file_id, "local")

            assert await take(connection) == []
            assert (await answer(connection, held)).fenced == count_leased(held)
            for batch_id in (running, waiting, paused):
                batch = await get_batch(connection, batch_id, "local")
                assert batch is not None
                assert (batch.state, batch.file_id, batch.counts.in_flight) == (BatchState.CANCELLED, None, 0)
                assert batch.cancelling_at is not None
            batch = await get_batch(connection, running, "local")
            assert batch is not None
            counts = batch.counts
            assert (counts.completed, counts.failed, counts.cancelled, counts.total) == (4, 2, 9, 15)
            assert await one(connection, "SELECT count(*) FROM penstock.leases") == (0,)
            files = await (
                await connection.execute(
                    "SELECT kind, lines, id FROM penstock.files WHERE batch_id = %s ORDER BY kind DESC", [running]
                )
            ).fetchall()
            assert files == [("output", 4, batch.output_file_id), ("errors", 2, batch.error_file_id)]
            events = "SELECT count(*), count(DISTINCT event_id), min(type) FROM penstock.webhook_deliveries"
            assert await one(connection, events) == (3, 3, "batch.cancelled")

        with_connection(database, body)

    def test_leaves_results_and_takes_the_input(self, database: str) -> None:
        async def body(connection: Connection) -> None:
            file_id = await make_file(connection, [30, 20])
            await add_chunks(connection, file_id, 7)
            ended = await ask_for(connection, file_id)
            await answer(connection, await take(connection))
            assert await finish_batch(connection, ended)
            running = await ask_for(connection, file_id)
            await answer(connection, await take(connection, 3))
            assert not await erase.delete_file(connection, file_id, "other")
            assert await erase.delete_file(connection, file_id, "local")
            assert not await erase.delete_file(connection, file_id, "local")
            (before,) = await erase_purge.list_erasures(connection, "local")
            assert (before.kind, before.object_id, before.finished_at, before.templates) == ("file", file_id, None, 0)
            assert await purge(connection, rows=20) >= 3
            left = await count_rows(connection)
            assert {"templates", "file_chunks", "file_lanes", "erasure_pieces"}.isdisjoint(left)
            assert (left["outcomes"], left["batches"], left["files"]) == (56, 2, 2)
            report = await erase_purge.get_erasure(connection, before.id, "local")
            assert report is not None
            assert report.finished_at is not None
            assert (report.templates, report.chunks, report.outcomes) == (50, 7, 0)
            assert await erase_purge.get_erasure(connection, before.id, "other") is None
            assert await erase_purge.list_erasures(connection, "other") == []
            batch = await get_batch(connection, ended, "local")
            assert batch is not None
            assert (batch.state, batch.file_id, batch.counts.completed) == (BatchState.COMPLETED, None, 50)
            with pytest.raises(NotRetryable, match="input file"):
                await retry_batch(connection, running, "local")

        with_connection(database, body)

    def test_completion_wins_if_everything_is_settled(self, database_18: str) -> None:
        async def body(connection: Connection) -> None:
            file_id = await make_file(connection, [3])
            batch_id = await ask_for(connection, file_id)
            await answer(connection, await take(connection))
            assert await erase.delete_file(connection, file_id, None)
            assert (await read_status(connection, batch_id)).state is BatchState.COMPLETED

        with_connection(database_18, body)

    def test_a_key_of_a_run_can_be_used_again(self, database_18: str) -> None:
        async def body(connection: Connection) -> None:
            file_id = await make_file(connection, [3])
            await create_batch(connection, file_id=file_id, owner="local", pool="p", key="k")
            assert await erase.delete_file(connection, file_id, None)
            assert await find_batch_by_key(connection, "local", "k") is None
            other = await make_file(connection, [3])
            await create_batch(connection, file_id=other, owner="local", pool="p", key="k")

        with_connection(database_18, body)

    def test_an_input_goes_with_the_last_batch_over_it(self, database_18: str) -> None:
        async def body(connection: Connection) -> None:
            file_id = await make_file(connection, [3])
            first, second = await ask_for(connection, file_id), await ask_for(connection, file_id)
            assert await erase.delete_batch(connection, first, None, with_input=True)
            await purge(connection)
            assert (await count_rows(connection))["templates"] == 3
            assert await erase.delete_batch(connection, second, None, with_input=True)
            await purge(connection)
            assert await count_rows(connection) == {}

        with_connection(database_18, body)

    def test_what_ended_long_ago_goes_by_itself(self, database_18: str) -> None:
        async def body(connection: Connection) -> None:
            ended, fresh = await make_wish(connection, [2]), await make_wish(connection, [2])
            for batch_id in (ended, fresh):
                await answer(connection, await take(connection, 2))
                assert await finish_batch(connection, batch_id)
            await make_wish(connection, [2])
            old = "UPDATE penstock.batches SET completed_at = completed_at - interval '1 day' WHERE id = %s"
            await connection.execute(old.encode(), [ended])
            assert await erase.expire_batches(connection, 3_600, UUID(int=0), 2) == (fresh, 1)
            place, removed = await erase.expire_batches(connection, 3_600, fresh, 2)
            assert (place, removed) == (None, 0)
            assert await get_batch(connection, ended, None) is None
            assert await get_batch(connection, fresh, None) is not None

        with_connection(database_18, body)

    def test_nothing_is_asked_for_once_it_is_deleted(self, database_18: str) -> None:
        async def body(connection: Connection) -> None:
            file_id = await make_file(connection, [3])
            waiting = await ask_for(connection, file_id, validated=False)
            assert await erase.delete_file(connection, file_id, None)
            await validate_batch(connection, waiting, lambda _: POOL)
            assert (await read_status(connection, waiting)).state is BatchState.CANCELLED
            wish: dict[str, Any] = {"endpoint": None, "completion_window": None, "window_s": None}
            assert await request_batch(connection, owner="local", dialect="openai", file_id=file_id, **wish) is None

        with_connection(database_18, body)


class TestDeletingResults:
    @pytest.mark.parametrize(("which", "left", "others"), [("output", 4, 6), ("errors", 6, 4)])
    def test_takes_one_kind_of_outcomes(self, database: str, which: str, left: int, others: int) -> None:
        async def body(connection: Connection) -> None:
            batch_id = await make_wish(connection, [10])
            await answer(connection, await take(connection, 4), FAILED)
            await answer(connection, await take(connection))
            batch = await get_batch(connection, batch_id, None)
            assert batch is not None
            file_id = batch.output_file_id if which == "output" else batch.error_file_id
            assert file_id is not None
            assert not await erase.delete_file(connection, file_id, "local"), "not before its end"
            assert await find_batch_of_result(connection, file_id, "other") is None
            found = await find_batch_of_result(connection, file_id, "local")
            assert found is not None
            assert (found[0].id, found[1]) == (batch_id, which)
            assert await finish_batch(connection, batch_id)
            assert not await erase.delete_file(connection, file_id, "other")
            assert await erase.delete_file(connection, file_id, "local")
            assert await find_batch_of_result(connection, file_id, "local") is None
            await purge(connection, rows=3)
            state = "completed" if which == "errors" else "failed"
            query = "SELECT count(*), count(*) FILTER (WHERE state = %s) FROM penstock.outcomes"
            assert await one(connection, query, [state]) == (left, left)
            (report,) = await erase_purge.list_erasures(connection, "local")
            assert (report.kind, report.outcomes, report.attempts) == (which, others, 4 if which == "errors" else 0)
            after = await get_batch(connection, batch_id, None)
            assert after is not None
            assert (after.output_file_id is None) == (which == "output")
            assert (after.error_file_id is None) == (which == "errors")
            with pytest.raises(NotRetryable, match="was deleted"):
                await retry_batch(connection, batch_id, None)

        with_connection(database, body)


class TestDeletingABatch:
    def test_leaves_nothing_but_the_report(self, database: str) -> None:
        async def body(connection: Connection) -> None:
            keep = await make_wish(connection, [5])
            await answer(connection, await take(connection))
            assert await finish_batch(connection, keep)
            before = await count_rows(connection)
            file_id = await make_file(connection, [20, 6])
            with_input = await count_rows(connection)
            batch_id = await ask_for(connection, file_id, metadata={"secret": "word"})
            await answer(connection, await take(connection, 3))
            await answer(connection, await take(connection, 2), FAILED)
            await defer(connection, await take(connection, 4))
            lost = await take(connection, 2, worker=uuid4())
            await liveness.reclaim(connection, uuid4(), LivenessLimits(), stuck_s=1e6)
            held = await take(connection, 1)

            assert not await erase.delete_batch(connection, batch_id, "other")
            assert await erase.delete_batch(connection, batch_id, "local")
            assert not await erase.delete_batch(connection, batch_id, "local")

            assert await get_batch(connection, batch_id, None) is None
            assert batch_id not in [b.id for b in await list_batches(connection, **everything())]
            assert await take(connection) == []
            assert (await answer(connection, held + lost)).outcomes == 0
            assert batch_id not in await list_unfinished(connection)
            await purge(connection, rows=4)
            assert await count_rows(connection) == with_input
            (report,) = await erase_purge.list_erasures(connection, "local")
            assert (report.kind, report.object_id, report.outcomes) == ("batch", batch_id, 10)
            assert report.attempts == 5 + 4, "put off, and failed"
            assert report.others > 0
            assert await erase.delete_file(connection, file_id, None)
            await purge(connection)
            assert await count_rows(connection) == before

        with_connection(database, body)

    def test_of_messages_takes_its_input_along(self, database: str) -> None:
        async def body(connection: Connection) -> None:
            file_id = await make_file(connection, [6])
            await add_chunks(connection, file_id, 2)
            batch_id = await ask_for(connection, file_id, dialect="anthropic")
            await answer(connection, await take(connection, 3))
            assert await erase.delete_batch(connection, batch_id, None)
            assert await one(connection, "SELECT deleted_at IS NOT NULL FROM penstock.files") == (True,)
            await purge(connection)
            assert await count_rows(connection) == {}
            (report,) = await erase_purge.list_erasures(connection, None)
            assert (report.kind, report.object_id) == ("message_batch", batch_id)
            assert (report.templates, report.chunks, report.outcomes) == (6, 2, 3)
            assert report.finished_at is not None

        with_connection(database, body)

    def test_workers_hear_that_its_lanes_are_gone(self, database_18: str) -> None:
        async def body(connection: Connection) -> None:
            batch_id = await make_wish(connection, [6])
            kept = await make_wish(connection, [6])
            leases = await take(connection, 12)
            lanes = {lease.batch_id: lease.lane_id for lease in leases}
            await erase.delete_batch(connection, batch_id, None)
            await purge(connection)
            assert await claims.find_closed_lanes(connection, lanes.values()) == {lanes[batch_id]}
            (mine,) = [lease for lease in leases if lease.batch_id == batch_id]
            assert await claims.read_bodies(connection, mine, mine.ranges, max_rows=9, max_bytes=9) == []
            assert kept in lanes

        with_connection(database_18, body)


def everything() -> dict[str, Any]:
    return {"owner": "local", "dialect": "openai", "limit": 1_000}


class TestExpiry:
    def test_files_go_when_their_time_is_up_unless_they_are_needed(self, database: str) -> None:
        async def body(connection: Connection) -> None:
            now = datetime.now(UTC)
            later = now + timedelta(hours=2)
            idle, busy, young = [await make_file(connection, [2]) for _ in range(3)]
            await connection.execute(
                "UPDATE penstock.files SET expires_at = %s WHERE id = ANY (%s)", [now, [idle, busy]]
            )
            batch_id = await ask_for(connection, busy, now=now - timedelta(hours=1), output_expires_after_s=3_600)
            assert await erase.expire_files(connection, 10, now=later) == 1
            query = "SELECT array_agg(id) FROM penstock.files WHERE deleted_at IS NOT NULL"
            assert await one(connection, query) == ([idle],)
            await answer(connection, await take(connection, 1), FAILED, now=now)
            await answer(connection, await take(connection), now=now)
            assert await finish_batch(connection, batch_id, now=now)
            assert await erase.expire_files(connection, 10, now=now + timedelta(minutes=30)) == 1, "the input"
            assert await erase.expire_files(connection, 10, now=later) == 2, "the results"
            await purge(connection)
            assert await count_rows(connection) == {
                **{"batches": 1, "lanes": 1, "files": 1, "file_lanes": 1, "templates": 2}
            }
            assert await one(connection, "SELECT id FROM penstock.files") == (young,)

        with_connection(database, body)

    def test_results_of_messages_go_and_the_batch_stays(self, database: str) -> None:
        async def body(connection: Connection) -> None:
            now = datetime.now(UTC)
            due = now + erase.MESSAGE_RESULTS_KEPT
            old = await make_wish(connection, [6], dialect="anthropic", now=now)
            other = await make_wish(connection, [2], now=now)
            await answer(connection, await take(connection, 2), FAILED, now=now)
            await answer(connection, await take(connection), now=now)
            for batch_id in (old, other):
                assert await finish_batch(connection, batch_id, now=now)
            young = await make_wish(connection, [2], dialect="anthropic", now=now + timedelta(hours=1))
            before = await get_batch(connection, old, None)
            assert await erase.archive_batches(connection, 10, now=due - timedelta(seconds=1)) == 0
            assert await erase.archive_batches(connection, 10, now=due) == 1
            assert await erase.archive_batches(connection, 10, now=due) == 0
            assert await erase.archive_batches(connection, 10, now=due + timedelta(hours=2)) == 0, "has not ended"
            await purge(connection)
            after = await get_batch(connection, old, None)
            assert before is not None
            assert after is not None
            assert (after.state, after.counts, after.file_id) == (before.state, before.counts, None)
            left = await count_rows(connection)
            assert (left["outcomes"], left["templates"], left["batches"], left["journal"]) == (2, 4, 3, 1)
            reports = await erase_purge.list_erasures(connection, None)
            assert [(report.kind, report.object_id) for report in reports] == [("message_batch_results", old)]
            assert all(report.finished_at for report in reports)
            assert await erase.delete_batch(connection, old, None)
            await purge(connection)
            assert (await count_rows(connection))["batches"] == 2
            assert await get_batch(connection, young, None) is not None

        with_connection(database, body)

    def test_requests_of_messages_are_no_file_and_expire_all_the_same(self, database_18: str) -> None:
        async def body(connection: Connection) -> None:
            file_id = await make_file(connection, [2])
            await connection.execute("UPDATE penstock.files SET purpose = 'message_batch', expires_at = now()")
            assert not await erase.delete_file(connection, file_id, None)
            assert await erase.expire_files(connection, 10) == 1
            await purge(connection)
            assert await count_rows(connection) == {}

        with_connection(database_18, body)


class TestNothingIsLeft:
    """Not a byte of what was deleted, whoever comes late."""

    @pytest.mark.parametrize("what", ["file", "batch"])
    def test_in_a_dump(self, database: str, what: str) -> None:
        async def body(connection: Connection) -> None:
            file_id = await make_file(connection, [40], body=b'{"prompt": "%b"}' % CANARY)
            await add_chunks(connection, file_id, 3, CANARY)
            batch_id = await ask_for(connection, file_id, dialect="openai", metadata={"canary": CANARY.decode()})
            await answer(connection, await take(connection, 5), body=b'"%b"' % CANARY)
            await answer(connection, await take(connection, 5), FAILED, message=CANARY.decode())
            zombie = await take(connection, 7)
            assert traces(database, CANARY) == 40 + 3 + 5 + 5 + 5 + 1 + 1
            if what == "batch":
                assert await erase.delete_batch(connection, batch_id, "local")
            assert await erase.delete_file(connection, file_id, "local")
            late = await answer(connection, zombie, body=b'"%b"' % CANARY)
            assert (late.outcomes, late.fenced) == (0, 7)
            await purge(connection)
            late = await answer(connection, zombie, FAILED, message=CANARY.decode())
            assert (late.outcomes, late.fenced) == (0, 7)
            await liveness.reclaim(connection, uuid4(), LivenessLimits(), stuck_s=0)
            left = traces(database, CANARY)
            if what == "batch":
                assert left == 0
            else:
                assert left == 5 + 5 + 1 + 1, "answers, failures, the sample of their group, metadata"
                assert await erase.delete_batch(connection, batch_id, None)
                await purge(connection)
                assert traces(database, CANARY) == 0
            assert all(report.finished_at for report in await erase_purge.list_erasures(connection, "local"))

        with_connection(database, body)

    @pytest.mark.parametrize("wrong", ["model", "line"])
    def test_in_what_is_wrong_with_the_input(self, database: str, wrong: str) -> None:
        """What is said about it quotes it. The code and the line do not."""

        async def body(connection: Connection) -> None:
            name = CANARY.decode()
            line = f'{{"custom_id": "1", "url": "{ENDPOINT}", "body": {{"model": "{name}"}}}}\n'
            about: dict[str, Any] = {"owner": "local", "worker_id": uuid4(), "filename": "f"}
            about |= {"limits": IntakeLimits(), "keep_bytes": True, "keep_problems": True}
            with FileIntake(database, **about) as upload:
                upload.feed(line.encode() if wrong == "model" else f"{{{name}\n".encode())
                file = upload.finish().file
            batch_id = await ask_for(connection, file.id, validated=False)
            await validate_batch(connection, batch_id, lambda _: None)
            before = await get_batch(connection, batch_id, "local")
            assert before is not None
            (problem,) = before.problems or []
            assert name[:5] in problem["message"]
            assert await erase.delete_file(connection, file.id, "local")
            await purge(connection)
            after = await get_batch(connection, batch_id, "local")
            assert after is not None
            assert after.state is BatchState.FAILED
            told = {"message": "The input file was deleted.", "param": None}
            assert after.problems == [{"code": problem["code"], "line": 1} | told]
            assert name[:5].encode() not in dumped(database)

        with_connection(database, body)

    @pytest.mark.parametrize("first", ["input", "output"])
    @pytest.mark.parametrize("failures", [0, 2])
    def test_once_input_and_results_are_deleted(self, database: str, first: str, failures: int) -> None:
        """Requests that failed at first, with an error that quotes them, and were answered in the end."""

        async def body(connection: Connection) -> None:
            now = datetime.now(UTC)
            file_id = await make_file(connection, [12], body=b'{"prompt": "%b"}' % CANARY)
            batch_id = await ask_for(connection, file_id)
            await take(connection, 3, worker=uuid4())
            await liveness.reclaim(connection, uuid4(), LivenessLimits(), stuck_s=1e6)
            quoting = f"invalid prompt: {CANARY.decode()}"
            await defer(connection, await take(connection), message=quoting, delay_s=0.0, now=now)
            later = now + timedelta(hours=1)
            if failures:
                await answer(
                    connection, await take(connection, failures, now=later), FAILED, message=quoting, now=later
                )
            while leases := await take(connection, now=later):
                await answer(connection, leases, body=b'"%b"' % CANARY, now=later)
            assert await finish_batch(connection, batch_id, now=later)
            batch = await get_batch(connection, batch_id, None)
            assert batch is not None
            assert (batch.counts.completed, batch.counts.failed) == (12 - failures, failures)
            assert traces(database, CANARY) == 12 + 12 + 12 + failures + bool(failures)  # and a sample of their group
            going = [file_id, batch.output_file_id] if first == "input" else [batch.output_file_id, file_id]
            for gone in [*going, *([batch.error_file_id] if failures else [])]:
                assert gone is not None
                assert await erase.delete_file(connection, gone, "local")
            await purge(connection)
            assert traces(database, CANARY) == 0
            assert await count_rows(connection) == {"batches": 1, "lanes": 1}

        with_connection(database, body)


class TestManyPurgers:
    """Nobody waits for anybody: a lock that is not to be had at once would be an error here."""

    ROWS = 30_000

    async def purger(self, conninfo: str) -> int:
        erased = 0
        async with connected(conninfo) as connection:
            await connection.execute("SET lock_timeout = '1ms'")
            while count := await erase_purge.purge_step(connection, 500):
                erased += count
        return erased

    def test_share_the_work_without_waiting(self, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(erase, "_STRETCH_ROWS", 4_000)

        async def run() -> None:
            async with connected(database) as connection:
                file_id = await make_file(connection, [self.ROWS, 100])
                small = [await make_file(connection, [3]) for _ in range(20)]
                for one_file in [file_id, *small]:
                    assert await erase.delete_file(connection, one_file, None)
                done = await asyncio.gather(*(self.purger(database) for _ in range(3)))
                assert await self.purger(database) <= 1, "ends what several were at, at most"
                assert await count_rows(connection) == {}
                reports = await erase_purge.list_erasures(connection, None, None, 100)
                assert sum(report.templates for report in reports) == self.ROWS + 100 + 60
                assert all(report.finished_at for report in reports)
                assert min(done) > 0, "each had its share"

        asyncio.run(run())

    def test_claims_and_settles_go_on(self, database_18: str) -> None:
        async def run() -> None:
            async with connected(database_18) as connection:
                gone = await make_wish(connection, [5_000])
                await answer(connection, await take(connection, 5_000))
                kept = await make_wish(connection, [3_000])
                await erase.delete_batch(connection, gone, None)
                purging = asyncio.gather(*(self.purger(database_18) for _ in range(2)))
                async with connected(database_18) as working:
                    await working.execute("SET lock_timeout = '1ms'")
                    while leases := await take(working, 50):
                        assert (await answer(working, leases)).fenced == 0
                await purging
                assert await finish_batch(connection, kept)
                assert await one(connection, "SELECT count(*) FROM penstock.outcomes") == (3_000,)

        asyncio.run(run())

    def test_a_purger_that_dies_leaves_its_stretch_to_the_others(self, database_18: str) -> None:
        async def run() -> None:
            async with connected(database_18) as connection:
                file_id = await make_file(connection, [2_000])
                await erase.delete_file(connection, file_id, None)
                async with connected(database_18) as dying, dying.transaction(force_rollback=True):
                    await erase_purge.purge_step(dying, 500)
                    assert await erase_purge.purge_step(connection, 500) == 0, "somebody is at it"
                await purge(connection)
                assert await count_rows(connection) == {}
                (report,) = await erase_purge.list_erasures(connection, None)
                assert report.templates == 2_000

        asyncio.run(run())


def test_deletion_waits_for_a_settle_and_for_a_claim_under_way(database: str) -> None:
    """What is being settled is kept, what is being claimed is taken back."""

    async def run() -> None:
        async with connected(database) as connection, connected(database) as other, connected(database) as third:
            file_id = await make_file(connection, [10])
            batch_id = await ask_for(connection, file_id)
            leases = await take(connection, 4)
            late: list[Lease] = []
            async with other.transaction():
                await answer(other, leases)
                async with third.transaction():
                    late = await take(third, 3)
                    deleting = asyncio.create_task(erase.delete_file(connection, file_id, None))
                    await _blocked(database)
            assert await deleting
            assert (await answer(other, late)).outcomes == 0
            counts = (await read_status(connection, batch_id)).counts
            assert (counts.completed, counts.cancelled) == (4, 6)

    asyncio.run(run())


async def _blocked(conninfo: str) -> None:
    """Until somebody waits for a lock. Behind a pooler, who cannot be told."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    async with asyncio.timeout(30), connected(conninfo) as observer:
        while not (await one(observer, query))[0]:
            await asyncio.sleep(0)


def test_an_unknown_report_is_none(database_18: str) -> None:
    async def body(connection: Connection) -> None:
        assert await erase_purge.get_erasure(connection, new_id(), None) is None
        assert await erase_purge.purge_step(connection, 10) == 0
        with pytest.raises(psycopg.errors.CheckViolation):
            await connection.execute(
                "INSERT INTO penstock.erasures (id, owner, kind, object_id, requested_at)"
                " VALUES (%(id)s, 'o', 'everything', %(id)s, now())",
                {"id": new_id()},
            )

    with_connection(database_18, body)

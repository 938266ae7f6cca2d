from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from penstock.batches.create import create_batch
from penstock.batches.finish import finish_batch, finish_batches
from penstock.batches.read import get_batch, list_batches, read_status
from penstock.batches.steer import cancel_batch, pause_batch, resume_batch
from penstock.batches.upkeep import list_changed, list_closing, list_steered, list_unfinished
from penstock.batches.validate import list_unvalidated, request_batch, validate_batch
from penstock.claim import claim as claims
from penstock.claim import gates
from penstock.db.pool import Connection, Now
from penstock.erase import erase
from penstock.errors import PenstockError
from penstock.model import BatchState, Lease, Outcome, OutcomeState
from penstock.settle.write import Changes, settle
from penstock.worker.maintenance import BatchMaintenance
from tests.support.db import connected, one, pooled, with_connection
from tests.support.engine import claim_due, count_leased, make_batch, make_file, tidy
from tests.support.wishes import answer, ask_for, make_wish
from tests.support.wishes import take as wished

WORKER = uuid4()


async def take(connection: Connection, want: int, *routes: str, now: Now = None) -> list[Lease]:
    wants = dict.fromkeys(routes or ["model-0"], want)
    return await claim_due(connection, pool="test", wants=wants, worker_id=WORKER, taper_floor=1_000, now=now)


async def create(connection: Connection, file_id: UUID, **more: Any) -> UUID:
    return await create_batch(connection, file_id=file_id, owner="local", pool="test", **more)


async def complete(connection: Connection, leases: list[Lease]) -> None:
    changes = Changes()
    for lease in leases:
        for ordinal in claims.first_ordinals(lease.ranges, 10_000):
            changes.outcomes.append((lease, ordinal, ordinal, "c", Outcome(OutcomeState.COMPLETED, b"1", 200)))
    assert (await settle(connection, WORKER, changes)).fenced == 0


def test_one_file_serves_many_batches_each_complete(database: str) -> None:
    async def body(connection: Connection) -> None:
        file_id = await make_file(connection, [5])
        made = [await create(connection, file_id) for _ in range(3)]
        while leases := await take(connection, 4):
            await complete(connection, leases)
        for batch_id in made:
            assert await finish_batch(connection, batch_id)
            status = await read_status(connection, batch_id)
            assert (status.state, status.counts.completed) == (BatchState.COMPLETED, 5)
        assert await one(connection, "SELECT count(*), count(DISTINCT lane_id) FROM penstock.outcomes") == (15, 3)

    with_connection(database, body)


def test_a_batch_needs_a_sealed_file_of_its_owner(database_18: str) -> None:
    async def body(connection: Connection) -> None:
        file_id = await make_file(connection, [1])
        with pytest.raises(PenstockError, match="no file"):
            await create_batch(connection, file_id=file_id, owner="other", pool="test")
        await connection.execute("UPDATE penstock.files SET state = 'failed', sealed_at = NULL")
        with pytest.raises(PenstockError, match="no file"):
            await create_batch(connection, file_id=file_id, owner="local", pool="test")
        with pytest.raises(PenstockError, match="no batch"):
            await read_status(connection, uuid4())

    with_connection(database_18, body)


def test_lanes_are_claimed_by_priority_then_in_turn_and_sooner_near_a_deadline(database: str) -> None:
    async def body(connection: Connection) -> None:
        file_id = await make_file(connection, [1])
        soon, late = (datetime.now(UTC) + timedelta(minutes=minutes) for minutes in (5, 500))
        plain = await create(connection, file_id)
        later = await create(connection, file_id, deadline=late)
        first = await create(connection, file_id, deadline=soon)
        urgent = await create(connection, file_id, priority=5)
        order = [(await take(connection, 1))[0].batch_id for _ in range(4)]
        assert order == [urgent, first, plain, later]

    with_connection(database, body)


def test_nothing_is_claimed_from_a_paused_or_cancelled_batch(database: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await make_batch(connection, [10])
        held = await take(connection, 4)
        back = Changes()
        back.give_back(held[0], [(0, 2)])
        await settle(connection, WORKER, back)
        assert await pause_batch(connection, batch_id)
        assert await take(connection, 10) == []
        assert await resume_batch(connection, batch_id)
        again = await take(connection, 3)
        assert sorted(ordinal for lease in again for ordinal in claims.first_ordinals(lease.ranges, 9)) == [0, 1, 4]
        assert await cancel_batch(connection, batch_id)
        assert not await resume_batch(connection, batch_id)
        assert await take(connection, 10) == []

        assert not await finish_batch(connection, batch_id), "work is still in flight"
        await complete(connection, again)
        rest = Changes()
        rest.give_back(held[0], [(2, 4)])
        await settle(connection, WORKER, rest)
        assert await finish_batch(connection, batch_id)
        status = await read_status(connection, batch_id)
        assert status.state is BatchState.CANCELLED
        assert (status.counts.completed, status.counts.cancelled, status.counts.pending) == (3, 7, 0)
        assert await one(connection, "SELECT held, size FROM penstock.deferrals") == (True, 2), "for a retry"

    with_connection(database, body)


def test_a_deferral_written_during_a_pause_is_not_claimed(database_18: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await make_batch(connection, [3])
        held = await take(connection, 3)
        assert await pause_batch(connection, batch_id)
        back = Changes()
        back.give_back(held[0], [(0, 3)])
        await settle(connection, WORKER, back)
        assert await take(connection, 3) == []
        await tidy(connection, batch_id)
        assert await one(connection, "SELECT held FROM penstock.deferrals") == (True,)
        assert await resume_batch(connection, batch_id)
        assert len(await take(connection, 3)) == 1

    with_connection(database_18, body)


def test_a_batch_past_its_deadline_expires_and_keeps_its_results(database: str) -> None:
    async def body(connection: Connection) -> None:
        now = datetime(2030, 1, 1, tzinfo=UTC)
        file_id = await make_file(connection, [4])
        batch_id = await create(connection, file_id, deadline=now + timedelta(hours=1), now=now)
        leases = await take(connection, 1, now=now)
        after = now + timedelta(hours=2)
        assert await take(connection, 9, now=after) == []
        assert not await finish_batch(connection, batch_id, now=after)
        await complete(connection, leases)
        assert await finish_batch(connection, batch_id, now=after)
        status = await read_status(connection, batch_id)
        assert (status.state, status.counts.completed, status.counts.expired) == (BatchState.EXPIRED, 1, 3)

    with_connection(database, body)


def test_a_closed_gate_stops_one_route_for_every_worker(database: str) -> None:
    async def body(connection: Connection) -> None:
        now = datetime.now(UTC)
        await make_batch(connection, [2, 2])
        await gates.close(connection, "test", "model-0", 60, "rate_limit_exceeded", "slow down", now=now)
        both = ("model-0", "model-1")
        leases = await take(connection, 5, *both, now=now)
        assert [lease.route for lease in leases] == ["model-1"]
        await gates.close(connection, "test", "model-0", 1, "rate_limit_exceeded", "slow down", now=now)
        soon = now + timedelta(seconds=30)
        assert await take(connection, 5, *both, now=soon) == []
        after = now + timedelta(seconds=61)
        await gates.halt(connection, "test", "model-0", "invalid_api_key", "wrong key", now=after)
        assert [gate.code for gate in await gates.list_closed(connection, "test", now=after)] == ["invalid_api_key"]
        assert await take(connection, 5, *both, now=after) == []
        await gates.reopen(connection, "test")
        leases = await take(connection, 5, *both, now=after)
        assert [lease.route for lease in leases] == ["model-0"]

    with_connection(database, body)


def test_claims_and_cancels_that_race_leave_exact_figures(database: str) -> None:
    """Four claimers and settlers, and a cancel in the middle: what was claimed is settled, nothing after."""

    async def body() -> None:
        async with connected(database) as connection:
            batch_id = await make_batch(connection, [2_000])  # more than they claim, however late the cancel comes

            async def work() -> int:
                done = 0
                async with connected(database) as own:
                    for _ in range(50):
                        leases = await take(own, 7)
                        await complete(own, leases)
                        done += count_leased(leases)
                return done

            async def stop() -> None:
                while (await read_status(connection, batch_id)).counts.completed < 100:
                    await asyncio.sleep(0)
                assert await cancel_batch(connection, batch_id)

            stopping = asyncio.create_task(stop())
            done = await asyncio.gather(*(work() for _ in range(4)))
            await stopping
            assert await finish_batch(connection, batch_id)
            counts = (await read_status(connection, batch_id)).counts
            assert counts.completed == sum(done)
            assert counts.completed + counts.cancelled == 2_000
            assert counts.cancelled > 0

    asyncio.run(body())


class TestAsking:
    """A batch over the API: noted, then looked at, then started or refused."""

    def test_a_wish_is_noted_at_once_and_starts_when_it_is_looked_at(self, database: str) -> None:
        async def body(connection: Connection) -> None:
            now = datetime(2030, 1, 1, tzinfo=UTC)
            file_id = await make_file(connection, [3, 2])
            batch_id = await ask_for(connection, file_id, validated=False, now=now, metadata={"a": "b"})
            assert await list_unvalidated(connection) == [batch_id]
            batch = await get_batch(connection, batch_id, "local")
            assert batch is not None
            assert (batch.state, batch.counts.total, batch.file_id) == (BatchState.VALIDATING, 0, file_id)
            assert (batch.metadata, batch.window_s, batch.deadline) == ({"a": "b"}, 86_400, now + timedelta(days=1))
            assert batch.output_file_id is not None
            assert not await pause_batch(connection, batch_id)
            assert not await finish_batch(connection, batch_id)
            assert batch_id not in await list_unfinished(connection)

            pools = {"model-0": "serve:one", "model-1": "serve:two"}
            await validate_batch(connection, batch_id, pools.get, now=now)
            await validate_batch(connection, batch_id, lambda _: None, now=now)
            batch = await get_batch(connection, batch_id, "local")
            assert batch is not None
            assert (batch.state, batch.counts.total, batch.counts.pending) == (BatchState.IN_PROGRESS, 5, 5)
            assert (batch.validated_at, batch.model, batch.pool) == (now, None, "serve")
            lanes = await (await connection.execute("SELECT route, pool FROM penstock.lanes ORDER BY id")).fetchall()
            assert dict(lanes) == pools
            assert await list_unvalidated(connection) == []
            assert await list_unfinished(connection) == [batch_id]
            assert await get_batch(connection, batch_id, "other") is None
            for steer in (pause_batch, cancel_batch):
                assert not await steer(connection, batch_id, "other")

        with_connection(database, body)

    def test_one_key_makes_one_batch(self, database: str) -> None:
        async def body(connection: Connection) -> None:
            file_id = await make_file(connection, [1])
            wish: dict[str, Any] = {
                **{"owner": "local", "dialect": "openai", "file_id": file_id, "endpoint": "/v1/x"},
                **{"completion_window": "24h", "window_s": 60, "key": "k", "fingerprint": b"f"},
            }
            first = await request_batch(connection, **wish)
            again = await request_batch(connection, **(wish | {"fingerprint": b"g", "file_id": uuid4()}))
            assert first is not None
            assert again is not None
            assert (first.existed, again.existed) == (False, True)
            assert (first.batch.id, first.batch.fingerprint) == (again.batch.id, b"f")
            assert await request_batch(connection, **(wish | {"key": "l", "file_id": uuid4()})) is None
            assert await request_batch(connection, **(wish | {"key": "k", "owner": "other"})) is None
            await connection.execute("UPDATE penstock.files SET purpose = 'user_data'")
            assert await request_batch(connection, **(wish | {"key": "m"})) is None

        with_connection(database, body)

    def test_what_cannot_run_fails_and_says_which_lines(self, database: str) -> None:
        async def body(connection: Connection) -> None:
            await connection.execute(
                "INSERT INTO penstock.webhook_endpoints (id, owner, name, url, event_types, secret, created_at,"
                "  updated_at) VALUES (%s, 'local', 'n', 'u', '{batch.failed}', 'x', now(), now())",
                [uuid4()],
            )
            file_id = await make_file(connection, [4, 4, 4])
            await connection.execute("UPDATE penstock.file_lanes SET endpoint = '/v1/embeddings' WHERE source_lane = 1")
            batch_id = await ask_for(connection, file_id, validated=False)
            served = {"model-0": "serve:x", "model-1": "serve:x"}
            await validate_batch(connection, batch_id, served.get, max_reported=5)
            batch = await get_batch(connection, batch_id, "local")
            assert batch is not None
            assert (batch.state, batch.counts.total, batch.validated_at) == (BatchState.FAILED, 0, None)
            assert batch.problems is not None
            found = [(problem["line"], problem["code"], problem["param"]) for problem in batch.problems]
            assert found == [
                *((2, "url_mismatch", "url"), (3, "model_not_found", "body.model"), (5, "url_mismatch", "url")),
                *((6, "model_not_found", "body.model"), (8, "url_mismatch", "url")),
            ]
            assert "model-2" in batch.problems[1]["message"]
            assert await one(connection, "SELECT type, batch_id FROM penstock.webhook_deliveries") == (
                "batch.failed",
                batch_id,
            )
            assert await one(connection, "SELECT count(*) FROM penstock.lanes") == (0,)
            assert not await cancel_batch(connection, batch_id)

        with_connection(database, body)

    def test_problems_of_the_file_are_those_of_the_batch(self, database_18: str) -> None:
        async def body(connection: Connection) -> None:
            wrong = '[{"code": "invalid_json_line", "line": 7, "message": "m", "param": null}]'
            file_id = await make_file(connection, [])
            empty = await ask_for(connection, file_id)
            await connection.execute("UPDATE penstock.files SET problems = %s", [wrong])
            broken = await ask_for(connection, file_id)
            codes = []
            for batch_id in (empty, broken):
                batch = await get_batch(connection, batch_id, None)
                assert batch is not None
                assert batch.problems is not None
                codes += [(problem["code"], problem["line"]) for problem in batch.problems]
            assert codes == [("empty_file", None), ("invalid_json_line", 7)]

        with_connection(database_18, body)

    def test_a_wish_can_be_cancelled_before_it_is_looked_at(self, database: str) -> None:
        async def body(connection: Connection) -> None:
            batch_id = await make_wish(connection, [3], validated=False)
            assert await cancel_batch(connection, batch_id, "local")
            await validate_batch(connection, batch_id, lambda _: "serve:x")
            assert batch_id in await list_unfinished(connection)
            assert await finish_batch(connection, batch_id)
            status = await read_status(connection, batch_id)
            assert (status.state, status.counts.total) == (BatchState.CANCELLED, 0)
            assert await one(connection, "SELECT count(*) FROM penstock.files WHERE batch_id IS NOT NULL") == (0,)

        with_connection(database, body)


class TestEnding:
    def test_the_end_publishes_results_and_tells_whoever_asked(self, database: str) -> None:
        async def body(connection: Connection) -> None:
            now = datetime(2030, 1, 1, tzinfo=UTC)
            for number, types in enumerate(["{batch.completed}", "{batch.failed}", "{batch.completed,batch.expired}"]):
                await connection.execute(
                    "INSERT INTO penstock.webhook_endpoints (id, owner, name, url, event_types, secret, created_at,"
                    "  updated_at) VALUES (%s, 'local', 'n', 'u', %s, 'x', now(), now())",
                    [UUID(int=number), types],
                )
            batch_id = await make_wish(connection, [5], now=now, output_expires_after_s=3_600)
            await answer(connection, await wished(connection, 2, now=now), OutcomeState.FAILED, now=now)
            await answer(connection, await wished(connection, now=now), now=now)
            assert await finish_batch(connection, batch_id, now=now)
            assert not await finish_batch(connection, batch_id, now=now)
            batch = await get_batch(connection, batch_id, None)
            assert batch is not None
            files = await (
                await connection.execute(
                    "SELECT id, kind, lines, bytes, purpose, filename, expires_at, owner FROM penstock.files"
                    " WHERE batch_id = %s ORDER BY kind",
                    [batch_id],
                )
            ).fetchall()
            name, hour = f"batch_{batch_id.hex}", now + timedelta(hours=1)
            more = (hour, "local")
            assert files == [
                (batch.error_file_id, "errors", 2, batch.error_bytes, "batch_output", f"{name}_error.jsonl", *more),
                (batch.output_file_id, "output", 3, batch.output_bytes, "batch_output", f"{name}_output.jsonl", *more),
            ]
            assert batch.output_bytes > 0
            deliveries = await (
                await connection.execute(
                    "SELECT endpoint_id, type, batch_id, event_at, due_at FROM penstock.webhook_deliveries"
                    " ORDER BY endpoint_id"
                )
            ).fetchall()
            assert deliveries == [(UUID(int=n), "batch.completed", batch_id, now, now) for n in (0, 2)]
            assert await one(connection, "SELECT count(DISTINCT event_id) FROM penstock.webhook_deliveries") == (1,)

        with_connection(database, body)

    def test_a_batch_of_failures_has_no_output(self, database_18: str) -> None:
        async def body(connection: Connection) -> None:
            batch_id = await make_wish(connection, [5])
            await answer(connection, await wished(connection), OutcomeState.FAILED)
            assert await finish_batch(connection, batch_id)
            query = "SELECT kind FROM penstock.files WHERE batch_id IS NOT NULL"
            assert await one(connection, query) == ("errors",)
            plain = await make_wish(connection, [5], dialect="anthropic")
            await answer(connection, await wished(connection))
            assert await finish_batch(connection, plain)
            assert await one(connection, query) == ("errors",)

        with_connection(database_18, body)

    def test_many_end_at_once(self, database: str) -> None:
        async def body(connection: Connection) -> None:
            file_id = await make_file(connection, [2])
            made = [await ask_for(connection, file_id) for _ in range(30)]
            await answer(connection, await wished(connection, 40))
            over = await finish_batches(connection, made)
            assert len(over) == 20
            assert await finish_batches(connection, made) == set()
            await tidy(connection, *made)

        with_connection(database, body)


class TestLists:
    async def walk(self, connection: Connection, **wish: Any) -> list[UUID]:
        found: list[UUID] = []
        after: UUID | None = None
        while page := await list_batches(connection, owner="local", dialect="openai", after=after, limit=3, **wish):
            assert [batch.id for batch in page] == sorted((batch.id for batch in page), reverse=True)
            found += [batch.id for batch in page]
            after = page[-1].id
        return found

    def test_pages_by_state_metadata_and_time(self, database: str) -> None:
        async def body(connection: Connection) -> None:
            start = datetime.now(UTC)
            file_id = await make_file(connection, [2])
            made = []
            for number in range(10):
                metadata = {"parity": str(number % 2), "all": "yes"}
                at = start + timedelta(seconds=number)
                made.append(await ask_for(connection, file_id, metadata=metadata, now=at))
            await ask_for(connection, file_id, owner="local", dialect="anthropic")
            newest = made[::-1]
            assert await self.walk(connection) == newest
            assert await self.walk(connection, metadata={"parity": "1"}) == newest[::2]
            assert await self.walk(connection, metadata={"parity": "1", "all": "no"}) == []
            for batch_id in made[:4]:
                await cancel_batch(connection, batch_id)
            assert await self.walk(connection, states=["cancelling"]) == made[3::-1]
            assert await self.walk(connection, states=["cancelling", "in_progress"]) == newest
            assert await self.walk(connection, states=["completed"]) == []
            assert await self.walk(connection, states=["cancelling"], metadata={"parity": "0"}) == [made[2], made[0]]
            window = {"created_after": start + timedelta(seconds=2), "created_before": start + timedelta(seconds=5)}
            assert await self.walk(connection, **window) == made[4:1:-1]
            assert await self.walk(connection, **window, metadata={"all": "yes"}) == made[4:1:-1]

            async def back(before: UUID, **wish: Any) -> list[UUID]:
                page = await list_batches(connection, owner="local", dialect="openai", before=before, limit=3, **wish)
                return [batch.id for batch in page]

            assert await back(made[4]) == made[7:4:-1]
            assert await back(made[8]) == [made[9]]
            assert await back(made[9]) == []
            assert await back(made[4], metadata={"parity": "1"}) == [made[9], made[7], made[5]]
            assert await back(made[0], metadata={"parity": "1"}) == [made[5], made[3], made[1]]
            both = await list_batches(connection, owner="local", dialect=["openai", "anthropic"], limit=99)
            assert len(both) == 11
            assert await list_batches(connection, owner="other", dialect="openai", limit=9) == []
            counts = {batch.counts.total for batch in both}
            assert counts == {2}

        with_connection(database, body)

    def test_a_walk_neither_skips_nor_repeats_while_batches_come_and_go(self, database_18: str) -> None:
        async def body(connection: Connection) -> None:
            file_id = await make_file(connection, [2])
            made = [await ask_for(connection, file_id) for _ in range(12)]
            seen: list[UUID] = []
            after: UUID | None = None
            while page := await list_batches(connection, owner="local", dialect="openai", after=after, limit=2):
                seen += [batch.id for batch in page]
                after = page[-1].id
                # The one the walk stands on goes, new ones come, and states change under it.
                await erase.delete_batch(connection, after, None)
                await ask_for(connection, file_id)
                await pause_batch(connection, made[0])
            assert seen == made[::-1]

        with_connection(database_18, body)

    def test_the_time_left_is_told_from_the_last_minute(self, database: str) -> None:
        async def body(connection: Connection) -> None:
            now = datetime(2030, 1, 1, tzinfo=UTC)
            batch_id = await make_wish(connection, [1_000], now=now)

            async def eta_s(at: datetime) -> float | None:
                batch = await get_batch(connection, batch_id, None, now=at)
                assert batch is not None
                (listed,) = await list_batches(connection, owner="local", dialect="openai", limit=1, now=at)
                assert listed == batch
                return batch.eta_s

            assert await eta_s(now) is None
            for second in range(1, 11):
                at = now + timedelta(seconds=second)
                await answer(connection, await wished(connection, 10, now=at), now=at)
            assert await eta_s(now + timedelta(seconds=10)) == pytest.approx(90)
            assert await eta_s(now + timedelta(seconds=20)) == pytest.approx(180)
            assert await eta_s(now + timedelta(minutes=5)) is None
            for second in range(300, 500):
                at = now + timedelta(seconds=second / 2)
                await answer(connection, await wished(connection, 2, now=at), now=at)
            assert await eta_s(now + timedelta(seconds=249.5)) == pytest.approx(125, rel=0.02)
            await pause_batch(connection, batch_id)
            assert await eta_s(now + timedelta(seconds=250)) is None

        with_connection(database, body)


def test_a_batch_that_cannot_end_does_not_keep_others_from_it(database: str, caplog: pytest.LogCaptureFixture) -> None:
    async def body(connection: Connection) -> None:
        made = [await make_batch(connection, [2]) for _ in range(5)]
        for batch_id in made:
            await cancel_batch(connection, batch_id)
        # More results than inputs: the schema refuses such an end.
        await connection.execute("INSERT INTO penstock.progress (batch_id, completed) VALUES (%s, 3)", [made[3]])
        assert await finish_batches(connection, made) == {*made} - {made[3]}
        assert await finish_batches(connection, made) == set()

    with_connection(database, body)
    assert "cannot end" in caplog.text


def test_folding_keeps_up_with_any_number_of_deltas(database: str) -> None:
    async def body(connection: Connection) -> None:
        few, many = [await make_batch(connection, [10_000]) for _ in range(2)]
        for batch_id, deltas in ((few, 3), (many, 4_321)):
            await connection.execute(
                "INSERT INTO penstock.progress (batch_id, completed, output_bytes)"
                " SELECT %s, 1, 10 FROM generate_series(1, %s)",
                [batch_id, deltas],
            )
        await tidy(connection, few, many)
        rows = await connection.execute("SELECT batch_id, completed, output_bytes FROM penstock.progress")
        assert sorted(await rows.fetchall()) == sorted([(few, 3, 30), (many, 4_321, 43_210)])

    with_connection(database, body)


def test_a_round_looks_at_what_has_changed(database: str) -> None:
    """Of many open batches, those that ended, were cancelled, expired or steered; the rest only now and then."""

    async def body(connection: Connection) -> None:
        now = datetime.now(UTC)
        for _ in range(3):
            await make_batch(connection, [2])
        done, cancelled, paused = [await make_batch(connection, [1]) for _ in range(3)]
        late = await create(connection, await make_file(connection, [1]), deadline=now - timedelta(seconds=1))
        assert await list_changed(connection, limit=9) == []
        await cancel_batch(connection, cancelled)
        await pause_batch(connection, paused)
        await connection.execute("INSERT INTO penstock.progress (batch_id, completed) VALUES (%s, 1)", [done])
        assert await list_changed(connection, limit=9) == [done]
        assert set(await list_closing(connection, limit=9)) == {cancelled, late}
        assert set(await list_steered(connection, 60, limit=9)) == {cancelled, paused}
        await tidy(connection, done)
        assert await list_changed(connection, limit=9) == [], "it was folded, if into itself"

    with_connection(database, body)


def test_every_open_batch_is_looked_at_in_the_end(database: str) -> None:
    """One that is over and left no mark of it, as after a kill between a fold and the end."""

    async def run() -> None:
        async with pooled(database) as pool, connected(database) as connection:
            made = [await make_batch(connection, [1]) for _ in range(120)]
            over = made[100]
            await connection.execute(
                "INSERT INTO penstock.progress (batch_id, completed, folded) VALUES (%s, 1, true)", [over]
            )
            keeper = BatchMaintenance(pool)
            for _ in range(3):
                await keeper.round()
            assert (await read_status(connection, over)).state is BatchState.COMPLETED

    asyncio.run(run())

"""The database crashes, does not answer, or answers into the void: every result is recorded once, and work goes on.

`tests/flow/settle/test_settle_buffer.py` shows the buffer by itself, `tests/flow/worker/test_liveness.py` reclaims
on a clock of the test's own; here it is whole workers, and faults on the wire.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import psycopg
import pytest

from penstock.batches.read import read_status
from penstock.config import ClaimLimits, Config, LivenessLimits, RetryLimits, SettleLimits
from penstock.db.embedded import postgres
from penstock.db.embedded.cluster import PGDATA
from penstock.db.embedded.keeper import find_postmaster
from penstock.db.migrate import migrate
from penstock.db.pool import Connection, Pool
from penstock.dispatch.coroutines import CoroutineDispatcher, each
from penstock.model import Item, Outcome, OutcomeState, Verdict
from penstock.worker.worker import Worker
from tests.faults.test_partition import beaten_at, said_at
from tests.support.db import connected, one, pooled
from tests.support.engine import make_batch
from tests.support.postgres_proxy import PostgresProxy
from tests.support.prepared import Prepared
from tests.support.processes import Process
from tests.support.proxy_link import Way
from tests.support.thorough import some
from tests.support.upstream import UpstreamProcess
from tests.support.wait import wait_until
from tests.support.workbench import (
    CLAIM,
    HELD,
    SETTLE,
    Bench,
    calls_of,
    leave,
    taking,
    until_said,
    workbench,
)

DEADLINE_S = 60.0
CONCURRENCY = 8
CAPACITY = 16
CONFIG = Config(
    claim=ClaimLimits(claim_poll_s=0.02),
    settle=SettleLimits(settle_interval_s=0.005, settle_max_rows=8, settle_capacity_rows=CAPACITY),
    liveness=LivenessLimits(heartbeat_interval_s=0.1),
)


class Scene:
    """A worker in this process, whose database connections may lead through a proxy, and a batch for it."""

    def __init__(self, pool: Pool, direct: Connection, batch_id: UUID, config: Config) -> None:
        self.direct = direct
        self.batch_id = batch_id
        self.calls: list[int] = []
        self.going = asyncio.Event()
        """Cleared, calls begin and do not end."""
        self.going.set()
        self.worker = Worker(config, pool, "test", CoroutineDispatcher(each(self._call), CONCURRENCY, RetryLimits()))

    async def _call(self, item: Item) -> Verdict:
        self.calls.append(item.ordinal)
        await self.going.wait()
        return Outcome(OutcomeState.COMPLETED, b"%d" % item.ordinal, 200, duration_ms=1)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.005)

    async def until_completed(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not (await read_status(self.direct, self.batch_id)).state.terminal:
                await asyncio.sleep(0.01)

    async def until_beaten(self, times: int) -> None:
        """For so many heartbeats: time in which the worker could have done something."""
        seen: set[object] = set()
        async with asyncio.timeout(DEADLINE_S):
            while len(seen) <= times:
                seen.add(await one(self.direct, "SELECT heartbeat_at FROM penstock.workers"))
                await asyncio.sleep(0.01)

    async def check(self, lines: int) -> None:
        """Every ordinal has one outcome with its own bytes, and counters agree."""
        counts = (await read_status(self.direct, self.batch_id)).counts
        assert (counts.total, counts.completed, counts.in_flight, counts.pending) == (lines, lines, 0, 0)
        written = "SELECT count(*), count(*) FILTER (WHERE response = ordinal::text::bytea) FROM penstock.outcomes"
        assert await one(self.direct, written) == (lines, lines)
        for table in ("leases", "deferrals"):
            assert await one(self.direct, f"SELECT count(*) FROM penstock.{table}") == (0,)


@contextlib.asynccontextmanager
async def scene(direct: str, lines: int, *, way: str | None = None, config: Config = CONFIG) -> AsyncIterator[Scene]:
    """The worker runs for the length of the block."""
    async with connected(direct) as connection, pooled(way or direct) as pool:
        batch_id = await make_batch(connection, [lines])
        made = Scene(pool, connection, batch_id, config)
        running = asyncio.create_task(made.worker.run())
        try:
            yield made
        finally:
            made.worker.stop()
            await running


def play(body: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await body()

    asyncio.run(run())


class TestUnknownCommit:
    """R5: the statement was carried out, its answer is lost."""

    def test_a_settle_whose_answer_is_lost_is_known_as_applied(self, database: str) -> None:
        lines, times = 200, 5

        async def body() -> None:
            with PostgresProxy(database) as proxy:
                lost = proxy.swallow(SETTLE, times=times)
                async with scene(database, lines, way=proxy.proxied(database)) as act:
                    await act.until_completed()
                    await act.check(lines)
                    tally = act.worker.buffer.tally
                    assert lost.fired == times
                    assert tally.already_applied >= times
                    assert tally.already_applied + tally.outcomes == lines
                    assert tally.fenced == 0
                    assert sorted(act.calls) == list(range(lines))

        play(body)

    def test_a_claim_whose_answer_is_lost_is_given_back(self, database: str, caplog: pytest.LogCaptureFixture) -> None:
        lines, times = 100, 3

        async def body() -> None:
            with PostgresProxy(database) as proxy:
                lost = proxy.swallow(CLAIM, times=times)
                # The stuck rule would take the leases back only after this, which no test waits for.
                assert CONFIG.liveness.stuck_buffer_s + CONFIG.dispatch.attempt_timeout_s > 2 * DEADLINE_S
                async with scene(database, lines, way=proxy.proxied(database)) as act:
                    await act.until_completed()
                    await act.check(lines)
                    assert lost.fired == times
                    assert act.worker.buffer.tally.given_back > 0
                    assert sorted(act.calls) == list(range(lines))

        play(body)
        assert caplog.text.count("was claimed, but the answer was lost") >= times

    def test_what_is_about_to_be_written_is_not_taken_for_lost(
        self, database_18: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A lease whose calls have all ended is in no worker's hand any more, but its results are on their way."""
        lines = 200

        async def body() -> None:
            with PostgresProxy(database_18) as proxy:
                flushing = proxy.stall_before(SETTLE)
                proxy.swallow(lambda text: flushing.fired > 0 and re.search(CLAIM, text) is not None)
                async with scene(database_18, lines, way=proxy.proxied(database_18)) as act:
                    await act.until(lambda: "the answer was lost: giving it back" in caplog.text)
                    proxy.heal()
                    await act.until_completed()
                    await act.check(lines)
                    assert act.worker.buffer.tally.fenced == 0
                    assert sorted(act.calls) == list(range(lines))

        play(body)


class TestBackpressure:
    """R19: results cannot be written while calls end fast."""

    async def watch(self, act: Scene, peak: list[int]) -> None:
        while True:
            peak.append(len(act.worker.buffer))
            await asyncio.sleep(0)

    async def until_blocked(self, act: Scene) -> None:
        """A settle waits for a lock: from now on the buffer can only fill."""
        blocked = (
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            " AND wait_event_type = 'Lock' AND query LIKE '%WITH held AS%'"
        )
        async with asyncio.timeout(DEADLINE_S):
            while await one(act.direct, blocked) == (0,):
                await asyncio.sleep(0.01)

    @pytest.mark.parametrize("table", ["outcomes", "leases"])
    def test_calls_stop_at_the_high_water_mark(self, database_18: str, table: str) -> None:
        lines = 400

        async def body() -> None:
            async with connected(database_18) as other, scene(database_18, lines) as act:
                peak: list[int] = [0]
                watching = asyncio.create_task(self.watch(act, peak))
                await act.until(lambda: len(act.calls) > 50)
                act.going.clear()  # or all might be over before the table is locked
                async with other.transaction():
                    await other.execute(f"LOCK TABLE penstock.{table} IN ACCESS EXCLUSIVE MODE")
                    act.going.set()
                    await self.until_blocked(act)
                    await act.until(lambda: act.worker.buffer._backpressure and act.worker.in_flight == 0)
                    stopped = len(act.calls)
                    await act.until_beaten(5)
                    assert len(act.calls) == stopped < lines
                await act.until_completed()
                watching.cancel()
                assert max(peak) <= CAPACITY + CONCURRENCY
                await act.check(lines)
                assert sorted(act.calls) == list(range(lines))

        play(body)

    def test_an_identity_lost_under_pressure_does_not_leave_the_next_one_pressed(self, database_18: str) -> None:
        lines = 200
        liveness = replace(CONFIG.liveness, heartbeat_grace_s=1)

        async def body() -> None:
            async with (
                connected(database_18) as other,
                scene(database_18, lines, config=replace(CONFIG, liveness=liveness)) as act,
            ):
                await act.until(lambda: len(act.calls) > 0)
                act.going.clear()
                async with other.transaction():
                    await other.execute("LOCK TABLE penstock.outcomes, penstock.workers IN ACCESS EXCLUSIVE MODE")
                    act.going.set()
                    await act.until(lambda: act.worker.buffer.figures.backpressured > 0)
                    await act.until(lambda: act.worker.lost_identities > 0)
                await act.until_completed()
                await act.check(lines)

        play(body)


class TestPartition:
    """R13: packets between one worker and the database get lost, and nobody hangs up."""

    # A margin for busy machines: a worker ends its calls after eight tenths of the grace.
    GRACE_S = 3.0
    LIVENESS = {"heartbeat_interval_s": 0.3, "heartbeat_grace_s": GRACE_S}  # noqa: RUF012 -- never changed
    LINES = 60

    def until_reborn(self, bench: Bench, worker: Process, old: set[UUID]) -> None:
        until_said(worker, "going on under a new identity")
        wait_until(lambda: bench.worker_ids(worker) - old, DEADLINE_S)

    @pytest.mark.parametrize(
        "ways", some([(Way.UP,), (Way.DOWN,), (Way.UP, Way.DOWN)], 2), ids=["up", "down", "both ways"]
    )
    def test_it_cuts_its_calls_before_others_have_its_work(
        self, tmp_path: Path, database_18: str, ways: Iterable[Way]
    ) -> None:
        with PostgresProxy(database_18) as proxy, workbench(tmp_path, database_18, lines=self.LINES) as bench:
            held = bench.upstream("held", HELD)
            first = bench.worker("first", held, self.LIVENESS, conninfo=proxy.proxied(database_18))
            wait_until(lambda: calls_of(held) == CONCURRENCY, DEADLINE_S)
            old = bench.worker_ids(first)
            proxy.freeze(ways=ways)
            until_said(first, "dropped")
            assert (said_at(first, "dropped") - beaten_at(bench)).total_seconds() < self.GRACE_S
            second = bench.worker("second", bench.upstream("prompt"), self.LIVENESS)
            bench.until_completed()
            before = bench.outcomes()
            proxy.heal()
            self.until_reborn(bench, first, old)
            leave(first)
            # A check-in that was under way all the time may still arrive: the lost identity dies once more.
            bench.until("SELECT (count(*) = 1)::int FROM penstock.workers")
            leave(second)
            assert bench.outcomes() == before
            bench.check()
            assert bench.calls() == self.LINES + CONCURRENCY

    def test_cut_off_in_the_middle_of_a_check_in_it_holds_up_nobody(self, tmp_path: Path, database_18: str) -> None:
        """Its heartbeat's transaction stays open, and with it a lock on its row. The others still find the dead."""
        with PostgresProxy(database_18) as proxy, workbench(tmp_path, database_18, lines=self.LINES) as bench:
            held = bench.upstream("held", HELD)
            first = bench.worker("first", held, self.LIVENESS, conninfo=proxy.proxied(database_18))
            wait_until(lambda: calls_of(held) == CONCURRENCY, DEADLINE_S)
            proxy.stall_before("^COMMIT").wait(DEADLINE_S)
            proxy.freeze()
            second = bench.worker("second", bench.upstream("prompt", taking(0.01)), self.LIVENESS)
            bench.until("SELECT (count(*) > 0)::int FROM penstock.outcomes")
            bench.until_completed()
            third = bench.worker("third", held, self.LIVENESS)
            wait_until(lambda: bench.worker_ids(third), DEADLINE_S)
            third.kill()
            wait_until(lambda: not bench.worker_ids(third), 15)
            leave(second)
            bench.check()
            first.kill()


def test_a_database_that_keeps_crashing(tmp_path: Path, prepared: Prepared) -> None:
    """R4: immediate shutdowns under load, as often as the server comes back."""
    lines = 1_200
    data_dir = prepared(tmp_path / "data")
    with postgres.acquire(data_dir) as server:
        migrate(server.conninfo)
        with workbench(tmp_path, server.conninfo, lines=lines) as bench:
            upstream = bench.upstream("upstream", taking(0.02))
            workers = [bench.worker(name, upstream) for name in ("first", "second")]
            bench.until("SELECT (count(*) = 2)::int FROM penstock.workers")
            for calls in range(lines // 8, lines // 2, lines // 8):
                until_called(upstream, calls)
                crash_database(data_dir, server.conninfo)
            bench.until_completed()
            told = [leave(worker) for worker in workers]
            assert all(said["fenced"] == 0 for said in told)
            bench.check()
            # Nobody died: every answer that was received is recorded, so no call is repeated.
            assert bench.calls() == lines


def until_called(upstream: UpstreamProcess, calls: int) -> None:
    wait_until(lambda: calls_of(upstream) >= calls, DEADLINE_S)


def crash_database(data_dir: Path, conninfo: str) -> None:
    """What `pg_ctl stop -m immediate` does; returns when the server is back."""
    postmaster = find_postmaster(str(data_dir / PGDATA))
    assert postmaster is not None
    os.kill(postmaster.pid, signal.SIGQUIT)

    def back() -> bool:
        found = find_postmaster(str(data_dir / PGDATA))
        if found is None or found.pid == postmaster.pid:
            return False
        try:
            psycopg.connect(conninfo).close()
        except psycopg.OperationalError:
            return False
        return True

    wait_until(back, DEADLINE_S)

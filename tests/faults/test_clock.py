"""Clocks that are wrong: a worker's does not matter, and the database's may only make it reclaim early."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

from penstock.batches.finish import finish_batch
from penstock.batches.read import read_status
from penstock.claim import claim as claims
from penstock.claim import liveness
from penstock.config import LivenessLimits
from penstock.db.duties import take_turn
from penstock.db.pool import Connection
from penstock.model import Again, Outcome, OutcomeState
from penstock.settle.write import Changes, settle
from tests.support.cli import (
    DEADLINE_S,
    ask,
    call_count,
    calls_by_key,
    check_agreement,
    check_answers,
    finish,
    ids_of,
    start_cli,
    write_requests,
)
from tests.support.db import connected, one, with_connection
from tests.support.engine import claim_due, count_leased, make_batch
from tests.support.mock_process import MockProcess, start_mock_process
from tests.support.thorough import some

LINES = 120
LIMITS = LivenessLimits()
DONE = Outcome(OutcomeState.COMPLETED, b'"late"', 200)


def skewed(offset: str) -> dict[str, str]:
    """The environment of a process whose wall clock is off. The monotonic clock has no zero to be off from."""
    return {"LD_PRELOAD": str(library()), "FAKETIME": offset, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}


def library() -> Path:
    found = sorted(Path("/usr/lib").glob("**/faketime/libfaketime.so.1"))
    assert found, "libfaketime is missing: scripts/system-packages installs it"
    return found[0]


@pytest.fixture(scope="module")
def mock() -> Iterator[MockProcess]:
    with start_mock_process("--latency", "50ms") as process:
        yield process


def test_the_skew_is_real() -> None:
    """Or the next test would show nothing."""
    command = ["python3", "-c", "import time; print(time.time(), time.monotonic())"]
    wall, steady = (
        float(word)
        for word in subprocess.run(command, env=skewed("-3600s"), capture_output=True, check=True).stdout.split()
    )
    assert abs(datetime.now(UTC).timestamp() - 3600 - wall) < 60
    assert steady > 0


@pytest.mark.slow
@pytest.mark.parametrize("offset", some(["-3600s", "+3600s"], 1))
def test_a_worker_whose_clock_is_an_hour_off(database_18: str, mock: MockProcess, tmp_path: Path, offset: str) -> None:
    """Beside one whose clock is right, which sees it alive all the time and takes nothing from it."""
    requests = write_requests(tmp_path / "in.jsonl", LINES)
    output = tmp_path / "out.jsonl"
    before = call_count(mock)
    command: list[str | Path] = [
        *("run", requests, "--base-url", mock.base_url, "-o", output, "--json", "-v", "--concurrency", "4"),
        *("--database-url", database_18, "--set", "heartbeat_interval_s=0.2", "--set", "heartbeat_grace_s=5"),
    ]
    with start_cli(*command, cwd=tmp_path, env=skewed(offset)) as process:
        lost = asyncio.run(watch(database_18, process))
        finished = finish(process).expect(0)
    assert lost == 0
    assert finished.summary["completed"] == LINES
    check_answers(output, ids_of(LINES))
    assert call_count(mock) - before == LINES, "nothing was called twice"
    assert all(record["calls"] == 1 for record in calls_by_key(mock).values())
    with psycopg.connect(database_18, autocommit=True) as connection:
        check_agreement(connection)
        assert ask(connection, "SELECT count(*) FROM penstock.attempts") == 0
        off_by = "abs(extract(epoch FROM max(finished_at) - now()))"
        assert ask(connection, f"SELECT {off_by} FROM penstock.outcomes") < DEADLINE_S, "times are the database's"


async def watch(conninfo: str, process: subprocess.Popen[bytes]) -> int:
    """Look for lost workers as any worker does, for as long as the other one works; how many leases that took."""
    lost = rounds = 0
    async with connected(conninfo) as connection:
        while process.poll() is None:
            gone = await liveness.list_exited_workers(connection)
            found = await liveness.reclaim(
                connection, uuid4(), LivenessLimits(heartbeat_grace_s=5), stuck_s=150, gone=gone
            )
            lost += found.leases
            rounds += await one(connection, "SELECT count(*) > 0 FROM penstock.leases") == (True,)
            await asyncio.sleep(0.01)
    assert rounds > 10, "the worker was never seen at work"
    return lost


def test_the_database_clock_jumps_ahead(database: str) -> None:
    """Whoever reclaims then finds everybody silent. That is early, and still clean: what comes late is refused."""

    async def body(connection: Connection) -> None:
        batch = await make_batch(connection, [6])
        early, later = uuid4(), uuid4()
        await liveness.register(connection, early, "test")
        (held,) = await claim_due(connection, pool="test", wants={"model-0": 4}, worker_id=early, taper_floor=4)
        jump = datetime.now(UTC) + timedelta(hours=1)
        lost = await liveness.reclaim(connection, later, LIMITS, stuck_s=1e9, now=jump)
        assert (lost.leases, lost.ordinals) == (1, 4)

        late = Changes(outcomes=[(held, ordinal, ordinal + 1, "c", DONE) for ordinal in range(4)])
        assert (await settle(connection, early, late)).fenced == 4
        # The clock is right again: what was reclaimed is due then, and not lost.
        await liveness.register(connection, later, "test")
        again = await claim_due(connection, pool="test", wants={"model-0": 9}, worker_id=later, taper_floor=9, now=jump)
        assert count_leased(again) == 6
        for lease in again:
            rows = [(lease, o, o + 1, "c", DONE) for o in claims.first_ordinals(lease.ranges, 9)]
            await settle(connection, later, Changes(outcomes=rows))
        assert await finish_batch(connection, batch)
        counts = (await read_status(connection, batch)).counts
        assert (counts.completed, counts.retried, counts.in_flight) == (6, 0, 0)
        assert await one(connection, "SELECT count(*), count(DISTINCT lease_id) FROM penstock.outcomes") == (6, 2)

    with_connection(database, body)


def test_the_database_s_clock_set_back_an_hour(database: str) -> None:
    """R28: housekeeping and reclaims go on; a lost worker is missed after its grace, on the clock as it is now."""

    async def body(connection: Connection) -> None:
        await make_batch(connection, [4])
        lost, keeper = uuid4(), uuid4()
        before = datetime.now(UTC)
        after = before - timedelta(hours=1)
        assert await take_turn(connection, "round", 0.75, now=before)
        await liveness.register(connection, lost, "test", now=before)
        await claim_due(connection, pool="test", wants={"model-0": 4}, worker_id=lost, taper_floor=4, now=before)

        assert await take_turn(connection, "round", 0.75, now=after)
        assert not await take_turn(connection, "round", 0.75, now=after + timedelta(seconds=0.1))
        assert (await liveness.reclaim(connection, keeper, LIMITS, stuck_s=150, now=after)).leases == 0
        within = after + timedelta(seconds=LIMITS.heartbeat_grace_s - 1)
        assert (await liveness.reclaim(connection, keeper, LIMITS, stuck_s=150, now=within)).leases == 0
        past = after + timedelta(seconds=LIMITS.heartbeat_grace_s + 1)
        assert (await liveness.reclaim(connection, keeper, LIMITS, stuck_s=150, now=past)).ordinals == 4

    with_connection(database, body)


def test_what_was_put_off_waits_as_long_as_it_was_to_after_the_clock_was_set_back(database: str) -> None:
    async def body(connection: Connection) -> None:
        await make_batch(connection, [3])
        ahead = datetime.now(UTC) + timedelta(hours=1)
        worker, wants = uuid4(), {"model-0": 3}
        [lease] = await claim_due(connection, pool="test", wants=wants, worker_id=worker, taper_floor=3, now=ahead)
        again = [(lease, n, Again("busy", "later", delay_s, True)) for n, delay_s in enumerate((0.0, 20.0, 600.0))]
        await settle(connection, worker, Changes(agains=again), now=ahead)

        await liveness.reclaim(connection, uuid4(), LIMITS, stuck_s=60.0)
        cursor = await connection.execute(
            "SELECT extract(epoch FROM due_at - now())::float8 FROM penstock.deferrals ORDER BY due_at"
        )
        waits = [wait for (wait,) in await cursor.fetchall()]
        assert waits[0] <= 0
        assert 20 - DEADLINE_S <= waits[1] <= 24
        assert 600 - DEADLINE_S <= waits[2] <= 740
        [lease] = await claim_due(connection, pool="test", wants=wants, worker_id=uuid4())
        assert lease.ranges == ((0, 1),)

    with_connection(database, body)


def test_a_lease_without_progress_is_missed_after_the_clock_was_set_back(database: str) -> None:
    async def body(connection: Connection) -> None:
        await make_batch(connection, [4])
        worker, keeper = uuid4(), uuid4()
        before = datetime.now(UTC)
        after = before - timedelta(hours=1)
        await liveness.register(connection, worker, "test", now=before)
        await claim_due(connection, pool="test", wants={"model-0": 4}, worker_id=worker, taper_floor=4, now=before)
        assert (await liveness.reclaim(connection, keeper, LIMITS, stuck_s=150, now=after)).leases == 0
        late = after + timedelta(seconds=151)
        await connection.execute("UPDATE penstock.workers SET heartbeat_at = %s", [late])
        assert (await liveness.reclaim(connection, keeper, LIMITS, stuck_s=150, now=late)).ordinals == 4

    with_connection(database, body)

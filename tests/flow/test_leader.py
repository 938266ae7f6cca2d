"""One leads: through deaths, frozen processes, cut and silent connections, and behind a pooler."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import psycopg

from penstock.caretaker import Caretaker
from penstock.config import Config
from penstock.db.leader import Leader
from penstock.providers import Providers
from tests.support import candidate
from tests.support.db import pooled as open_pooled
from tests.support.postgres_proxy import PostgresProxy
from tests.support.processes import Process, Processes
from tests.support.wait import wait_until

GRACE_S = 2.0
DEADLINE_S = 20.0

_EXPIRED = (
    "INSERT INTO penstock.files"
    " (id, owner, filename, state, kind, purpose, created_at, sealed_at, expires_at, lines, bytes)"
    " VALUES (gen_random_uuid(), 'o', 'f', 'ready', 'input', 'user_data', now(), now(), now(), 0, 0)"
)
_HELD = (
    "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
_LEFT = "SELECT count(*) FROM penstock.files WHERE deleted_at IS NULL"


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)


def test_one_leads_and_the_next_follows_when_it_goes(database: str) -> None:
    async def run() -> None:
        led: list[str] = []
        async with Leader(database, "a", grace_s=GRACE_S, on_lead=lambda: led.append("second")) as waiting:
            await until(lambda: waiting.leads)
            async with Leader(database, "b", grace_s=GRACE_S) as other_name:
                await until(lambda: other_name.leads)
        assert not waiting.leads
        async with Leader(database, "a", grace_s=GRACE_S) as first:
            await until(lambda: first.leads)
            async with Leader(database, "a", grace_s=GRACE_S, on_lead=lambda: led.append("third")) as second:
                await asyncio.gather(*(_looked(database, "a") for _ in range(2)))
                assert (first.leads, second.leads) == (True, False)
                await first.__aexit__(None, None, None)
                await until(lambda: second.leads and not first.leads)
        assert led == ["second", "third"]

    asyncio.run(run())


async def _looked(database: str, name: str) -> None:
    """Until a follower has looked for the lead, and found it taken."""
    before = monotonic()

    def looks() -> bool:
        with psycopg.connect(database, autocommit=True) as connection:
            row = connection.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s AND query LIKE '%%try_advisory%%'",
                [f"penstock leader {name}"],
            ).fetchone()
        return row is not None and row[0] > 0

    await until(looks)
    assert monotonic() - before < DEADLINE_S


def test_a_lost_connection_is_noticed_at_once(database: str) -> None:
    async def run() -> None:
        async with Leader(database, "cut", grace_s=60) as leader:
            await until(lambda: leader.leads)
            began = monotonic()
            with psycopg.connect(database, autocommit=True) as connection:
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE application_name = 'penstock leader cut'"
                )
            await until(lambda: not leader.leads)
            # Long before its next beat.
            assert monotonic() - began < 5
            await until(lambda: leader.leads)

    asyncio.run(run())


def test_a_silent_connection_ends_the_lead_here_before_it_begins_there(database: str) -> None:
    async def run(proxy: PostgresProxy) -> None:
        async with Leader(proxy.proxied(database), "silent", grace_s=GRACE_S) as cut_off:
            await until(lambda: cut_off.leads)
            async with Leader(database, "silent", grace_s=GRACE_S) as other:
                proxy.freeze()
                while not other.leads:
                    both = cut_off.leads and other.leads
                    assert not both
                    await asyncio.sleep(0.001)
                assert not cut_off.leads
                proxy.heal()
                await until(lambda: other.leads and not cut_off.leads)

    with PostgresProxy(database) as proxy:
        asyncio.run(asyncio.wait_for(run(proxy), DEADLINE_S))


def _candidates(processes: Processes, database: str, count: int) -> list[Process]:
    command = [sys.executable, "-m", "tests.support.candidate", database, str(GRACE_S)]
    root = Path(__file__).parent.parent.parent
    return [processes.start(f"candidate-{number}", command, cwd=root) for number in range(count)]


def _leading(process: Process) -> bool:
    """Whether it has led within the last moments."""
    found = candidate.moments(process.log)
    return bool(found) and monotonic() - found[-1] < 0.2


def _the_leader(processes: list[Process]) -> Process:
    found: list[Process] = []

    def look() -> bool:
        found[:] = [process for process in processes if process.alive and not process.frozen and _leading(process)]
        return len(found) == 1

    wait_until(look, DEADLINE_S)
    return found[0]


def test_a_killed_leader_is_followed_at_once(database: str, tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        standing = _candidates(processes, database, 3)
        first = _the_leader(standing)
        first.kill()
        died = monotonic()
        second = _the_leader(standing)
        assert second is not first
        began = candidate.moments(second.log)[0]
        assert began - died < 1.5, "the lock of a dead process is free at once; a follower looks every fifth of a grace"
        assert candidate.changes([candidate.moments(process.log) for process in standing]) == 1


def test_a_frozen_leader_is_followed_and_knows_it_when_it_wakes(database: str, tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        standing = _candidates(processes, database, 2)
        first = _the_leader(standing)
        (other,) = [process for process in standing if process is not first]
        first.stop()
        wait_until(lambda: _leading(other), DEADLINE_S)
        woken = monotonic()
        first.cont()
        # It goes on looking, 500 times a second, and never again finds itself leading.
        wait_until(lambda: monotonic() - woken > 1, DEADLINE_S)
        assert not [moment for moment in candidate.moments(first.log) if moment > woken]
        other.kill()
        wait_until(lambda: _leading(first), DEADLINE_S)
        assert candidate.changes([candidate.moments(process.log) for process in standing]) == 2


def test_behind_a_pooler_turns_are_taken_one_by_one(pooler: str, database_18: str) -> None:
    behind = psycopg.conninfo.make_conninfo(pooler, dbname=psycopg.conninfo.conninfo_to_dict(database_18)["dbname"])

    async def run() -> None:
        async with (
            Leader(behind, "duty", grace_s=4) as one,
            Leader(behind, "duty", grace_s=4) as two,
        ):
            await until(lambda: one.pooled.is_set() and two.pooled.is_set())
            assert not one.leads
            async with one.turn("expire") as first:
                assert first.mine
                async with two.turn("expire") as second, two.turn("sweep") as elsewhere:
                    assert not second.mine
                    assert elsewhere.mine
                # It lasts as long as the work, though that is longer than the server's patience with silence.
                began = monotonic()
                await until(lambda: monotonic() - began > 5)
                assert first.mine
            await until(lambda: not first.mine)
            async with two.turn("expire") as second:
                assert second.mine

    asyncio.run(run())
    with psycopg.connect(database_18, autocommit=True) as connection:
        wait_until(lambda: connection.execute(_HELD).fetchone() == (0,), DEADLINE_S)
    # Nothing was set in sessions that others use too.
    with psycopg.connect(behind) as connection:
        assert connection.execute("SHOW statement_timeout").fetchone() == ("0",)


def test_caretakers_share_one_leader_and_the_work_goes_on_when_it_goes(database: str) -> None:
    async def run() -> None:
        config, nobody = Config(), Providers(())
        async with (
            open_pooled(database) as pool,
            Caretaker(config, database, pool, nobody) as first,
            Caretaker(config, database, pool, nobody) as second,
        ):
            await until(lambda: first.leader.leads or second.leader.leads)
            await until(lambda: first.leader.leads != second.leader.leads)
            leading, following = (first, second) if first.leader.leads else (second, first)
            with psycopg.connect(database, autocommit=True) as connection:
                connection.execute(_EXPIRED)
                await leading.__aexit__(None, None, None)
                # The new leader does what is led at once, rather than when its time comes round.
                async with asyncio.timeout(8):
                    while connection.execute(_LEFT).fetchone() != (0,):
                        await asyncio.sleep(0.01)
            assert following.leader.leads

    asyncio.run(run())


def test_what_is_led_is_done_behind_a_pooler_too(pooler: str, database_18: str) -> None:
    behind = psycopg.conninfo.make_conninfo(pooler, dbname=psycopg.conninfo.conninfo_to_dict(database_18)["dbname"])

    async def run() -> None:
        async with open_pooled(behind) as pool, Caretaker(Config(), behind, pool, Providers(())) as caretaker:
            await until(caretaker.leader.pooled.is_set)
            with psycopg.connect(database_18, autocommit=True) as connection:
                connection.execute(_EXPIRED)
                # Within a round, which is ten seconds.
                await until(lambda: connection.execute(_LEFT).fetchone() == (0,))

    asyncio.run(run())

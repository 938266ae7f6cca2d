"""Worker processes killed, frozen and stopped at the worst moments: nothing is lost, and nothing recorded twice.

`tests/flow/cli/test_kill.py` kills whole runs at random moments; here the moments are chosen. What the fence does
statement by statement is in `tests/flow/settle/test_fence.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import pytest

from penstock.errors import ExitCode
from penstock.mock.behaviour import Behaviour
from tests.support.cli import check_answers, ids_of, run_cli, write_requests
from tests.support.history import digest_of
from tests.support.postgres_proxy import PostgresProxy
from tests.support.processes import Process
from tests.support.proxy_link import Trigger
from tests.support.upstream import UpstreamProcess
from tests.support.wait import wait_until
from tests.support.workbench import (
    CLAIM,
    CONCURRENCY,
    DEADLINE_S,
    HELD,
    SETTLE,
    Bench,
    calls_of,
    farewell,
    in_flight,
    leave,
    taking,
    until_said,
    workbench,
)

LINES = 60

Arm = Callable[[PostgresProxy], Trigger]
# What a worker may lose: its calls, and the answers that wait for their flush or are in one.
LOST_AT_MOST = CONCURRENCY + 16 + 8


def finish_with_another(bench: Bench) -> None:
    """A second worker does what is left, and everything is as it should be."""
    worker = bench.worker("second", bench.upstream("prompt"))
    bench.until_completed()
    leave(worker)
    bench.check()
    assert bench.ask("SELECT count(*) FROM penstock.workers") == 0


class TestKilledAtAStep:
    """R1: kill -9 at each step between claim and settle."""

    def killed(self, bench: Bench, database: str, arm: Arm) -> int:
        """Kill a worker at the statement where `arm` stalls it; how many calls it made in vain."""
        with PostgresProxy(database) as proxy:
            reached = arm(proxy)
            worker = bench.worker("first", bench.upstream("first-upstream"), conninfo=proxy.proxied(database))
            reached.wait(DEADLINE_S)
            worker.kill()
        bench.until_disconnected(worker)
        return bench.unrecorded()

    @pytest.mark.parametrize(
        ("arm", "leased"),
        [
            pytest.param(lambda proxy: proxy.stall_before(CLAIM), False, id="before the claim"),
            pytest.param(lambda proxy: proxy.stall_after(CLAIM), True, id="claimed, unheard"),
        ],
    )
    def test_around_the_claim(self, tmp_path: Path, database_18: str, arm: Arm, leased: bool) -> None:
        with workbench(tmp_path, database_18, lines=LINES) as bench:
            assert self.killed(bench, database_18, arm) == 0
            assert (bench.ask("SELECT count(*) FROM penstock.leases") > 0) == leased
            finish_with_another(bench)
            assert bench.calls() == LINES

    def test_in_the_middle_of_its_calls(self, tmp_path: Path, database_18: str) -> None:
        with workbench(tmp_path, database_18, lines=LINES) as bench:
            held = bench.upstream("held", HELD)
            worker = bench.worker("first", held)
            wait_until(lambda: calls_of(held) == CONCURRENCY, DEADLINE_S)
            worker.kill()
            finish_with_another(bench)
            assert bench.calls() == LINES + CONCURRENCY

    @pytest.mark.parametrize(
        ("arm", "recorded"),
        [
            pytest.param(lambda proxy: proxy.stall_before(SETTLE), False, id="answered, not flushed"),
            pytest.param(lambda proxy: proxy.stall_after(SETTLE), True, id="flushed, unheard"),
        ],
    )
    def test_around_the_flush(self, tmp_path: Path, database_18: str, arm: Arm, recorded: bool) -> None:
        with workbench(tmp_path, database_18, lines=LINES) as bench:
            lost = self.killed(bench, database_18, arm)
            assert lost <= LOST_AT_MOST
            assert (bench.ask("SELECT count(*) FROM penstock.outcomes") > 0) == recorded
            before = bench.outcomes()
            finish_with_another(bench)
            assert bench.calls() == LINES + lost
            after = bench.outcomes()
            assert {key: after[key] for key in before} == before


def test_what_was_lost_is_called_before_what_others_hold(tmp_path: Path, database_18: str) -> None:
    much = {"claim_slice_s": 60, "claim_max": 1_000}
    with workbench(tmp_path, database_18, lines=5_000) as bench:
        held = bench.upstream("held", HELD)
        first = bench.worker("first", held)
        wait_until(lambda: calls_of(held) == CONCURRENCY, DEADLINE_S)
        busy = bench.upstream("busy", taking(0.2))
        second = bench.worker("second", busy, much)
        bench.until("SELECT max(size) >= 900 FROM penstock.leases")
        lost = bench.called(held)
        first.kill()
        wait_until(lambda: lost <= bench.called(busy), DEADLINE_S)
        # It asks for more when half of that is left, and then calls what it got last.
        assert calls_of(busy) < much["claim_max"] / 2
        leave(second)


# Short enough to wait for, long enough that a busy machine does not look like a dead worker.
QUICK_LIVENESS = {"heartbeat_interval_s": 0.2, "heartbeat_grace_s": 2}


class TestZombie:
    """R2: a worker is stopped for longer than the grace and continued when others have its work."""

    def stopped(self, bench: Bench) -> Process:
        """A worker that stands still with its calls in flight, and as many items waiting; answers come meanwhile."""
        late = bench.upstream("late", taking(3))
        worker = bench.worker("zombie", late, QUICK_LIVENESS)
        wait_until(lambda: in_flight(late) == CONCURRENCY, DEADLINE_S)
        bench.until(f"SELECT (sum(size) = {2 * CONCURRENCY})::int FROM penstock.leases")
        worker.stop()
        assert bench.ask("SELECT count(*) FROM penstock.outcomes") == 0
        return worker

    def until_reborn(self, bench: Bench, worker: Process, old: set[UUID]) -> None:
        until_said(worker, "going on under a new identity")
        wait_until(lambda: bench.worker_ids(worker) - old, DEADLINE_S)

    def test_wakes_when_everything_is_done(self, tmp_path: Path, database_18: str) -> None:
        with workbench(tmp_path, database_18, lines=LINES) as bench:
            zombie = self.stopped(bench)
            old = bench.worker_ids(zombie)
            second = bench.worker("second", bench.upstream("prompt"), QUICK_LIVENESS)
            bench.until_completed()
            bench.until("SELECT (count(*) = 1)::int FROM penstock.workers")
            before = bench.outcomes()
            zombie.cont()
            self.until_reborn(bench, zombie, old)
            assert leave(zombie)["lost"] == 1
            leave(second)
            assert bench.outcomes() == before
            bench.check()
            assert bench.calls() == LINES + CONCURRENCY

    def test_wakes_when_others_are_at_its_work(self, tmp_path: Path, database_18: str) -> None:
        with workbench(tmp_path, database_18, lines=2 * CONCURRENCY) as bench:
            zombie = self.stopped(bench)
            old = bench.worker_ids(zombie)
            slow = bench.upstream("slow", taking(1.5))
            second = bench.worker("second", slow, {**QUICK_LIVENESS, "concurrency": 2 * CONCURRENCY})
            wait_until(lambda: in_flight(slow) == 2 * CONCURRENCY, DEADLINE_S)
            zombie.cont()
            self.until_reborn(bench, zombie, old)
            bench.until_completed()
            leave(zombie)
            leave(second)
            bench.check()
            theirs = bench.sent(slow)
            assert all(digest_of(response) in theirs[key] for key, response in bench.outcomes().items())
            assert bench.calls() == 3 * CONCURRENCY


class TestStopped:
    """R18: SIGTERM under load. Nothing is left for others to find out: no lease, no worker, no charge."""

    def loaded(
        self, bench: Bench, behaviour: Behaviour, drain_timeout_s: float = 30
    ) -> tuple[Process, UpstreamProcess]:
        """A worker with all its calls in flight and as many items waiting, so that it asks for no more."""
        upstream = bench.upstream("first-upstream", behaviour)
        worker = bench.worker("first", upstream, {"drain_timeout_s": drain_timeout_s})
        wait_until(lambda: calls_of(upstream) == CONCURRENCY, DEADLINE_S)
        bench.until(f"SELECT (sum(size) = {2 * CONCURRENCY})::int FROM penstock.leases")
        return worker, upstream

    def check_left_tidy(self, bench: Bench, done: int) -> None:
        assert bench.ask("SELECT count(*) FROM penstock.outcomes") == done
        assert bench.ask("SELECT sum(size) FROM penstock.deferrals") == 2 * CONCURRENCY - done
        assert bench.ask("SELECT count(*) FROM penstock.deferrals WHERE reason <> 'given_back' OR attempt > 1") == 0
        for table in ("leases", "workers", "attempts"):
            assert bench.ask(f"SELECT count(*) FROM penstock.{table}") == 0, table

    def test_its_calls_end_and_are_recorded(self, tmp_path: Path, database_18: str) -> None:
        with workbench(tmp_path, database_18, lines=LINES) as bench:
            worker, upstream = self.loaded(bench, taking(3))
            said = leave(worker)
            assert (said["outcomes"], said["given_back"], said["fenced"]) == (CONCURRENCY, CONCURRENCY, 0)
            assert calls_of(upstream) == CONCURRENCY
            self.check_left_tidy(bench, CONCURRENCY)
            finish_with_another(bench)
            assert bench.calls() == LINES

    def test_calls_that_do_not_end_are_cut_at_the_drain_timeout(self, tmp_path: Path, database_18: str) -> None:
        with workbench(tmp_path, database_18, lines=LINES) as bench:
            worker, upstream = self.loaded(bench, HELD, 0.5)
            leave(worker, 15)
            assert calls_of(upstream) == CONCURRENCY
            self.check_left_tidy(bench, 0)

    def test_twice_it_waits_for_nothing(self, tmp_path: Path, database_18: str) -> None:
        with workbench(tmp_path, database_18, lines=LINES) as bench:
            worker, upstream = self.loaded(bench, HELD, 600)
            for times in (1, 2):
                worker.terminate()
                # Two signals that are pending at once would be one.
                until_said(worker, "told to stop", times)
            farewell(worker, 15)
            assert calls_of(upstream) == CONCURRENCY
            self.check_left_tidy(bench, 0)
            finish_with_another(bench)
            assert bench.calls() == LINES + CONCURRENCY


_POISON = """
import os

async def work(item):
    if item.custom_id == "r-20":
        with open("deaths", "a") as deaths:
            deaths.write("x")
        os._exit(9)
    return "done"
"""


def test_a_request_that_kills_its_workers_fails_alone(tmp_path: Path, database_18: str) -> None:
    """R21. Its neighbours are narrowed down with it, and their results wait long for company: they must be written
    before the next suspect is tried, or they would be condemned with it."""
    (tmp_path / "poison.py").write_text(_POISON)
    source = write_requests(tmp_path / "requests.jsonl", 40)
    settings = {"concurrency": 4, "claim_max": 8, "max_reclaims": 2, "settle_interval_s": 0.3}
    options = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    target = ("--processor", "poison:work", "-o", "answers.jsonl", "--database-url", database_18, "--workers", "2")
    ended = run_cli("run", source, *target, *options, "--json", cwd=tmp_path).expect(ExitCode.FAILED_ROWS)
    assert (ended.summary["completed"], ended.summary["failed"]) == (39, 1)
    answers = check_answers(tmp_path / "answers.jsonl", ids_of(40))
    assert [(line["custom_id"], line["error"]["code"]) for line in answers.bad] == [("r-20", "worker_lost")]
    # At first all eight of a claim are lost, then halves of them, and at last this one alone.
    assert len((tmp_path / "deaths").read_text()) <= 5

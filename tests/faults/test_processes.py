"""Worker processes killed, frozen and stopped at the worst moments: nothing is lost, and nothing recorded twice.

`tests/flow/test_kill.py` kills whole runs at random moments; here the moments are chosen. What the fence does
statement by statement is in `tests/flow/test_fence.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.postgres_proxy import PostgresProxy
from tests.support.proxy_link import Trigger
from tests.support.wait import wait_until
from tests.support.workbench import (
    CLAIM,
    CONCURRENCY,
    DEADLINE_S,
    HELD,
    SETTLE,
    Bench,
    calls_of,
    in_flight,
    leave,
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

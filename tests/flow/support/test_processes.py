"""Control over processes: signals do what they say, and nobody is left behind."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.history import HistoryWriter, read_history
from tests.support.processes import Process, Processes
from tests.support.wait import wait_until

DEADLINE_S = 20.0

# Counts up in its log, so that a test can see whether it moves.
TICKING = """
import itertools, sys, time
for number in itertools.count():
    print(number, flush=True)
    time.sleep(0.005)
"""

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path) as processes:
        yield processes


def started(processes: Processes, program: str = TICKING, name: str = "one") -> Process:
    process = processes.start(name, [sys.executable, "-c", program])
    wait_until(lambda: process.log.stat().st_size > 0, DEADLINE_S)
    return process


def moves(process: Process, within_s: float) -> bool:
    before = process.log.stat().st_size
    try:
        wait_until(lambda: process.log.stat().st_size > before, within_s)
    except AssertionError:
        return False
    return True


def stands_still(process: Process) -> bool:
    return not moves(process, 0.3)


def test_penstock_runs_with_its_log_in_a_file(processes: Processes) -> None:
    process = processes.penstock("version", "--version")
    assert process.wait(DEADLINE_S) == 0
    assert "penstock" in process.tail()
    assert processes.penstock("version", "no-such-command").wait(DEADLINE_S) == 2
    assert "no-such-command" in process.log.read_text(), "the same name, the same log"


def test_killed_is_dead_at_once(processes: Processes) -> None:
    process = started(processes)
    process.kill()
    assert (process.alive, process.exit_code, process.wait(0)) == (False, -signal.SIGKILL, -signal.SIGKILL)
    process.kill()  # harmless


def test_terminated_ends_as_it_likes(processes: Processes) -> None:
    process = started(processes)
    process.terminate()
    assert process.wait(DEADLINE_S) == -signal.SIGTERM


def test_stopped_it_stands_still_and_continues(processes: Processes) -> None:
    process = started(processes)
    process.stop()
    assert process.frozen
    assert stands_still(process)
    process.cont()
    assert moves(process, DEADLINE_S)


def test_frozen_it_goes_on_by_itself(processes: Processes) -> None:
    process = started(processes)
    process.freeze(2)
    assert process.frozen
    assert stands_still(process)
    wait_until(lambda: not process.frozen, DEADLINE_S)
    assert moves(process, DEADLINE_S)


def test_frozen_again_it_goes_on_at_the_later_time(processes: Processes) -> None:
    process = started(processes)
    process.freeze(0.1)
    process.freeze(600)
    assert stands_still(process), "the first timer is over and would have let it go on"
    assert process.frozen


def test_the_frozen_can_be_killed(processes: Processes) -> None:
    process = started(processes)
    process.freeze(600)
    process.kill()
    assert process.exit_code == -signal.SIGKILL


def test_a_deadline_shows_the_log(processes: Processes) -> None:
    process = started(processes)
    with pytest.raises(AssertionError, match=r"one still runs after 0 s\n0\n"):
        process.wait(0)


def test_a_name_in_use_is_refused(processes: Processes) -> None:
    started(processes).stop()
    with pytest.raises(ValueError, match="one is still running"):
        started(processes)


def test_nobody_is_left_behind(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        running, frozen = started(processes), started(processes, name="two")
        frozen.freeze(600)
        orphans = [started(processes, PARENT, name) for name in ("three", "four")]
        orphans[0].kill()  # its child lives on without it
        children = [psutil.Process(int(parent.log.read_text())) for parent in orphans]
        assert all(child.is_running() for child in children)
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in (running.pid, frozen.pid)), DEADLINE_S)
    wait_until(
        lambda: all(not child.is_running() or child.status() == psutil.STATUS_ZOMBIE for child in children), DEADLINE_S
    )
    running.kill()  # after the end nothing is signalled: the pid may be another's
    assert running.exit_code == -signal.SIGKILL


def test_what_was_done_to_it_is_told_to_a_history(tmp_path: Path) -> None:
    with HistoryWriter(tmp_path / "history", "injector") as history, Processes(tmp_path, history=history) as processes:
        process = started(processes)
        process.freeze(0.01)
        wait_until(lambda: not process.frozen, DEADLINE_S)
        wait_until(lambda: len(read_history(tmp_path / "history")) == 3, DEADLINE_S)
        process.kill()
    events = read_history(tmp_path / "history")
    assert [(event.f, event.key) for event in events] == [
        ("start", "one"),
        ("stop", "one"),
        ("cont", "one"),
        ("kill", "one"),
    ]

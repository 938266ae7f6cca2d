"""Help is for people who wait for it: it costs little, and loads nothing that only a run needs."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

CPU_MAX_S = 0.150
RUNS_MAX = 20
# Each takes tens of milliseconds to import and serves no help text.
HEAVY = ("psycopg", "psycopg_pool", "rich", "asyncio", "uvloop", "httptools", "psutil", "msgspec", "zstandard")
CLIENT = ("submit", "ls", "show", "watch", "pause", "resume", "cancel", "retry", "export")
COMMANDS: tuple[list[str], ...] = (
    [],
    ["run"],
    *([name] for name in CLIENT),
    ["jobs"],
    ["jobs", "submit"],
    ["session"],
    ["session", "send"],
    ["serve"],
    ["worker"],
    ["keys"],
    ["providers"],
    ["db"],
    ["db", "migrate"],
    ["mock"],
)

_LOADED = """
import sys
from penstock.cli.main import main
try:
    main([*sys.argv[2:], "--help"], prog_name="penstock")
finally:
    print("loaded:", *(name for name in sys.argv[1].split(",") if name in sys.modules))
"""


def cpu_s(*args: str) -> float:
    """What one run of the program costs, the start of the interpreter included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "penstock.cli.main", *args], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_is_cheap(command: list[str]) -> None:
    # The least of several counts: the others measure what else the machine was doing.
    costs: list[float] = []
    while len(costs) < RUNS_MAX and min(costs, default=CPU_MAX_S) >= CPU_MAX_S:
        costs.append(cpu_s(*command, "--help"))
    assert min(costs) < CPU_MAX_S, costs


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_loads_nothing_heavy(command: list[str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _LOADED, ",".join(HEAVY), *command], check=True, capture_output=True, text=True
    )
    assert ended.stdout.splitlines()[-1] == "loaded:"


def test_help_names_every_command_and_exit_code() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", "--help"], check=True, capture_output=True, text=True
    ).stdout
    for command in ("run", *CLIENT, "jobs", "db", "mock"):
        assert f"\n  {command} " in shown
    for code in ("0 all done", "1 operational", "2 wrong usage", "3 some rows failed", "4 paused", "130 interrupted"):
        assert code in " ".join(shown.split())


def test_an_unknown_command_is_wrong_usage() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", "rnu"], check=False, capture_output=True, text=True
    )
    assert ended.returncode == 2
    assert "No such command 'rnu'" in ended.stderr


def test_a_full_disk_behind_standard_output_is_told_without_a_traceback() -> None:
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "penstock.cli.main", "--help"], check=False, stdout=full, stderr=subprocess.PIPE
        )
    assert ended.returncode == 1
    assert ended.stderr.startswith(b"penstock: cannot write: No space left on device\n  What is stored is safe")

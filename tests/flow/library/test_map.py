"""`penstock.map`: every row once, whatever happens; in order or as they come; for `for` and for `async for`."""

from __future__ import annotations

import asyncio
import operator
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import penstock
from tests.support.cli import environment, run_cli
from tests.support.prepared import Prepared
from tests.support.wait import wait_until

QUICK = {"retry_base_s": 0.01, "max_attempts": 3}


@pytest.fixture
def where(database_18: str) -> dict[str, Any]:
    return {"database_url": database_18, "settings": QUICK}


def square(row: dict[str, int]) -> int:
    return row["n"] ** 2


def test_results_come_in_the_rows_order_and_again(where: dict[str, Any]) -> None:
    calls: Counter[int] = Counter()

    def counted(row: dict[str, int]) -> dict[str, int]:
        calls[row["n"]] += 1
        return {"squared": square(row)}

    mapped = penstock.map(counted, ({"n": n} for n in range(500)), name="squares", **where)
    assert [(r.index, r.value) for r in mapped] == [(n, {"squared": n * n}) for n in range(500)]
    again = penstock.map(counted, [{"n": n} for n in range(500)], name="squares", **where)
    assert [result.value["squared"] for result in again] == [n * n for n in range(500)]
    assert set(calls.values()) == {1}
    with pytest.raises(penstock.UsageError, match="was begun with other rows"):
        list(penstock.map(counted, [{"n": 1}], name="squares", **where))
    assert [r.value for r in penstock.map(lambda n: n, [1, "a", None, [2]], name="squares", new=True, **where)] == [
        *(1, "a", None, [2])
    ]


def test_rows_that_fail_say_so_and_can_be_tried_again(where: dict[str, Any]) -> None:
    good = threading.Event()

    def picky(n: int) -> int:
        if n == 2:
            raise penstock.Skip("not this one")
        if n == 3 and not good.is_set():
            raise penstock.Fail("hopeless", code="never")
        return n

    results = list(penstock.map(picky, range(5), name="picky", **where))
    assert [result.state for result in results] == ["completed", "completed", "skipped", "failed", "completed"]
    assert (results[3].error_code, results[3].error_message, results[3].ok) == ("never", "hopeless", False)
    with pytest.raises(penstock.RowFailed, match="row 3 is failed: hopeless"):
        _ = results[3].value
    good.set()
    again = list(penstock.map(picky, range(5), name="picky", retry_failed=True, **where))
    assert [result.state for result in again][3] == "completed"


def test_a_map_pauses_where_nothing_succeeds_and_goes_on(where: dict[str, Any]) -> None:
    calls: Counter[int] = Counter()
    token = threading.Event()

    def pay(n: int) -> int:
        calls[n] += 1
        if not token.is_set():
            raise penstock.Fail("wrong token")
        return n

    where["settings"] = QUICK | {"concurrency": 4}
    with pytest.raises(
        penstock.PenstockError, match=r"was paused: nothing has succeeded yet, .* wrong token"
    ) as paused:
        list(penstock.map(pay, range(1_000), name="paid", **where))
    assert "the same name goes on" in str(paused.value.hint)
    assert calls.total() < 1_000, "what was in hand is called, and no more"
    token.set()
    assert [result.value for result in penstock.map(pay, range(1_000), name="paid", **where)] == list(range(1_000))


def test_as_they_come_none_waits_for_a_slow_one(where: dict[str, Any]) -> None:
    first = threading.Event()

    def slow_first(n: int) -> int:
        if n == 0:
            first.wait(60)
        return n

    found = []
    for result in penstock.map(slow_first, range(50), name="slow", ordered=False, concurrency=4, **where):
        found.append(result.value)
        if len(found) == 49:
            first.set()
    assert found[-1] == 0
    assert sorted(found) == list(range(50))


def test_async_functions_and_async_for(where: dict[str, Any]) -> None:
    async def later(n: int) -> int:
        await asyncio.sleep(0)
        return n + 1

    async def collect(**options: Any) -> list[Any]:
        return [result.value async for result in penstock.map(later, range(100), name="later", **options, **where)]

    assert asyncio.run(collect()) == list(range(1, 101))
    assert sorted(asyncio.run(collect(ordered=False))) == list(range(1, 101))
    assert [r.value for r in penstock.map(later, range(100), name="later", **where)] == list(range(1, 101))


def test_leaving_early_goes_on_later(where: dict[str, Any]) -> None:
    calls: Counter[int] = Counter()

    def counted(n: int) -> int:
        calls[n] += 1
        return n

    for result in penstock.map(counted, range(2_000), name="early", **where):
        if result.index == 10:
            break
    assert [result.value for result in penstock.map(counted, range(2_000), name="early", **where)] == [*range(2_000)]
    assert set(calls.values()) == {1}


def test_classes_chunks_and_items(where: dict[str, Any]) -> None:
    made = []

    class Loaded:
        def setup(self) -> None:
            made.append(self)

        def __call__(self, n: int) -> int:
            return n + len(made)

    @penstock.chunk(10)
    def sums(rows: list[int]) -> list[int]:
        return [sum(rows) for _ in rows]

    def attempts(item: penstock.Item) -> list[int]:
        return [item.attempt, item.body]

    assert [result.value for result in penstock.map(Loaded, range(9), name="class", **where)] == list(range(1, 10))
    assert len(made) == 1
    assert {result.ok for result in penstock.map(sums, range(30), name="chunks", **where)} == {True}
    assert [result.value for result in penstock.map(attempts, [7], name="items", **where)] == [[1, 7]]


def test_in_several_processes(where: dict[str, Any]) -> None:
    results = penstock.map(operator.neg, range(200), name="negated", workers=2, **where)
    assert [result.value for result in results] == [-n for n in range(200)]


def test_no_rows_and_wrong_rows(where: dict[str, Any]) -> None:
    assert list(penstock.map(square, [], name="none", **where)) == []
    for rows, said in [([{"n": float("nan")}], "row 0 .* nan"), ([1, object()], "row 1"), ("text", "rows is str")]:
        with pytest.raises(penstock.UsageError, match=said):
            list(penstock.map(square, rows, name="wrong", **where))
    for name, said in [("", "the name is empty"), ("n" * 201, "the name has 201 "), ("a\n", r"the name 'a\\n' has")]:
        with pytest.raises(penstock.UsageError, match=said):
            penstock.map(square, [1], name=name, **where)
    with pytest.raises(penstock.UsageError, match=r"'<lambda>\(a, b\)' cannot be called with a row: missing"):
        penstock.map(lambda a, b: (a, b), [1], name="two", **where)
    with pytest.raises(penstock.UsageError, match="cannot import"):
        list(penstock.map(lambda n: n, [1], name="lambda", workers=2, **where))


_SCRIPT = """
import os, sys
from pathlib import Path
import penstock

def work(n):
    with open("calls", "a") as calls:
        calls.write(f"{n}\\n")
    return n * 2

if __name__ == "__main__":
    total = 0
    for result in penstock.map(work, range(int(sys.argv[1])), name="doubles"):
        assert result.value == result.index * 2
        total += 1
    print(total)
"""


def test_killed_twice_every_result_is_there_once(tmp_path: Path, prepared: Prepared) -> None:
    prepared(tmp_path / ".penstock")
    rows = 4_000
    # Calls of later rows last for ever where the script is to be killed, so that it is not over before.
    held = _SCRIPT.replace(
        "    return n * 2", "    while n >= int(sys.argv[2]):\n        time.sleep(0.1)\n    return n * 2"
    ).replace("import os, sys\n", "import os, sys, time\n")
    (tmp_path / "script.py").write_text(held, "utf-8")
    command = [sys.executable, "script.py", str(rows)]
    calls = tmp_path / "calls"
    for kill_at in (500, 1_500):
        with subprocess.Popen([*command, str(2 * kill_at)], cwd=tmp_path, env=environment()) as process:
            wait_until(lambda: calls.exists() and len(calls.read_bytes().split()) > kill_at, 60)  # noqa: B023
            assert process.poll() is None
            os.kill(process.pid, signal.SIGKILL)
    command.append(str(rows))
    ended = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, timeout=90, check=False)
    assert (ended.returncode, ended.stdout.strip()) == (0, str(rows).encode()), ended.stderr.decode()
    counted = Counter(calls.read_text().split())
    assert set(counted) == {str(n) for n in range(rows)}
    # What was called when it was killed is called again; nothing else is.
    assert sum(counted.values()) - rows < rows // 2


def test_an_interrupt_lets_calls_end_and_the_next_start_goes_on(tmp_path: Path, prepared: Prepared) -> None:
    prepared(tmp_path / ".penstock")
    rows = 1_000
    # Tests that a shell runs in the background ignore interrupts, and so would the script: it asks for them. Calls in
    # the middle last until the interrupt has been sent, so that it never comes too late.
    slow = _SCRIPT.replace(
        "    return n * 2",
        "    while n >= 100 and not os.path.exists('interrupted'):\n        time.sleep(0.01)\n    time.sleep(0.05)\n"
        "    return n * 2",
    ).replace(
        "import penstock\n",
        "import signal, time\nimport penstock\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n",
    )
    (tmp_path / "script.py").write_text(slow, "utf-8")
    command, calls = [sys.executable, "script.py", str(rows)], tmp_path / "calls"
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE) as process:
        wait_until(lambda: calls.exists() and len(calls.read_bytes().split()) > 20, 60)
        process.send_signal(signal.SIGINT)
        (tmp_path / "interrupted").touch()
        _, said = process.communicate(timeout=60)
    assert process.returncode != 0
    assert len(calls.read_bytes().split()) < rows
    assert said.rstrip().endswith(b"KeyboardInterrupt")
    ended = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, timeout=90, check=False)
    assert (ended.returncode, ended.stdout.strip()) == (0, str(rows).encode()), ended.stderr.decode()
    assert set(Counter(calls.read_text().split()).values()) == {1}


def test_commands_say_which_program_goes_on_with_a_map(where: dict[str, Any], tmp_path: Path) -> None:
    def work(n: int) -> int:
        if n == 2:
            raise penstock.Fail("hopeless")
        return n

    list(penstock.map(work, [1, 2], name="left alone", **where))
    database = ("--database-url", where["database_url"])
    (batch,) = run_cli("ls", "--json", *database, cwd=tmp_path).expect(0).summary["data"]
    retried = run_cli("retry", batch["id"], *database, cwd=tmp_path).expect(0)
    assert "the program with `penstock.map(name='left alone')` that began it goes on with it." in retried.stderr

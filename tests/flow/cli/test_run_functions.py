"""`penstock run --processor`: what a function is given, and what it may do to its process."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.support.cli import Finished, check_answers, read_lines, run_cli


class Place:
    """A folder with a module `rows`, and the command that calls its function `work`."""

    def __init__(self, folder: Path, *where: str) -> None:
        self.folder = folder
        self.where = where
        self.output = folder / "answers.jsonl"

    def run(self, lines: list[object], code: str, *options: str) -> Finished:
        source = self.folder / "rows.jsonl"
        source.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
        (self.folder / "rows.py").write_text(code, "utf-8")
        command = ("run", str(source), "--processor", "rows:work", "-o", str(self.output))
        return run_cli(*command, *self.where, *options, cwd=self.folder)

    @property
    def answers(self) -> dict[str, object]:
        return {line["custom_id"]: line["response"]["body"] for line in read_lines(self.output)}


@pytest.fixture
def place(tmp_path: Path, database_18: str) -> Place:
    return Place(tmp_path, "--database-url", database_18)


_ECHO = "def work(item):\n    return {'got': item.body, 'url': item.url}\n"


def test_any_object_is_an_input_and_its_line_is_its_id(place: Place) -> None:
    lines: list[object] = [
        {"sku": "a"},
        {"custom_id": "mine", "sku": "b"},
        {"custom_id": 7, "sku": "c"},
        {"body": {"sku": "d"}},
        {"custom_id": "asked", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m"}},
        {"body": {"sku": "f"}, "price": 3},
    ]
    place.run(lines, _ECHO).expect(0)
    assert place.answers == {
        "1": {"got": {"sku": "a"}, "url": "/"},
        "mine": {"got": {"custom_id": "mine", "sku": "b"}, "url": "/"},
        "7": {"got": {"custom_id": 7, "sku": "c"}, "url": "/"},
        "4": {"got": {"sku": "d"}, "url": "/"},
        "asked": {"got": {"model": "m"}, "url": "/v1/chat/completions"},
        "6": {"got": {"body": {"sku": "f"}, "price": 3}, "url": "/"},
    }
    bad: list[object] = [{"custom_id": "a"}, {"custom_id": "a"}, 5, {"custom_id": None}]
    place.run(bad, _ECHO).refuses(2, "line 2, custom_id", "line 3: found a number", "line 4, custom_id")


def test_one_poisonous_row_ends_alone_in_one_start(place: Place) -> None:
    code = "import os\ndef work(item):\n    if item.body['n'] == 41:\n        os._exit(9)\n    return item.body['n']\n"
    place.run([{"n": n} for n in range(1, 121)], code).expect(3)
    found = check_answers(place.output, [str(n) for n in range(1, 121)])
    assert [(line["custom_id"], line["error"]["code"]) for line in found.bad] == [("41", "worker_lost")]


_ONCE = """
from pathlib import Path

here = Path(__file__).parent

class work:
    def setup(self):
        (here / "set up").open("a").write("x")
        self.loaded = 7

    def __call__(self, item):
        print("noise")
        return self.loaded * item.body["n"]

    def close(self):
        (here / "closed").open("a").write("x")
"""


def test_set_up_and_tear_down_are_once_per_process_and_prints_are_no_results(place: Place) -> None:
    ended = place.run([{"n": n} for n in range(5)], _ONCE, "--json").expect(0)
    assert ended.summary["completed"] == 5  # so standard output is one JSON object
    assert ended.stderr.count("noise") == 5
    assert [(place.folder / name).read_text() for name in ("set up", "closed")] == ["x", "x"]
    broken = _ONCE.replace("self.loaded = 7", "raise ValueError('no such model')")
    ended = place.run([{"n": n} for n in range(1, 7)], broken).expect(1)
    assert ended.stderr.count("work could not be set up: ValueError: no such model") == 1


_FORK = """
import multiprocessing
import time

fork = multiprocessing.get_context("fork")

def work(item):
    child = fork.Process(target=time.sleep, args=(600,))
    child.start()
    child.terminate()
    child.join()
    return child.exitcode
"""


def test_ending_a_child_of_a_function_does_not_stop_the_run(place: Place) -> None:
    place.run([{"n": n} for n in range(10)], _FORK).expect(0)
    assert set(place.answers.values()) == {-signal.SIGTERM}

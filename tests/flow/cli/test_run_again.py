"""What a second `penstock run` does: go on, run failures again, never pay twice, and stop where nothing succeeds."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest

from penstock.cli.plan import Plan
from penstock.dispatch.target import Target
from tests.support.cli import (
    DEADLINE_S,
    Finished,
    call_count,
    check_answers,
    finish,
    ids_of,
    interrupt,
    read_lines,
    request_line,
    reset,
    run_cli,
    start_cli,
    write_lines,
    write_requests,
)
from tests.support.mock_process import MockProcess, start_mock_process
from tests.support.wait import wait_until


@pytest.fixture(scope="module")
def shared_mock() -> Iterator[MockProcess]:
    with start_mock_process() as mock:
        yield mock


@pytest.fixture
def mock(shared_mock: MockProcess) -> MockProcess:
    reset(shared_mock)
    return shared_mock


class Place:
    """A folder with a file of requests, and a database."""

    def __init__(self, folder: Path, database_url: str) -> None:
        self.folder = folder
        self.source = folder / "requests.jsonl"
        self.output = folder / "answers.jsonl"
        self.where = ("--database-url", database_url)

    def run(self, *options: str | Path, output: str | Path | None = None) -> Finished:
        words = ("run", self.source, "-o", output or self.output, *self.where, *options)
        return run_cli(*words, cwd=self.folder)

    def call(self, *words: str) -> Finished:
        return run_cli(*words, *self.where, cwd=self.folder)


@pytest.fixture
def place(tmp_path: Path, database_18: str) -> Place:
    return Place(tmp_path, database_18)


# -- runs are batches


def test_a_run_is_a_batch_to_every_other_command(place: Place, mock: MockProcess) -> None:
    write_requests(place.source, 5)
    name = place.run("--base-url", mock.base_url, "--json").expect(0).summary["batch"]
    listed = place.call("ls", "--json").expect(0).summary["data"]
    assert [batch["id"] for batch in listed] == [name]
    shown = place.call("show", name[:20], "--json").expect(0).summary
    assert (shown["filename"], shown["target"], shown["endpoint"]) == (
        "requests.jsonl",
        mock.base_url,
        "/v1/chat/completions",
    )
    assert shown["result_bytes"] > 0
    assert "5/5" in place.call("ls").expect(0).stdout
    place.call("watch", name).expect(0)
    place.call("pause", name).refuses(1, "Cannot pause a batch with status 'completed'")
    place.call("export", name, "-o", "again.jsonl").expect(0)
    assert (place.folder / "again.jsonl").read_bytes() == place.output.read_bytes()
    assert name in place.call("rm", name).expect(0).stdout
    assert place.call("ls", "--json").expect(0).summary["data"] == []
    gone = place.call("show", name)
    gone.refuses(1, "`penstock ls` lists what is there")
    assert "key" not in gone.stderr
    assert "server" not in gone.stderr


def test_a_run_over_a_table_is_a_job_to_every_other_command(place: Place) -> None:
    (place.folder / "rows.py").write_text("def work(item):\n    return {'n': 4 // (item.body['a'] - 3)}\n")
    place.source = place.folder / "rows.csv"
    place.source.write_text("a,b\n1,2\n3,4\n")
    work = ("--processor", "rows:work", "--set", "max_attempts=1")
    name = place.run(*work, "--json", output="-").expect(3)
    assert name.stdout.count("\n") == 3, "the sheet alone is on standard output"
    jobs = place.call("ls", "--json").expect(0).summary["jobs"]
    assert [(job["total"], job["state"]) for job in jobs] == [(2, "DONE")]
    for words in (("show",), ("export", "-o", "-")):
        place.call(words[0], jobs[0]["id"], *words[1:]).expect(0)
    place.call("watch", jobs[0]["id"]).expect(3)
    retried = place.call("retry", jobs[0]["id"]).expect(0)
    assert "1 row to run again" in retried.stdout
    assert "the `penstock run` command that began it goes on" in retried.stderr
    (place.folder / "rows.py").write_text("def work(item):\n    return {'n': 5}\n")
    assert "\n3,4,5,DONE,2," in place.run(*work, output="-").expect(0).stdout
    place.call("rm", jobs[0]["id"]).expect(0)
    assert place.call("ls", "--json").expect(0).summary["jobs"] == []


# -- nothing is paid for twice


def test_another_port_output_key_and_concurrency_are_the_same_run(place: Place, mock: MockProcess) -> None:
    write_requests(place.source, 20)
    first = place.run("--base-url", mock.base_url, "--json").expect(0).summary["batch"]
    with start_mock_process() as moved:
        url = moved.base_url.replace("127.0.0.1", "localhost")
        other = place.folder / "other.jsonl"
        again = place.run("--base-url", url, "--concurrency", "3", "--json", output=other).expect(0)
        assert again.summary["batch"] == first
        assert call_count(moved) == 0
        told = place.run("--base-url", url, output=other).expect(0)
        assert f"they are the answers of {mock.base_url}; --new asks {url}" in told.stderr
    assert other.read_bytes() == place.output.read_bytes()
    (place.folder / "copy.jsonl").write_bytes(place.source.read_bytes())
    place.source = place.folder / "copy.jsonl"
    assert place.run("--base-url", mock.base_url, "--json").expect(0).summary["batch"] == first
    assert call_count(mock) == 20


def test_a_run_that_an_earlier_release_stored_goes_on(place: Place, mock: MockProcess, database_18: str) -> None:
    write_requests(place.source, 3)
    first = place.run("--base-url", mock.base_url, "--json").expect(0).summary["batch"]
    former = Plan(place.source, place.output, Target(mock.base_url)).former_key
    with psycopg.connect(database_18, autocommit=True) as connection:
        connection.execute("UPDATE penstock.batches SET idempotency_key = %s", [former])
    assert place.run("--base-url", mock.base_url, "--json").expect(0).summary["batch"] == first
    assert call_count(mock) == 3


def test_the_command_after_an_interrupt_really_goes_on(place: Place) -> None:
    """It leaves out --new, which would start over; results so far can be had at once."""
    write_requests(place.source, 60)
    with start_mock_process("--latency", "50ms") as mock:
        words = ("--base-url", mock.base_url, "--new", "--concurrency", "4", "--partial", *place.where)
        with start_cli("run", place.source, "-o", place.output, *words, cwd=place.folder) as process:
            wait_until(lambda: call_count(mock) > 10, DEADLINE_S)
            interrupt(process)
            stopped = finish(process).expect(130)
        lines = stopped.stdout.splitlines()
        command = shlex.split(lines[lines.index("To go on:") + 1])
        assert command[:2] == ["penstock", "run"]
        assert "--new" not in command
        so_far = len(read_lines(place.output))
        assert 0 < so_far < 60
        ended = run_cli(*command[1:], cwd=place.folder).expect(0)
        assert "going on with" in ended.stderr
        assert call_count(mock) == 60
    check_answers(place.output, ids_of(60))


_FLAGGED = """
from pathlib import Path
from penstock import Fail

def work(item):
    print("a word of the function")
    if item.body["messages"][0]["content"].endswith("2") and not Path("mended").exists():
        raise Fail("not mended")
    return {}
"""


def test_failures_alone_are_run_again(place: Place) -> None:
    write_requests(place.source, 12)
    (place.folder / "rows.py").write_text(_FLAGGED)
    first = place.run("--processor", "rows:work").expect(3)
    assert "--retry-failed" in first.stdout
    assert "a word" not in first.stdout
    assert "a word" in first.stderr
    assert "--retry-failed runs the 2 that failed again" in place.run("--processor", "rows:work").expect(3).stderr
    (place.folder / "mended").touch()
    again = place.run("--processor", "rows:work", "--retry-failed")
    again.expect(0)
    assert again.stderr.count("a word of the function") == 2
    assert "(12 lines)" in again.stdout
    with pytest.raises(FileNotFoundError):
        read_lines(place.folder / "answers.errors.jsonl")
    place.run("--processor", "rows:work", "--retry-failed", "--new").refuses(2, "--new and --retry-failed at once")


def test_a_file_that_grew_is_offered_as_a_continuation(place: Place, mock: MockProcess) -> None:
    write_requests(place.source, 10)
    place.run("--base-url", mock.base_url).expect(0)
    with place.source.open("a") as file:
        file.write("".join(f"{line}\n" for line in _lines(11, 14)))
    place.run("--base-url", mock.base_url).refuses(2, "has grown", "--continue")
    assert call_count(mock) == 10
    both = place.run("--base-url", mock.base_url, "--continue").expect(0)
    assert "14 requests, 14 completed" in both.stdout
    assert call_count(mock) == 14
    answers = check_answers(place.output, ids_of(14))
    assert answers.good[10]["id"].endswith("_11"), "lines keep their numbers"
    place.output.unlink()
    place.run("--base-url", mock.base_url).expect(0)
    check_answers(place.output, ids_of(14))
    with place.source.open("a") as file:
        file.write("{bad\n")
    place.run("--base-url", mock.base_url, "--continue").refuses(2, "line 15")
    assert call_count(mock) == 14


def _lines(first: int, last: int) -> list[str]:
    return [json.dumps(request_line(f"r-{n}", f"question {n}")) for n in range(first, last + 1)]


def test_a_deadline_counts_for_a_run_that_goes_on(place: Place) -> None:
    write_requests(place.source, 6)
    with start_mock_process("--rate-limit", "1/m") as mock:
        words = ("run", place.source, "-o", place.output, "--base-url", mock.base_url, *place.where)
        with start_cli(*words, cwd=place.folder) as process:
            wait_until(lambda: call_count(mock) > 1, DEADLINE_S)
            interrupt(process)
            finish(process).expect(130)
        assert place.run("--base-url", mock.base_url, "--deadline", "1s", "--json").expect(3).summary["expired"] == 5


# -- standard output


def test_answers_alone_go_to_standard_output(place: Place, mock: MockProcess) -> None:
    write_requests(place.source, 4)
    ended = place.run("--base-url", mock.base_url, output="-").expect(0)
    assert ended.stdout.count("\n") == 4
    assert ended.stdout.startswith('{"id":"batch_req_')
    assert "4 requests, 4 completed" in ended.stderr


def test_one_line_and_what_was_skipped(place: Place) -> None:
    write_requests(place.source, 2)
    code = "from penstock import Skip\ndef work(item):\n    if item.line == 1:\n        raise Skip\n    return {}\n"
    (place.folder / "rows.py").write_text(code)
    ended = place.run("--processor", "rows:work").expect(0)
    assert "(1 line)" in ended.stdout
    assert "  skipped " in ended.stdout
    assert "errors  " not in ended.stdout
    name = ended.stdout.split("batch   ")[1].split()[0]
    assert "1 skipped" in place.call("show", name).expect(0).stdout
    place.call("watch", name).expect(0)


# -- stop before money burns


_REASONED = """
import penstock

KINDS = [code for code in range(1, 7) for _ in range(code)]

def work(item):
    code = KINDS[int(item.custom_id[2:]) - 1]
    raise penstock.Fail("long " * 200, code=f"e{code}")
"""


def test_a_stream_is_refused(place: Place, mock: MockProcess) -> None:
    line = request_line("a", "hello")
    line["body"]["stream"] = True
    write_lines(place.source, [line])
    place.run("--base-url", mock.base_url).refuses(2, "line 1, body.stream")
    assert call_count(mock) == 0


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.again)])
def test_a_run_pauses_where_nothing_succeeds(place: Place, mock: MockProcess, workers: int) -> None:
    """A wrong path: a few dozen calls, not all. With the right one, the same run goes on, those failures included."""
    write_requests(place.source, 1_000)
    wrong = mock.base_url.replace("/v1", "/wrong")
    stopped = place.run("--base-url", wrong, "--workers", str(workers)).expect(4)
    assert "nothing has succeeded yet" in stopped.stderr
    assert "(check --base-url and the model's name): HTTP 404" in stopped.stderr
    assert "×" not in stopped.stdout, "what the reason of the pause says is not said twice"
    assert call_count(mock) < 500
    ended = place.run("--base-url", mock.base_url).expect(0)
    assert "1,000 requests, 1,000 completed" in ended.stdout
    assert f"begun with {wrong}" in ended.stderr
    check_answers(place.output, ids_of(1_000))


def test_whoever_wants_to_go_on_can(place: Place) -> None:
    write_requests(place.source, 60)
    with start_mock_process("--reject-rate", "100%") as mock:
        go_on = ("--base-url", mock.base_url, "--set", "stop_after_failures=0")
        ended = place.run(*go_on, "--json").expect(3)
        assert ended.summary["failed"] == 60
        (kind,) = ended.summary["failures"]
        assert kind["count"] == 60
        assert kind["reason"].startswith("HTTP 400: ")
        assert f"  reason  60 × {kind['reason']}\n" in place.run(*go_on).expect(3).stdout


def test_the_most_frequent_reasons_are_told(place: Place) -> None:
    write_requests(place.source, 21)
    (place.folder / "rows.py").write_text(_REASONED)
    ended = place.run("--processor", "rows:work").expect(3)
    told = [line for line in ended.stdout.splitlines() if line.startswith("  reason  ")]
    assert [line.partition(":")[0] for line in told] == ["  reason  6 × e6", "  reason  5 × e5", "  reason  4 × e4"]
    assert all(len(line) < 250 for line in told)


# -- disk


def test_ended_runs_are_removed_after_their_time(place: Place, mock: MockProcess, database_18: str) -> None:
    write_requests(place.source, 2)
    place.run("--base-url", mock.base_url).expect(0)
    assert "nothing ended so long ago" in place.call("prune", "--older-than", "1d").expect(0).stderr
    with psycopg.connect(database_18, autocommit=True) as connection:
        connection.execute("UPDATE penstock.batches SET completed_at = completed_at - %s", [timedelta(days=2)])
        would = place.call("prune", "--older-than", "1d", "--dry-run", "--json").expect(0).summary["would_remove"]
        assert len(would) == 1
        assert place.call("prune", "--older-than", "1d", "--json").expect(0).summary["removed"] == would
        for table in ("batches", "templates", "outcomes", "files"):
            assert connection.execute(f"SELECT count(*) FROM penstock.{table}").fetchone() == (0,), table
    place.call("prune", "--older-than", "soon").refuses(2, "not a time span")

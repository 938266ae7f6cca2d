"""`penstock run`, whole: the real command line, real sockets, real PostgreSQL."""

from __future__ import annotations

import gzip
import json
import os
import pty
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import psycopg
import pytest
import zstandard
from psycopg.conninfo import make_conninfo

from tests.support.certificates import authority, local_tls
from tests.support.cli import (
    PENSTOCK,
    Finished,
    answer_text,
    call_count,
    calls_by_key,
    check_answers,
    environment,
    finish,
    ids_of,
    interrupt,
    read_lines,
    request_line,
    reset,
    run_cli,
    start_cli,
    worker_pids,
    write_lines,
    write_requests,
)
from tests.support.forward_proxy import ForwardProxy
from tests.support.hostile import Upstream
from tests.support.mock_process import MockProcess, start_mock_process
from tests.support.tcp_server import LoopThread
from tests.support.wait import wait_until


@pytest.fixture(scope="module")
def shared_mock() -> Iterator[MockProcess]:
    with start_mock_process() as mock:
        yield mock


@pytest.fixture
def mock(shared_mock: MockProcess) -> MockProcess:
    """An upstream that answers at once, with its counts at zero."""
    reset(shared_mock)
    return shared_mock


class Place:
    """A working directory with a database, and the one command that most tests repeat."""

    def __init__(self, directory: Path, database_url: str) -> None:
        self.directory = directory
        self.output = directory / "answers.jsonl"
        self.errors = directory / "answers.errors.jsonl"
        self.database_url = database_url

    def run(self, source: Path, *options: str | Path) -> Finished:
        where = ("--database-url", self.database_url)
        return run_cli("run", source, "-o", self.output, *where, *options, cwd=self.directory)

    def process(self, source: Path, code: str, *options: str) -> Finished:
        """Run the function `work` of a module with this text."""
        (self.directory / "rows.py").write_text(code, "utf-8")
        return self.run(source, "--processor", "rows:work", *options)


@pytest.fixture
def place(tmp_path: Path, database_18: str) -> Place:
    return Place(tmp_path, database_18)


# -- against an endpoint


def test_works_with_nothing_configured(tmp_path: Path, mock: MockProcess) -> None:
    write_requests(tmp_path / "requests.jsonl", 700, models=("small", "large"))
    ended = run_cli("run", "requests.jsonl", "--base-url", mock.base_url, "-o", "answers.jsonl", cwd=tmp_path).expect(0)
    answers = check_answers(tmp_path / "answers.jsonl", ids_of(700))
    for number, line in enumerate(answers.good, 1):
        assert answer_text(line).startswith(f"echo: question {number} [")
        assert line["response"]["body"]["model"] == ("small", "large")[number % 2]
    assert not answers.bad
    assert not (tmp_path / "answers.errors.jsonl").exists()
    assert (tmp_path / ".penstock").is_dir()
    assert "700 requests, 700 completed" in ended.stdout
    assert "answers.jsonl  (700 lines)" in ended.stdout
    assert call_count(mock) == 700


@pytest.fixture
def empty_database(server: str) -> Iterator[str]:
    """A database without the schema, on each kind of server."""
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute("CREATE DATABASE empty")
        yield make_conninfo(server, dbname="empty")
        connection.execute("DROP DATABASE empty WITH (FORCE)")


def test_works_on_each_kind_of_server(tmp_path: Path, empty_database: str, mock: MockProcess) -> None:
    place = Place(tmp_path, empty_database)
    source = write_requests(tmp_path / "requests.jsonl", 300, models=("a", "b", "c"))
    place.run(source, "--base-url", mock.base_url).expect(0)
    check_answers(place.output, ids_of(300))
    before = place.output.read_bytes()
    place.run(source, "--base-url", mock.base_url).expect(0)
    assert place.output.read_bytes() == before
    assert call_count(mock) == 300
    assert not (tmp_path / ".penstock").exists()


def test_the_same_command_goes_on_or_writes_again_or_starts_over(place: Place, mock: MockProcess) -> None:
    source = write_requests(place.directory / "requests.jsonl", 20)
    first = place.run(source, "--base-url", mock.base_url, "--json").expect(0)
    written = place.output.read_bytes()

    os.utime(source, (1, 1))  # touched, and the same
    place.output.unlink()
    again = place.run(source, "--base-url", mock.base_url).expect(0)
    assert "writing its results again" in again.stderr
    assert place.output.read_bytes() == written
    assert call_count(mock) == 20

    anew = place.run(source, "--base-url", mock.base_url, "--json", "--new").expect(0)
    assert anew.summary["batch"] != first.summary["batch"]
    assert call_count(mock) == 40

    write_requests(source, 30, ("large",))
    changed = place.run(source, "--base-url", mock.base_url).expect(0)
    assert f"has changed since {anew.summary['batch']}" in changed.stderr
    check_answers(place.output, ids_of(30))
    assert call_count(mock) == 70


def test_the_summary_tells_everything_as_json(place: Place, mock: MockProcess) -> None:
    source = write_requests(place.directory / "requests.jsonl", 20)
    ended = place.run(source, "--base-url", mock.base_url, "--json").expect(0)
    assert ended.stderr == ""
    summary = ended.summary
    assert summary.pop("batch").startswith("batch_")
    assert summary.pop("seconds") > 0
    none = dict.fromkeys(
        ("failed", "not_found", "skipped", "cancelled", "expired", "in_flight", "pending", "retried"), 0
    )
    assert summary == {
        "state": "completed",
        "total": 20,
        "completed": 20,
        **none,
        "output": str(place.output),
        "errors": None,
        "reasons": [],
        "failures": [],
        "exit_code": 0,
    }


def test_refused_inputs_go_to_the_error_file(place: Place) -> None:
    source = write_requests(place.directory / "requests.jsonl", 200)
    with start_mock_process("--reject-rate", "10%") as mock:
        ended = place.run(source, "--base-url", mock.base_url, "--json").expect(3)
    answers = check_answers(place.output, ids_of(200))
    assert answers.bad
    for line in answers.bad:
        assert line["response"]["status_code"] == 400
        assert line["response"]["body"]["error"]["message"]
        assert line["error"] is None
    assert ended.summary["failed"] == len(answers.bad)
    assert ended.summary["completed"] == len(answers.good)
    assert ended.summary["errors"] == str(place.errors)
    assert ended.summary["exit_code"] == 3


def test_the_error_file_goes_when_no_failure_is_left(place: Place, mock: MockProcess) -> None:
    place.errors.write_text("what an earlier run left\n")
    source = write_requests(place.directory / "requests.jsonl", 5)
    place.run(source, "--base-url", mock.base_url).expect(0)
    assert not place.errors.exists()


def test_over_tls_and_through_a_proxy(place: Place) -> None:
    source = write_requests(place.directory / "requests.jsonl", 20)
    with (
        LoopThread("upstream") as thread,
        thread.entered(Upstream(tls=local_tls())) as upstream,
        thread.entered(ForwardProxy()) as proxy,
    ):
        options = ("--base-url", upstream.base_url, "--proxy", f"http://{proxy.authority}", "--concurrency", "4")
        place.run(source, *options).refuses(1, "cannot be called: certificate refused", "--ca-file")
        place.run(source, *options, "--ca-file", authority().file, "--workers", "2").expect(0)
        assert len([request for request in upstream.received if request.method == "POST"]) == 20
        assert {head.partition(":")[0] for head in proxy.heads} == {"CONNECT 127.0.0.1"}
    check_answers(place.output, ids_of(20))


def test_passing_errors_are_retried_and_counted(place: Place) -> None:
    source = write_requests(place.directory / "requests.jsonl", 300)
    quick = ("--set", "retry_base_s=0.01", "--set", "max_attempts=20")
    with start_mock_process("--error-rate", "10%", "--drop-rate", "5%", "--rate-limit", "500/s") as mock:
        ended = place.run(source, "--base-url", mock.base_url, "--json", *quick).expect(0)
        calls = sum(record["calls"] for record in calls_by_key(mock).values())
    check_answers(place.output, ids_of(300))
    assert ended.summary["retried"] == calls - 300 > 0


def test_a_deadline_ends_what_is_never_admitted(place: Place) -> None:
    source = write_requests(place.directory / "requests.jsonl", 10)
    with start_mock_process("--rate-limit", "1/m") as mock:
        ended = place.run(source, "--base-url", mock.base_url, "--deadline", "6s", "--json").expect(3)
    assert (ended.summary["completed"], ended.summary["expired"], ended.summary["state"]) == (1, 9, "expired")
    reasons = [json.loads(line)["error"]["code"] for line in place.errors.read_text("utf-8").splitlines()]
    assert reasons == ["batch_expired"] * 9


def test_starting_over_cancels_what_was_begun(place: Place) -> None:
    source = write_requests(place.directory / "requests.jsonl", 10)
    with start_mock_process("--require-key", "secret") as mock:
        first = place.run(source, "--base-url", mock.base_url, "--json").expect(4).summary["batch"]
        second = place.run(source, "--base-url", mock.base_url, "--json", "--new").expect(4).summary["batch"]
    with psycopg.connect(place.database_url) as connection:
        rows = connection.execute(
            "SELECT 'batch_' || replace(id::text, '-', ''), state FROM penstock.batches"
        ).fetchall()
    assert dict(rows) == {first: "cancelled", second: "in_progress"}


@pytest.mark.again
def test_several_worker_processes(place: Place) -> None:
    source = write_requests(place.directory / "requests.jsonl", 2_000, models=("a", "b"))
    with start_mock_process("--latency", "5ms") as mock:
        options = ("--base-url", mock.base_url, "--workers", "3", "--database-url", place.database_url)
        with start_cli("run", source, "-o", place.output, *options, cwd=place.directory) as process:
            wait_until(lambda: len(worker_pids(process)) == 3, 30)
            finish(process).expect(0)
        calls = calls_by_key(mock)
    check_answers(place.output, ids_of(2_000))
    assert len(calls) == 2_000
    assert {record["calls"] for record in calls.values()} == {1}


@pytest.mark.parametrize(
    ("name", "pack"), [("requests.jsonl.gz", gzip.compress), ("requests.jsonl.zst", zstandard.compress)]
)
def test_compressed_inputs(place: Place, mock: MockProcess, name: str, pack: Callable[[bytes], bytes]) -> None:
    plain = write_requests(place.directory / "requests.jsonl", 100).read_bytes()
    source = place.directory / name
    source.write_bytes(pack(plain))
    place.run(source, "--base-url", mock.base_url).expect(0)
    check_answers(place.output, ids_of(100))


def test_blank_lines_and_a_byte_order_mark_are_no_requests(place: Place, mock: MockProcess) -> None:
    source = write_requests(place.directory / "requests.jsonl", 3)
    source.write_bytes(b"\xef\xbb\xbf" + source.read_bytes().replace(b"\n", b"\r\n\n"))
    place.run(source, "--base-url", mock.base_url).expect(0)
    check_answers(place.output, ids_of(3))


def test_a_linked_output_replaces_what_the_link_points_at(place: Place, mock: MockProcess) -> None:
    source = write_requests(place.directory / os.fsdecode(b"requests \xff \xe2\x80\xa8 'quoted'.jsonl"), 3)
    real = place.directory / os.fsdecode(b"names need not be text \xfe") / "real.jsonl"
    real.parent.mkdir()
    place.output.symlink_to(real)
    place.run(source, "--base-url", mock.base_url).expect(0)
    assert place.output.is_symlink()
    check_answers(real, ids_of(3))
    plain = place.directory / "plain"
    plain.touch()
    assert stat.S_IMODE(real.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_verbose_logs_to_standard_error(place: Place) -> None:
    source = write_requests(place.directory / "requests.jsonl", 3)
    with start_mock_process("--require-key", "right-and-long") as mock:
        ended = place.run(source, "--base-url", mock.base_url, "-v").expect(4)
    assert "ERROR" in ended.stderr
    assert "route small is halted" in ended.stderr


def test_the_display_says_that_calls_wait_for_the_rate(place: Place, mock: MockProcess) -> None:
    source = write_requests(place.directory / "requests.jsonl", 20)
    command = ("run", source, "--base-url", mock.base_url, "-o", place.output, "--database-url", place.database_url)
    with start_cli(*command, "--rpm", "6", cwd=place.directory) as process:
        assert process.stderr is not None
        shown = next(line for line in process.stderr if line.startswith(b"calling"))
        interrupt(process)
        finish(process).expect(130)
    assert shown.endswith(b"  0 in flight  paced at 6 calls/min\n")
    assert call_count(mock) < 10  # from the first call on, not from when processes have shared the rate out


def test_a_terminal_gets_a_bar(place: Place) -> None:
    source = write_requests(place.directory / "requests.jsonl", 400)
    with start_mock_process("--latency", "50ms") as mock:
        command = ("run", source, "--base-url", mock.base_url, "-o", place.output, "--database-url", place.database_url)
        shown, code = _on_a_terminal(*command, "--concurrency", "16", cwd=place.directory)
    assert code == 0
    assert "calling" in shown
    assert "━" in shown
    check_answers(place.output, ids_of(400))


def _on_a_terminal(*args: str | Path, cwd: Path) -> tuple[str, int]:
    ours, theirs = pty.openpty()
    env = environment({"TERM": "xterm-256color", "COLUMNS": "120"})
    with subprocess.Popen(
        [*PENSTOCK, *map(str, args)], cwd=cwd, env=env, stdout=subprocess.DEVNULL, stderr=theirs
    ) as process:
        os.close(theirs)
        shown = b""
        try:
            while chunk := os.read(ours, 65_536):
                shown += chunk
        except OSError:
            pass  # Linux's way to say that the other side is closed
        finally:
            os.close(ours)
        return shown.decode(), process.wait(30)


# -- answers that are awkward to store or to write in a line

_ODD = {
    "pretty": b'{\r\n  "a": [1,\n 2.50]\n}\n',
    "separators": '{"a": "x\u2028y\u2029z\u0085", "b": "é😀"}'.encode(),
    "escapes": b'{"a": "\\u2028 \\n \\u0000 \\ud83d"}',
    "scalar": b'"just text"',
    "numbers": b'{"a": 1e400, "b": 12345678901234567890123, "a": 1}',
}
_BROKEN = {"html": b"<html>no</html>", "nothing": b"", "cut": b'{"a": ', "latin": b'{"a": "\xe9"}', "two": b"{} {}"}


@contextmanager
def answering(answer: Callable[[dict[str, Any]], bytes]) -> Iterator[str]:
    """An endpoint that answers 200 with these bytes, as a function of the request's body; yields its base URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(b"{}")

        def do_POST(self) -> None:
            self._send(answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

        def _send(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        finally:
            server.shutdown()


def test_awkward_answers_stay_one_line_each(place: Place) -> None:
    answers = {**_ODD, **_BROKEN}
    source = write_lines(place.directory / "odd.jsonl", (request_line(name, name) for name in answers))
    with answering(lambda body: answers[body["messages"][0]["content"]]) as base_url:
        quick = ("--set", "retry_base_s=0.01", "--set", "max_attempts=2")
        place.run(source, "--base-url", base_url, *quick).expect(3)
    found = check_answers(place.output, list(answers))
    assert [line["custom_id"] for line in found.good] == list(_ODD)
    for line in found.good:
        assert line["response"]["body"] == json.loads(_ODD[line["custom_id"]])
    assert [line["custom_id"] for line in found.bad] == list(_BROKEN)
    for line in found.bad:
        assert line["error"]["code"] == "invalid_response"
    for path in (place.output, place.errors):
        text = path.read_text("utf-8")
        assert text.splitlines() == text.split("\n")[:-1], "a reader could see more lines than there are"


# -- against a Python function

_SIGNALS = """
from penstock import Fail, Item, NotFound, Retry, Skip

def work(item: Item):
    what = item.body["messages"][0]["content"]
    if what == "retry" and item.attempt < 3:
        raise Retry("not yet", after=0.01)
    if what == "fail":
        raise Fail("this one is hopeless", code="hopeless")
    if what == "not found":
        raise NotFound("nobody knows")
    if what == "skip":
        raise Skip("not needed")
    if what == "crash":
        raise KeyError("oops")
    if what == "unserialisable":
        return object()
    return {"attempt": item.attempt, "line": item.line}
"""


def test_a_processor_can_say_more_than_done(place: Place) -> None:
    asked = ["done", "retry", "fail", "not found", "skip", "crash", "unserialisable"]
    source = write_lines(place.directory / "rows.jsonl", (request_line(what, what) for what in asked))
    quick = ("--set", "retry_base_s=0.01", "--set", "max_attempts=4", "--set", "max_attempts_not_found=2")
    ended = place.process(source, _SIGNALS, "--json", *quick).expect(3)
    found = check_answers(place.output, asked)
    bodies = {line["custom_id"]: line["response"]["body"] for line in found.good}
    assert bodies == {"done": {"attempt": 1, "line": 1}, "retry": {"attempt": 3, "line": 2}}
    errors = {line["custom_id"]: (line["error"]["code"], line["error"]["message"]) for line in found.bad}
    assert errors["fail"] == ("hopeless", "this one is hopeless")
    assert errors["not found"] == ("not_found", "nobody knows")
    assert errors["skip"] == ("skipped", "not needed")
    assert errors["crash"][0] == "processor_error"
    assert "KeyError: 'oops' (rows.py, line 15: raise KeyError(" in errors["crash"][1]
    assert errors["unserialisable"][0] == "invalid_response"
    summary = ended.summary
    assert [summary[name] for name in ("completed", "failed", "not_found", "skipped")] == [2, 3, 1, 1]
    assert summary["retried"] == 2 + 1 + 3


_ASYNC = """
import asyncio

async def work(item):
    await asyncio.sleep(0)
    return {"said": item.body["messages"][0]["content"]}
"""

_CHUNK = """
from penstock import Fail, chunk

@chunk(7)
def work(items):
    assert 1 <= len(items) <= 7
    return [Fail("odd") if item.line == 5 else {"said": item.body["messages"][0]["content"]} for item in items]
"""

_ASYNC_CHUNK = """
from penstock import Item

async def work(items: list[Item]):
    return [{"said": item.body["messages"][0]["content"]} for item in items]
"""


@pytest.mark.parametrize(("code", "failed"), [(_ASYNC, 0), (_CHUNK, 1), (_ASYNC_CHUNK, 0)])
def test_async_and_chunk_processors(place: Place, code: str, failed: int) -> None:
    source = write_requests(place.directory / "rows.jsonl", 300, models=("a", "b"))
    place.process(source, code).expect(3 if failed else 0)
    found = check_answers(place.output, ids_of(300))
    assert len(found.bad) == failed
    for line in found.good:
        assert line["response"]["body"] == {"said": f"question {line['custom_id'][2:]}"}


_TOGETHER = """
import os
import time
from pathlib import Path

here = Path(__file__).parent / "at work"

def work(item):
    here.mkdir(exist_ok=True)
    (here / str(os.getpid())).touch()
    end = time.monotonic() + 60
    while len(list(here.iterdir())) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    return os.getpid()
"""


def test_a_processor_in_several_processes(place: Place) -> None:
    source = write_requests(place.directory / "rows.jsonl", 300)
    place.process(source, _TOGETHER, "--workers", "2", "--concurrency", "2").expect(0)
    found = check_answers(place.output, ids_of(300))
    assert len({line["response"]["body"] for line in found.good}) == 2


def test_skipped_rows_are_no_failures(place: Place) -> None:
    code = "from penstock import Skip\ndef work(item):\n    raise Skip('not today')\n"
    source = write_requests(place.directory / "rows.jsonl", 3)
    place.process(source, code).expect(0)
    assert read_lines(place.output) == []
    assert len(read_lines(place.errors)) == 3

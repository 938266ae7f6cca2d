"""The client commands, whole: the real program, a real `penstock serve`, a mock upstream; and the data itself."""

from __future__ import annotations

import gzip
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
import zstandard
from psycopg.conninfo import make_conninfo

from penstock.db.embedded import postgres
from tests.support.cli import (
    PENSTOCK,
    Finished,
    call_count,
    check_answers,
    environment,
    finish,
    ids_of,
    interrupt,
    read_lines,
    request_line,
    run_cli,
    start_cli,
    write_lines,
    write_requests,
)
from tests.support.mock_process import MockProcess, start_mock_process
from tests.support.prepared import Prepared
from tests.support.processes import Processes
from tests.support.server import ServerProcess, served, start_server
from tests.support.tcp_server import bind
from tests.support.wait import wait_until

_REJECTING = 0.2


@pytest.fixture(scope="module")
def mock() -> Iterator[MockProcess]:
    """An upstream that answers at once, and refuses some inputs."""
    with start_mock_process("--reject-rate", str(_REJECTING)) as process:
        yield process


@pytest.fixture(scope="module")
def database(server_18: str) -> Iterator[str]:
    """One database for the module: its batches do not disturb each other."""
    with psycopg.connect(server_18, autocommit=True) as connection:
        connection.execute("CREATE DATABASE client TEMPLATE template_penstock")
        yield make_conninfo(server_18, dbname="client")
        connection.execute("DROP DATABASE client WITH (FORCE)")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, database: str, mock: MockProcess) -> Iterator[ServerProcess]:
    with served(tmp_path_factory.mktemp("serve"), "--base-url", mock.base_url, database=database) as server:
        yield server


class Desk:
    """A directory, and the commands as one types them there."""

    def __init__(self, directory: Path, *where: str, env: dict[str, str] | None = None) -> None:
        self.directory = directory
        self.where = where
        self.env = env

    def __call__(self, *args: str | Path) -> Finished:
        return run_cli(*args, *self.where, cwd=self.directory, env=self.env)

    def submit(self, *args: str | Path) -> str:
        """The id of a new batch."""
        return self("submit", *args).expect(0).stdout.strip()


@pytest.fixture
def desk(tmp_path: Path, shared: ServerProcess) -> Desk:
    return Desk(tmp_path, "--server", shared.url)


# -- from file to file


def test_a_file_goes_through_and_comes_back(desk: Desk) -> None:
    write_requests(desk.directory / "requests.jsonl", 300)
    submitted = desk("submit", "requests.jsonl", "--metadata", "team=search", "--priority", "3").expect(0)
    name = submitted.stdout.strip()
    assert name.startswith("batch_")
    assert f"penstock watch {name}" in submitted.stderr
    assert f"penstock export {name} -o answers.jsonl" in submitted.stderr
    assert "penstock serve" not in submitted.stderr

    watched = desk("watch", name).expect(3)
    assert "300 requests" in watched.stdout
    assert "failed" in watched.stdout

    exported = desk("export", name, "-o", "answers.jsonl").expect(0)
    answers = check_answers(desk.directory / "answers.jsonl", ids_of(300))
    assert answers.good
    assert answers.bad
    assert f"answers.jsonl  ({len(answers.good)} lines)" in exported.stdout
    assert f"answers.errors.jsonl  ({len(answers.bad)} lines)" in exported.stdout

    shown = desk("show", name).expect(0).stdout
    for words in (
        f"{name}  completed",
        "requests.jsonl  file-",
        "/v1/chat/completions",
        f"300 requests, {len(answers.good)} completed, {len(answers.bad)} failed",
        "tokens",
        "priority   3",
        "team=search",
        "window     24h, until 20",
        f"{answers.bad[0]['custom_id']}: mock_rejected: HTTP 400",
    ):
        assert words in shown, shown

    row = next(line for line in desk("ls").expect(0).stdout.splitlines() if line.startswith(name))
    assert row.split()[1:4] == ["completed", "300/300", str(len(answers.bad))]
    assert row.endswith("requests.jsonl")


@pytest.mark.parametrize("suffix", ["", pytest.param(".gz", marks=pytest.mark.again), ".zst"])
def test_in_one_command(desk: Desk, suffix: str) -> None:
    plain = write_requests(desk.directory / "plain.jsonl", 120)
    source = desk.directory / f"requests.jsonl{suffix}"
    packed: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}
    source.write_bytes(packed[suffix](plain.read_bytes()))
    ended = desk("submit", source, "-o", "answers.jsonl", "--json").expect(3)
    answers = check_answers(desk.directory / "answers.jsonl", ids_of(120))
    told = ended.summary
    assert told["status"] == "completed"
    assert told["exit_code"] == 3
    assert told["request_counts"] == {"total": 120, "completed": len(answers.good), "failed": len(answers.bad)}
    assert told["results"] == {
        "batch": told["id"],
        "complete": True,
        "output": "answers.jsonl",
        "output_lines": len(answers.good),
        "errors": "answers.errors.jsonl",
        "error_lines": len(answers.bad),
    }
    assert ended.stderr == ""


def test_a_file_that_cannot_run(desk: Desk) -> None:
    lines = [request_line("a", "x"), request_line("b", "x"), request_line("a", "x")]
    write_lines(desk.directory / "bad.jsonl", lines)
    ended = desk("submit", "bad.jsonl", "--wait").expect(2)
    assert "line 3: " in ended.stdout
    name = json.loads(desk("ls", "--json", "--status", "failed", "--limit", "1").expect(0).stdout)["data"][0]["id"]
    assert "line 3: " in desk("show", name).expect(0).stdout
    desk("export", name, "-o", "out.jsonl").refuses(2, "could not be run", "line 3", "Correct the file")
    assert not (desk.directory / "out.jsonl").exists()


def test_what_the_server_refuses_leaves_no_file_there(desk: Desk, shared: ServerProcess) -> None:
    write_requests(desk.directory / "refused.jsonl", 1)
    desk("submit", "refused.jsonl", "--endpoint", "/v1/nothing").refuses(2, "endpoint")
    desk("submit", "refused.jsonl", "--window", "soon").refuses(2, "completion_window")
    files = shared.ask("GET", "/v1/files").json["data"]
    assert "refused.jsonl" not in [file["filename"] for file in files]


def test_answers_stand_alone_on_standard_output(desk: Desk) -> None:
    # So many that some are refused, whatever their keys are.
    write_requests(desk.directory / "in.jsonl", 120)
    for options in ([], ["--json"]):
        ended = desk("submit", "in.jsonl", "-o", "-", *options).expect(3)
        lines = [json.loads(line) for line in ended.stdout.splitlines()]
        assert lines
        assert all(line["response"]["status_code"] == 200 for line in lines)


# -- steering


@dataclass(frozen=True, slots=True)
class Slow:
    """A server of the test's own, whose upstream takes its time."""

    desk: Desk
    mock: MockProcess
    server: ServerProcess


@pytest.fixture
def slow(tmp_path: Path, database_18: str) -> Iterator[Slow]:
    with (
        start_mock_process("--latency", "200ms", "--capacity", "4") as mock,
        served(tmp_path / "serve", "--base-url", mock.base_url, database=database_18) as server,
    ):
        yield Slow(Desk(tmp_path, "--server", server.url), mock, server)


def test_all_is_well(slow: Slow) -> None:
    desk = slow.desk
    write_requests(desk.directory / "good.jsonl", 20)
    (desk.directory / "answers.errors.jsonl").write_text("of another run\n")
    ended = desk("submit", "good.jsonl", "-o", "answers.jsonl").expect(0)
    assert "20 requests, 20 completed" in ended.stdout
    assert "penstock export" not in ended.stderr
    assert not check_answers(desk.directory / "answers.jsonl", ids_of(20)).bad
    assert not (desk.directory / "answers.errors.jsonl").exists()
    name = desk("ls", "--json").expect(0).summary["data"][0]["id"]
    printed = desk("export", name, "-o", "-").expect(0)
    assert printed.stdout.encode() == (desk.directory / "answers.jsonl").read_bytes()
    assert printed.stderr == ""
    desk("watch", name[-8:]).expect(0)


def test_pause_resume_cancel_retry(slow: Slow) -> None:
    desk, mock = slow.desk, slow.mock
    # More than a worker calls at once: a pause finds some that wait.
    write_requests(desk.directory / "in.jsonl", 100)
    with slow.server.frozen_workers():
        name = desk.submit("in.jsonl")
    wait_until(lambda: call_count(mock) > 0, 30)

    with slow.server.frozen_workers():
        paused = desk("pause", name).expect(0)
    assert f"{name}  paused: 100 requests" in paused.stdout
    assert f"penstock resume {name}" in paused.stderr
    assert "paused" in desk("watch", name).expect(4).stdout
    assert desk("ls", "--status", "paused", "--json").expect(0).summary["data"][0]["id"] == name
    desk("pause", name).expect(0)  # it is there already

    with slow.server.frozen_workers():
        assert f"{name}  in_progress" in desk("resume", name).expect(0).stdout
        assert desk("cancel", name, "--json").expect(0).summary["cancelling_at"]
    cancelled = desk("watch", name).expect(3)
    assert "cancelled after" in cancelled.stdout
    desk("cancel", name).refuses(1, "Cannot cancel a batch with status 'cancelled'", "penstock show")
    desk("export", name, "-o", "part.jsonl").expect(0)
    part = check_answers(desk.directory / "part.jsonl", ids_of(100))
    assert part.bad[0]["error"]["code"] == "batch_cancelled"

    calls = call_count(mock)
    assert f"penstock watch {name}" in desk("retry", name, "--failed").expect(0).stderr
    desk("watch", name).expect(0)
    desk("export", name, "-o", "part.jsonl").expect(0)
    assert not check_answers(desk.directory / "part.jsonl", ids_of(100)).bad
    assert call_count(mock) == calls + len(part.bad)
    desk("retry", name).refuses(1, "penstock show")


def test_retry_of_some(desk: Desk, mock: MockProcess) -> None:
    write_requests(desk.directory / "in.jsonl", 120)
    ended = desk("submit", "in.jsonl", "-o", "out.jsonl", "--json").expect(3).summary
    bad = [line["custom_id"] for line in read_lines(desk.directory / "out.errors.jsonl")]
    desk("retry", ended["id"], "--failed", "--custom-id", bad[0]).refuses(2, "--failed and --custom-id")
    calls = call_count(mock)
    again = desk("retry", ended["id"], "--custom-id", bad[0], "--custom-id", bad[-1], "--json").expect(0).summary
    assert again["status"] in ("in_progress", "completed")
    desk("watch", ended["id"]).expect(3)
    assert call_count(mock) == calls + 2


def test_results_so_far(slow: Slow) -> None:
    desk = slow.desk
    write_requests(desk.directory / "in.jsonl", 100)
    name = desk.submit("in.jsonl")
    wait_until(lambda: slow.server.ask("GET", f"/v1/batches/{name}").json["request_counts"]["completed"] > 0, 30)
    with slow.server.frozen_workers():
        ended = desk("export", name, "-o", "some.jsonl").expect(0)
        assert "so far" in ended.stderr
        some = read_lines(desk.directory / "some.jsonl")
        assert 0 < len(some) < 100
        assert not desk("export", name, "-o", "some.jsonl", "--json").expect(0).summary["complete"]


def test_watching_survives_a_restart_and_an_interrupt_leaves_the_batch(tmp_path: Path, database_18: str) -> None:
    write_requests(tmp_path / "in.jsonl", 60)
    with (
        start_mock_process("--latency", "200ms", "--capacity", "4") as mock,
        Processes(tmp_path / "serve") as processes,
        bind() as held,  # the port stays ours while no server is there
        ExitStack() as stack,
    ):

        def start(name: str) -> ServerProcess:
            options = ("--base-url", mock.base_url, "--port", str(held.getsockname()[1]))
            started = start_server(processes, tmp_path / "serve", *options, database=database_18, name=name)
            server = ServerProcess(started)
            server.wait_ready()
            return server

        first = start("first")
        desk = Desk(tmp_path, "--server", first.url)
        frozen = stack.enter_context(ExitStack())
        frozen.enter_context(first.frozen_workers())
        name = desk.submit("in.jsonl")
        with start_cli("watch", name, "--json", *desk.where, cwd=tmp_path) as leaving:
            assert leaving.stdout is not None
            assert leaving.stdout.readline()
            interrupt(leaving)
            left = finish(leaving)
        assert left.code == 130
        assert "interrupted" in left.stderr
        with start_cli("watch", name, "--json", *desk.where, cwd=tmp_path) as watching:
            assert watching.stdout is not None
            assert json.loads(watching.stdout.readline())["id"] == name
            frozen.close()
            first.process.kill()
            start("second")
            ended = finish(watching)
        assert ended.code == 0, ended.stderr
        assert json.loads(ended.stdout.splitlines()[-1])["request_counts"]["completed"] == 60


# -- looking


def test_lists_are_walked_to_their_end(desk: Desk, shared: ServerProcess) -> None:
    write_requests(desk.directory / "one.jsonl", 1)
    name = desk.submit("one.jsonl", "--metadata", "walk=yes")
    file_id = shared.ask("GET", f"/v1/batches/{name}").json["input_file_id"]
    made = {name}
    for _ in range(129):
        request = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "1h"}
        made.add(shared.ask("POST", "/v1/batches", {**request, "metadata": {"walk": "yes"}}).json["id"])
    few = desk("ls", "--metadata", "walk=yes").expect(0)
    assert "--all shows every one" in few.stderr
    assert len(few.stdout.splitlines()) == 21
    every = desk("ls", "--metadata", "walk=yes", "--all").expect(0)
    assert [line.split()[0] for line in every.stdout.splitlines()[1:]] == sorted(made, reverse=True)
    most = desk("ls", "--metadata", "walk=yes", "--limit", "110", "--json").expect(0).summary
    assert [batch["id"] for batch in most["data"]] == sorted(made, reverse=True)[:110]
    assert most["has_more"]
    desk("show", name[:12]).refuses(2, "may mean any of these", "Give more digits")
    assert "no such batch" in desk("ls", "--metadata", "walk=no").expect(0).stderr
    desk("ls", "--status", "asleep").refuses(2, "status")


def test_the_environment_names_server_and_key(tmp_path: Path, database_18: str, mock: MockProcess) -> None:
    write_requests(tmp_path / "in.jsonl", 5)
    made = run_cli("keys", "create", "--owner", "ann", "--json", "--database-url", database_18, cwd=tmp_path).expect(0)
    secret = made.summary["key"]
    with served(tmp_path / "serve", "--base-url", mock.base_url, database=database_18) as server:
        without = Desk(tmp_path, env={"PENSTOCK_SERVER": server.base_url})
        without("submit", "in.jsonl").refuses(1, "API key", "PENSTOCK_API_KEY", "penstock keys create")
        wrong = Desk(tmp_path, env={"PENSTOCK_SERVER": server.url, "PENSTOCK_API_KEY": "sk-penstock-wrong"})
        wrong("ls").refuses(1, "Incorrect API key", "PENSTOCK_API_KEY")
        ann = Desk(tmp_path, env={"PENSTOCK_SERVER": f"{server.url}/", "PENSTOCK_API_KEY": secret})
        name = ann.submit("in.jsonl")
        assert name in ann("ls").expect(0).stdout
        # The data itself, looked at past the server, is the local user's; ann's batches are not.
        here = Desk(tmp_path, "--database-url", database_18, env={"PENSTOCK_SERVER": "http://127.0.0.1:1"})
        assert name not in here("ls").expect(0).stdout


def test_a_bar_on_a_terminal(slow: Slow) -> None:
    desk = slow.desk
    write_requests(desk.directory / "in.jsonl", 12)
    leader, follower = pty.openpty()
    try:
        with ExitStack() as frozen:
            frozen.enter_context(slow.server.frozen_workers())
            name = desk.submit("in.jsonl")
            with subprocess.Popen(
                [*PENSTOCK, "watch", name, *desk.where],
                cwd=desk.directory,
                env=environment({"TERM": "xterm", "COLUMNS": "100"}),
                stdin=follower,
                stdout=follower,
                stderr=follower,
            ) as process:
                os.close(follower)
                shown = b""
                while True:
                    try:
                        piece = os.read(leader, 65_536)
                    except OSError:  # the other end is closed
                        break
                    shown += piece
                    if b"in_progress" in shown:
                        frozen.close()
                assert process.wait(30) == 0
    finally:
        os.close(leader)
    assert b"in_progress" in shown
    assert b"/12" in shown
    assert b"completed after" in shown


# -- the data itself


@pytest.mark.again
def test_with_no_server_the_data_is_worked_on_and_nothing_is_worked_off(
    tmp_path: Path, mock: MockProcess, prepared: Prepared
) -> None:
    here = Desk(tmp_path, "--data-dir", "serve/data")
    write_requests(tmp_path / "in.jsonl", 120)
    # Held, as each of these commands would start it, and stop it again: test_embedded.py has that.
    with postgres.acquire(prepared(tmp_path / "serve" / "data")):
        name = _work_on_the_data(here)

    with served(tmp_path / "serve", "--base-url", mock.base_url):
        here("watch", name).expect(3)
        here("export", name, "-o", "out.jsonl").expect(0)
        check_answers(tmp_path / "out.jsonl", ids_of(120))
        # Somebody is there now who works it off.
        here("submit", "in.jsonl", "-o", "again.jsonl").expect(3)
        check_answers(tmp_path / "again.jsonl", ids_of(120))
    before = (tmp_path / "out.jsonl").read_bytes()
    here("export", name, "-o", "out.jsonl").expect(0)
    assert (tmp_path / "out.jsonl").read_bytes() == before


def _work_on_the_data(here: Desk) -> str:
    """What a desk without a server can do, and is refused; the batch that it made."""
    submitted = here("submit", "in.jsonl").expect(0)
    assert "penstock serve" in submitted.stderr
    name = submitted.stdout.strip()
    assert [batch["status"] for batch in here("ls", "--json").expect(0).summary["data"]] == ["validating"]
    assert "penstock serve" in here("show", name[-6:]).expect(0).stderr
    here("submit", "in.jsonl", "-o", "out.jsonl").refuses(2, "no server runs on this data", "penstock serve")
    here("export", name, "-o", "out.jsonl").refuses(1, "has not been started yet", "penstock serve")
    assert [batch["id"] for batch in here("ls", "--json").expect(0).summary["data"]] == [name]
    return name


# -- in little memory

_MEASURED = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)
"""


def peak_kib(desk: Desk, *args: str | Path) -> int:
    """How much memory a command took at most."""
    command = [sys.executable, "-c", _MEASURED, *PENSTOCK, *map(str, args), *desk.where]
    ended = subprocess.run(
        command, cwd=desk.directory, env=environment(), check=False, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    return int(ended.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("locally", [False, pytest.param(True, marks=pytest.mark.again)])
def test_files_are_streamed(tmp_path: Path, database_18: str, locally: bool) -> None:
    padding = "x" * 60_000
    with (
        start_mock_process("--response-bytes", "60000") as mock,
        served(tmp_path / "serve", "--base-url", mock.base_url, database=database_18) as server,
    ):
        where = ("--database-url", database_18) if locally else ("--server", server.url)
        desk = Desk(tmp_path, *where)
        peaks = {}
        for count in (20, 1_000):
            write_lines(tmp_path / "in.jsonl", (request_line(f"r-{n}", f"{n} {padding}") for n in range(count)))
            up = peak_kib(desk, "submit", "in.jsonl", "--metadata", f"count={count}")
            (batch,) = desk("ls", "--metadata", f"count={count}", "--json").expect(0).summary["data"]
            desk("watch", batch["id"]).expect(0)
            peaks[count] = (up, peak_kib(desk, "export", batch["id"], "-o", "out.jsonl"))
            assert len(read_lines(tmp_path / "out.jsonl")) == count
        for small, large in zip(peaks[20], peaks[1_000], strict=True):
            assert large < small + 30 * 1024, peaks  # of files of 60 MB

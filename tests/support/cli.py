"""`penstock` as a user runs it: a process of its own, with a deadline, and files of requests and answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psutil
import psycopg
from psycopg import sql

from penstock.db.embedded import postgres
from penstock.db.migrate import migrate
from penstock.export.jsonl import errors_path
from tests.support.mock_process import MockProcess

DEADLINE_S = 90.0
PENSTOCK = (sys.executable, "-m", "penstock.cli.main")

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Finished:
    """How a command ended, and what it printed."""

    code: int
    stdout: str
    stderr: str

    @property
    def summary(self) -> Json:
        """The one JSON object that `--json` prints."""
        found: Json = json.loads(self.stdout)
        return found

    def expect(self, code: int) -> Finished:
        assert self.code == code, f"exit code {self.code}, expected {code}\n{self.stdout}\n{self.stderr}"
        assert "Traceback" not in self.stderr, self.stderr
        return self

    def refuses(self, code: int, *words: str) -> None:
        """A message for a person: these words, and on a line of its own what to do."""
        self.expect(code)
        for word in words:
            assert word in self.stderr, self.stderr
        said = self.stderr[self.stderr.index("penstock: ") :].rstrip().splitlines()
        assert len(said) > 1, f"no hint: {said}"
        assert said[-1].startswith("  "), said


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's, without what would configure Penstock."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "OPENAI_", "PG"))}
    return {**ours, **(extra or {})}


def run_cli(
    *args: str | Path, cwd: Path, env: Mapping[str, str] | None = None, deadline_s: float = DEADLINE_S
) -> Finished:
    """Run `penstock` to its end."""
    with start_cli(*args, cwd=cwd, env=env) as process:
        return finish(process, deadline_s)


@contextmanager
def start_cli(*args: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """`penstock` under way. Whatever is left of it when the block ends is killed."""
    command = [*PENSTOCK, *(str(arg) for arg in args)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=cwd, env=environment(env), stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, process_group=0
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def finish(process: subprocess.Popen[bytes], deadline_s: float = DEADLINE_S) -> Finished:
    try:
        out, err = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"still running after {deadline_s:g} s\n{out.decode()}\n{err.decode()}") from None
    return Finished(process.returncode, out.decode(errors="backslashreplace"), err.decode())


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C, as a terminal sends it: to the whole group."""
    os.killpg(process.pid, signal.SIGINT)


def worker_pids(process: subprocess.Popen[bytes]) -> list[int]:
    """The living worker processes of a run with `--workers N`."""
    return [child.pid for child in psutil.Process(process.pid).children() if _is_worker(child)]


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "penstock.worker.process" in process.cmdline()
    except psutil.NoSuchProcess:  # a zombie counts as one
        return False


def request_line(custom_id: str, content: str, model: str = "small") -> Json:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": model, "messages": [{"role": "user", "content": content}]},
    }


def write_lines(path: Path, lines: Iterable[Json]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


def write_requests(path: Path, count: int, models: Sequence[str] = ("small",)) -> Path:
    """`count` chat requests with ids `r-1`, `r-2`, ..., the models taken in turn."""
    return write_lines(
        path,
        (
            request_line(f"r-{number}", f"question {number}", models[number % len(models)])
            for number in range(1, count + 1)
        ),
    )


def ids_of(count: int) -> list[str]:
    return [f"r-{number}" for number in range(1, count + 1)]


def read_lines(path: Path) -> list[Json]:
    """The objects of a JSONL file; every line must be whole."""
    data = path.read_bytes()
    assert data == b"" or data.endswith(b"\n"), f"{path.name} ends in the middle of a line"
    # By bytes: str.splitlines() would also split at U+2028 and its like.
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


@dataclass(frozen=True, slots=True)
class Answers:
    """A run's output file and the error file beside it."""

    good: list[Json]
    bad: list[Json]

    @property
    def ids(self) -> list[str]:
        return [line["custom_id"] for line in (*self.good, *self.bad)]


def check_answers(output: Path, expected_ids: Sequence[str]) -> Answers:
    """Read both files: lines of the Batch API's shape, in input order, every custom_id exactly once over both."""
    errors = errors_path(output)
    answers = Answers(read_lines(output), read_lines(errors) if errors.exists() else [])
    place = {custom_id: at for at, custom_id in enumerate(expected_ids)}
    for lines in (answers.good, answers.bad):
        places = [place[line["custom_id"]] for line in lines]
        assert places == sorted(places), "not in input order"
    assert Counter(answers.ids) == Counter(expected_ids)
    assert len({line["id"] for line in (*answers.good, *answers.bad)}) == len(expected_ids)
    for line in answers.good:
        _check_good(line)
    for line in answers.bad:
        _check_bad(line)
    assert not list(output.parent.glob(".*.part")), "a draft was left behind"
    return answers


def _check_good(line: Json) -> None:
    assert list(line) == ["id", "custom_id", "response", "error"]
    assert line["id"].startswith("batch_req_")
    assert list(line["response"]) == ["status_code", "request_id", "body"]
    assert line["response"]["status_code"] == 200
    assert line["error"] is None


def _check_bad(line: Json) -> None:
    assert list(line) == ["id", "custom_id", "response", "error"]
    if line["response"] is None:
        assert list(line["error"]) == ["code", "message"]
        assert line["error"]["code"]
    else:
        assert isinstance(line["response"]["status_code"], int)
        assert line["error"] is None or line["response"]["status_code"] < 300


def answer_text(line: Json) -> str:
    text: str = line["response"]["body"]["choices"][0]["message"]["content"]
    return text


def calls_by_key(mock: MockProcess) -> dict[str, Json]:
    """What the mock counted, by Idempotency-Key."""
    calls: dict[str, Json] = {}
    after, more = 0, True
    while more:
        with urlopen(f"{mock.origin}/mock/calls?after={after}&limit=10000", timeout=30) as answer:
            page = json.load(answer)
        calls.update((record["key"], record) for record in page["data"])
        after, more = page["last"], page["has_more"]
    return calls


def call_count(mock: MockProcess) -> int:
    calls = mock.stats()["calls"]
    assert isinstance(calls, int)
    return calls


def reset(mock: MockProcess) -> None:
    urlopen(Request(f"{mock.origin}/mock/reset", method="POST"), timeout=10).close()


@contextmanager
def opened(data_dir: Path) -> Iterator[psycopg.Connection]:
    """A connection to the embedded server of a data directory."""
    with postgres.acquire(data_dir) as server, psycopg.connect(server.conninfo, autocommit=True) as connection:
        yield connection


def ask(connection: psycopg.Connection, query: str) -> int:
    """The only number that a query answers."""
    row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return int(row[0] or 0)


def slow_down_intake(data_dir: Path, seconds: float) -> None:
    """Make every batch of rows take so long to store."""
    with postgres.acquire(data_dir) as server, psycopg.connect(server.conninfo, autocommit=True) as connection:
        migrate(server.conninfo)
        slow_down_rows(connection, seconds)


def slow_down_rows(connection: psycopg.Connection, seconds: float) -> None:
    """Make every batch of rows take so long to store, in a migrated database."""
    connection.execute(
        sql.SQL(
            "CREATE FUNCTION penstock.wait() RETURNS trigger LANGUAGE plpgsql"
            " AS $$ BEGIN PERFORM pg_sleep({}); RETURN NULL; END $$"
        ).format(seconds)
    )
    connection.execute("CREATE TRIGGER slow BEFORE INSERT ON penstock.templates EXECUTE FUNCTION penstock.wait()")


def check_agreement(connection: psycopg.Connection) -> None:
    """Status, progress, outcomes and what is still held agree for every batch, and nothing ended is held."""
    rows = connection.execute(
        """
        SELECT b.total, b.state,
               coalesce(b.completed + b.failed + b.not_found + b.skipped, p.settled, 0),
               p.settled, o.outcomes, o.ordinals, l.beyond,
               coalesce((SELECT sum(size) FROM penstock.leases WHERE batch_id = b.id), 0),
               coalesce((SELECT sum(size) FROM penstock.deferrals WHERE batch_id = b.id), 0)
          FROM penstock.batches b
         CROSS JOIN LATERAL (SELECT sum(completed + failed + not_found + skipped) AS settled
                               FROM penstock.progress WHERE batch_id = b.id) p
         CROSS JOIN LATERAL (SELECT count(*) AS outcomes, count(DISTINCT (o.lane_id, o.ordinal)) AS ordinals
                               FROM penstock.outcomes o JOIN penstock.lanes n ON n.id = o.lane_id
                              WHERE n.batch_id = b.id) o
         CROSS JOIN LATERAL (SELECT sum(total - next) AS beyond FROM penstock.lanes WHERE batch_id = b.id) l
        """
    ).fetchall()
    assert rows
    for total, state, status, progress, outcomes, ordinals, beyond, leased, deferred in rows:
        # Counters end with their batch, which keeps their sum.
        assert progress in (None, status), (status, progress)
        assert status == outcomes == ordinals, (status, outcomes, ordinals)
        assert total == outcomes + beyond + leased + deferred
        if state == "completed":
            assert (total, beyond, leased, deferred) == (outcomes, 0, 0, 0)

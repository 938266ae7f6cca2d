"""A tenant that uploads, runs batches and talks in sessions: alone at first, then beside the attackers."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import psutil
import psycopg

from tests.support.batch_api import ENDPOINT, jsonl
from tests.support.disks import Disk
from tests.support.mock_process import start_mock_process
from tests.support.server import Answered, ServerProcess, served
from tests.support.tenants import make_key
from tests.support.wait import wait_until

MIB = 1024 * 1024
LINES = 50
STEP_DEADLINE_S = 120.0
FULL_DISK_S = 60.0
FILES = 20
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Outcome:
    alone: Mapping[str, list[float]]
    beside: Mapping[str, list[float]]
    failures: list[str]
    """What failed of the tenant's, and what the server logged as an error."""
    max_rss: int
    attacks: Mapping[str, int]

    def ratio(self, step: str) -> float:
        return p95(self.beside[step]) / p95(self.alone[step])


def p95(seconds: list[float]) -> float:
    return sorted(seconds)[int(0.95 * (len(seconds) - 1))]


class Tenant:
    """The tenant that behaves. Every step is timed; whatever is answered with anything but success is a failure."""

    def __init__(self, server: ServerProcess, key: str) -> None:
        self._server = server
        self._key = key
        self.times: defaultdict[str, list[float]] = defaultdict(list)
        self.failures: list[str] = []

    def work(self, seconds: float) -> None:
        """Everything at once, for so long."""
        until = monotonic() + seconds
        threads = [
            threading.Thread(target=self._repeat, args=(step, until)) for step in (self._batch, self._talk, self._look)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _repeat(self, step: Callable[[], None], until: float) -> None:
        while monotonic() < until:
            try:
                step()
            except (OSError, AssertionError, ValueError, KeyError) as error:
                self.failures.append(f"{step.__name__}: {type(error).__name__}: {error}")

    def _ask(self, name: str, method: str, path: str, body: Any = None, **headers: str) -> Any:
        began = monotonic()
        answer = self._server.ask(method, path, body, headers=headers, key=self._key, timeout_s=STEP_DEADLINE_S)
        assert answer.status == 200, (method, path, answer.status, answer.content[:300])
        self.times[name].append(monotonic() - began)
        return answer.json

    def _batch(self) -> None:
        file_id = self._ask("upload", "PUT", "/v1/files?purpose=batch", jsonl(LINES))["id"]
        began = monotonic()
        asked = {"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "24h"}
        batch = self._ask("create", "POST", "/v1/batches", asked)
        while batch["status"] != "completed":
            assert batch["status"] in ("validating", "in_progress", "finalizing"), batch
            assert monotonic() - began < STEP_DEADLINE_S, batch
            batch = self._ask("poll", "GET", f"/v1/batches/{batch['id']}?wait=10")
        assert batch["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
        self.times["batch"].append(monotonic() - began)

    def _talk(self) -> None:
        body = {"model": "small", "messages": [{"role": "user", "content": "hi"}]}
        self._ask("session", "POST", ENDPOINT, body, **{"x-session-id": "one"})

    def _look(self) -> None:
        self._ask("list", "GET", "/v1/files?limit=10")

    def meet_full_disk(self, data: Disk) -> None:
        """Nothing can be stored, and that is said; deleting and looking work; with room again, everything does."""
        unwanted = [self._store() for _ in range(FILES)]
        data.fill()
        try:
            self._until("GET", "/readyz", 503)
            refused = self._server.ask("PUT", "/v1/files?purpose=batch", jsonl(2_000), key=self._key)
            self._expect(refused.status == 507, "upload", refused)
            for file_id in unwanted:
                deleted = self._server.ask("DELETE", f"/v1/files/{file_id}", key=self._key, timeout_s=STEP_DEADLINE_S)
                self._expect(deleted.status == 200, "delete", deleted)
            looked = self._server.ask("GET", "/v1/files?limit=10", key=self._key)
            self._expect(looked.status == 200, "list", looked)
        finally:
            data.make_room()
        self._until("GET", "/readyz", 200)
        self.work(FULL_DISK_S / 6)

    def _store(self) -> str:
        file_id: str = self._server.ask("PUT", "/v1/files?purpose=batch", jsonl(LINES), key=self._key).json["id"]
        return file_id

    def _until(self, method: str, path: str, status: int) -> None:
        wait_until(lambda: self._server.ask(method, path).status == status, STEP_DEADLINE_S)

    def _expect(self, so: bool, what: str, answer: Answered) -> None:
        if not so:
            self.failures.append(f"{what} on a full disk: {answer.status} {answer.content[:300]!r}")


def run(
    directory: Path,
    database: str,
    *,
    alone_s: float,
    beside_s: float,
    only: str = "",
    data: Disk | None = None,
) -> Outcome:
    """Both, for so long; `only` names one of the attacks. `data` is the disk of the embedded database: it is filled
    in the end, beside the attacks."""
    with ExitStack() as stack:
        upstream = stack.enter_context(start_mock_process())
        options = ("--base-url", upstream.base_url, "--quiet")
        secrets = {owner: make_key(database, owner) for owner in ("tenant", "attacker")}
        server = stack.enter_context(served(directory, *options, database=None if data else database))
        alone = Tenant(server, secrets["tenant"])
        alone.work(alone_s)
        beside = Tenant(server, secrets["tenant"])
        watch = stack.enter_context(RssWatch(server.process.pid))
        command = [sys.executable, "-m", "tests.attacks.attackers", str(server.port), secrets["attacker"]]
        attack_s = beside_s + (FULL_DISK_S if data else 0)
        with subprocess.Popen([*command, str(attack_s), only], cwd=_ROOT, stdout=subprocess.PIPE) as attackers:
            assert attackers.stdout is not None
            assert attackers.stdout.readline() == b"ready\n"
            try:
                beside.work(beside_s)
                logged = [line for line in server.log.splitlines() if " ERROR " in line]
                if data is not None:
                    _have_room_in_the_log(database)
                    beside.meet_full_disk(data)
                attacks = json.loads(attackers.stdout.readline())
            finally:
                attackers.terminate()
        assert server.process.alive
        return Outcome(alone.times, beside.times, alone.failures + beside.failures + logged, watch.most, attacks)


def _have_room_in_the_log(database: str) -> None:
    """Files of the log of changes are used again after it: writes end before that log's room does.

    What a server does that has none is in `tests/faults/test_disk_full.py`."""
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("CHECKPOINT")


class RssWatch:
    """The most memory that a process has had while it was watched."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.most = 0

    def _watch(self) -> None:
        while not self._ended.wait(0.1):
            self.most = max(self.most, self._process.memory_info().rss)

    def __enter__(self) -> RssWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def table(outcome: Outcome) -> str:
    lines = [f"{'step':<8} {'calls':>7} {'median ms':>17} {'p95 ms':>17} {'p95 ratio':>9}"]
    for step in outcome.alone:
        alone, beside = outcome.alone[step], outcome.beside[step]
        figures = [1000 * figure(times) for figure in (statistics.median, p95) for times in (alone, beside)]
        shown = "{:>8.1f}{:>9.1f} {:>8.1f}{:>9.1f}".format(*figures)
        lines.append(f"{step:<8} {len(beside):>7} {shown} {outcome.ratio(step):>9.2f}")
    lines.append(f"failures: {len(outcome.failures)} {outcome.failures[:5]}")
    lines.append(f"most memory of the server: {outcome.max_rss / MIB:.0f} MiB")
    lines.append(f"attacks: {json.dumps(outcome.attacks)}")
    return "\n".join(lines)

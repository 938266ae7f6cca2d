"""A thousand clients follow one running batch: what that costs the batch.

    python -m bench.followers [--rounds 3] [--quick]

`penstock serve` with one worker process and default settings against an upstream that takes a quarter of a second for
every call: bound by calls in flight. The readers live in a process of their own and come all at once as soon as the
batch exists: with server-sent events, of progress alone or of every result too, or with long polls. They take turns
with nobody following. A batch's duration is what the database noted, from its creation to its end.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Final, cast
from uuid import UUID

import openai
import psutil
import psycopg
import uvloop

from bench.ground import median, options, print_table, scratch_database, server, settle_down, sized
from penstock.model import parse_id
from tests.support.batch_api import jsonl
from tests.support.mock_process import start_mock_process
from tests.support.server import ServerProcess, served
from tests.support.wait import wait_until

ENDPOINT: Final = "/v1/chat/completions"
CALL_S = 0.25
DEADLINE_S = 300.0
EVENTS, RESULTS, POLL = "server-sent events", "server-sent events with results", "long polls"

_processes = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Figures:
    batch_s: float
    there_s: float = 0.0
    """Until every reader had its first bytes; of a long poll, until the last had been sent."""
    told_s: float = 0.0
    """From the batch's end until the last reader knew."""
    server_cpu_s: float = 0.0
    readers_cpu_s: float = 0.0


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--readers", type=int)
    chosen = parser.parse_args()
    rounds = 1 if chosen.quick else chosen.rounds
    readers = chosen.readers or sized(chosen, 1_000, 100)
    lines = sized(chosen, 6_400, 1_280)
    found: dict[str | None, list[Figures]] = {kind: [] for kind in (None, EVENTS, RESULTS, POLL)}
    with server() as conninfo:
        for _ in range(rounds):
            for kind, figures in found.items():
                figures.append(_measure(conninfo, kind, readers, lines))
    base = median([each.batch_s for each in found[None]])
    print_table(
        [
            *(f"{lines:,} lines, followed by", "batch, s", "ratio", "all there after, s", "all told after, s"),
            *("CPU of the server, s", "of the readers, s"),
        ],
        [
            [
                f"{readers:,} {kind}" if kind else "nobody",
                f"{(batch_s := median([each.batch_s for each in figures])):.2f}",
                f"{batch_s / base:.3f}",
                *_medians(figures, bool(kind)),
            ]
            for kind, figures in found.items()
        ],
    )


def _medians(figures: list[Figures], followed: bool) -> Iterator[str]:
    yield f"{median([each.there_s for each in figures]):.2f}" if followed else ""
    yield f"{median([each.told_s for each in figures]):.2f}" if followed else ""
    yield f"{median([each.server_cpu_s for each in figures]):.1f}"
    yield f"{median([each.readers_cpu_s for each in figures]):.1f}" if followed else ""


def _measure(conninfo: str, kind: str | None, readers: int, lines: int) -> Figures:
    with (
        tempfile.TemporaryDirectory() as folder,
        scratch_database(conninfo) as database,
        start_mock_process("--latency", f"{CALL_S}s") as mock,
        served(Path(folder), "--quiet", "--base-url", mock.base_url, database=database) as running,
        _readers(kind, running.port, readers) as crowd,
    ):
        client = openai.OpenAI(base_url=running.base_url, api_key="none", max_retries=0)
        file = client.files.create(file=("requests.jsonl", jsonl(lines)), purpose="batch")
        settle_down(database)
        used_s = _cpu_s(running)
        batch = client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
        batch_id = parse_id("batch", batch.id)
        assert batch_id is not None
        crowd.send(batch.id)
        wait_until(lambda: _ended(database, batch_id) is not None, DEADLINE_S)
        if not crowd.poll(DEADLINE_S):
            raise AssertionError("the readers have not ended")
        there_s, told_at, readers_cpu_s = crowd.recv()
        used_s = _cpu_s(running) - used_s
        ended = _ended(database, batch_id)
        assert ended is not None
        completed, batch_s, ended_at = ended
        if completed != lines:
            raise AssertionError(f"{completed} answers of {lines}; others: {_others(database)}\n{running.log}")
    return Figures(batch_s, there_s, told_at - ended_at, used_s, readers_cpu_s)


def _ended(database: str, batch_id: UUID) -> tuple[int, float, float] | None:
    """Of a batch that has ended: lines completed, its duration, when that was."""
    with psycopg.connect(database, autocommit=True) as connection:
        return connection.execute(
            "SELECT completed, extract(epoch FROM completed_at - created_at)::float8,"
            " extract(epoch FROM completed_at)::float8 FROM penstock.batches"
            " WHERE id = %s AND completed_at IS NOT NULL",
            [batch_id],
        ).fetchone()


def _others(database: str) -> list[tuple[object, ...]]:
    """What became of lines that were not completed, by kind."""
    with psycopg.connect(database, autocommit=True) as connection:
        return connection.execute(
            "SELECT state, status_code, error_code, min(error_message), count(*) FROM penstock.outcomes"
            " WHERE state <> 'completed' GROUP BY 1, 2, 3"
        ).fetchall()


def _cpu_s(running: ServerProcess) -> float:
    """Of the process that answers, without its worker."""
    times = psutil.Process(running.process.pid).cpu_times()
    return times.user + times.system


# -- the process of the readers


@contextmanager
def _readers(kind: str | None, port: int, count: int) -> Iterator[Pipe]:
    ours, theirs = _processes.Pipe()
    process = _processes.Process(target=_read_process, args=(kind, port, count, theirs))
    process.start()
    try:
        ours.recv()
        yield ours
    finally:
        process.kill()
        process.join()


def _read_process(kind: str | None, port: int, count: int, pipe: Pipe) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    pipe.send(None)
    batch_id = pipe.recv()
    if kind is None:
        pipe.send((0.0, 0.0, 0.0))
        return
    paths = {
        EVENTS: f"/v1/batches/{batch_id}/events",
        RESULTS: f"/v1/batches/{batch_id}/events?results=true",
        POLL: f"/v1/batches/{batch_id}?wait=60",
    }
    before = time.process_time()
    there_s, told_at = uvloop.run(_read_all(port, paths[kind], count, once=kind != POLL))
    pipe.send((there_s, told_at, time.process_time() - before))


async def _read_all(port: int, path: str, count: int, *, once: bool) -> tuple[float, float]:
    loop = asyncio.get_running_loop()
    begun = time.perf_counter()
    kind = _EventReader if once else _Poller
    made = await asyncio.gather(*(loop.create_connection(lambda: kind(path), "127.0.0.1", port) for _ in range(count)))
    crowd = [reader for _, reader in made]
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*(reader.told for reader in crowd))
    return max(reader.there_at for reader in crowd) - begun, max(reader.told_at for reader in crowd)


class _Reader(asyncio.Protocol):
    """Looks at as little as it can."""

    def __init__(self, path: str) -> None:
        self._request = f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
        self._transport: asyncio.Transport | None = None
        self._tail = b""
        self.told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.there_at = 0.0
        self.told_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.told.done():
            self.told.set_exception(AssertionError(f"hung up on, after {self._tail!r}: {exc}"))

    def _know(self) -> None:
        self.told_at = time.time()
        if not self.told.done():
            self.told.set_result(None)
        if self._transport is not None:
            self._transport.close()


class _EventReader(_Reader):
    def data_received(self, data: bytes) -> None:
        if not self.there_at:
            self.there_at = time.perf_counter()
            if not data.startswith(b"HTTP/1.1 200 "):
                self.told.set_exception(AssertionError(data))
        seen = self._tail + data
        if b"event: done\n" in seen:
            self._know()
        self._tail = seen[-16:]


class _Poller(_Reader):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.there_at = time.perf_counter()

    def data_received(self, data: bytes) -> None:
        self._tail += data
        head, found, body = self._tail.partition(b"\r\n\r\n")
        if not found:
            return
        if not head.startswith(b"HTTP/1.1 200 "):
            self.told.set_exception(AssertionError(head))
            return
        _, _, length = head.partition(b"content-length: ")
        if len(body) < int(length.split(b"\r\n")[0]):
            return
        if b'"status":"completed"' in body:
            self._know()
            return
        self._tail = b""
        assert self._transport is not None
        self._transport.write(self._request)


if __name__ == "__main__":
    main()

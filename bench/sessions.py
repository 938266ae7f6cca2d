"""Sessions: what a deep queue costs the others, how many requests a second, how much later an answer comes.

    python -m bench.sessions [--rounds 5] [--quick]

*Deep*: claims of 64 over 1,000 sessions that are always ready, with and without one more session in which 100,000
requests are queued; two databases on one server, in turns, both vacuumed at the same moments.

*Throughput*: 1,000 sessions, each with a caller who sends the next request when it has the answer to the last, against
`penstock serve` with default settings and an upstream that answers at once; in turns with a bare loop that commits
three single rows for every request, on the same server.

*Latency*: ten times a second a call to a session, and in between a call straight to the upstream and a commit of one
row. What comes on top of the upstream is told in commits. Then the same beside what a session call could be at best:
passed on by the server without storing anything, and by a bare relay that commits a row before it and one after
(`bench.relay`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from statistics import quantiles
from typing import Any
from uuid import uuid4

import psycopg
import uvloop

from bench.ground import median, options, print_table, scratch_database, server, settle_down, sized, timed
from penstock.claim import claim as claims
from penstock.db import arrays
from penstock.db.pool import Connection
from penstock.sessions.accept import accept_many
from penstock.settle.write import Changes, settle
from tests.support.mock_process import start_mock_process
from tests.support.server import served
from tests.support.sessions import DONE, POOL, ROUTE, wish

CLAIM = 64
VACUUM_EVERY = 25
CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "Say something short."}]}
ASKED = json.dumps({"endpoint": CHAT, "body": BODY}).encode()
INTERVAL_S = 0.1
WORKER = uuid4()


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    rounds = 2 if chosen.quick else chosen.rounds
    active = sized(chosen, 1_000, 100)
    with server() as conninfo:
        _deep(conninfo, sized(chosen, 100_000, 2_000), active, sized(chosen, 600, 30))
        _throughput(conninfo, active, sized(chosen, 5_000, 300), rounds)
        _latency(conninfo, sized(chosen, 1_000, 20))


# -- deep


def _deep(conninfo: str, depth: int, active: int, claims_each: int) -> None:
    with scratch_database(conninfo) as plain, scratch_database(conninfo) as deep:
        for database, queued in ((plain, 0), (deep, depth)):
            asyncio.run(_fill(database, queued, active))
            settle_down(database)
        taken: dict[str, list[float]] = {plain: [], deep: []}
        asyncio.run(_claim_in_turns(taken, claims_each))
    print_table(
        [f"claims of {CLAIM} over {active:,} ready sessions", "p50, ms", "p95, ms", "ratio of p50"],
        [
            [
                name,
                f"{1000 * median(taken[database]):.2f}",
                f"{1000 * quantiles(taken[database], n=20)[-1]:.2f}",
                f"{median(taken[database]) / median(taken[plain]):.2f}",
            ]
            for name, database in (
                ("alone", plain),
                (f"beside one with {depth:,} queued", deep),
            )
        ],
    )


async def _fill(database: str, queued: int, active: int) -> None:
    async with await _connect(database) as connection:
        for start in range(0, queued, 500):
            await accept_many(connection, [wish("deep") for _ in range(min(500, queued - start))])
        # As many as are answered on the way are never missed.
        for _ in range(3):
            for start in range(0, active, 500):
                keys = [f"s{number}" for number in range(start, min(start + 500, active))]
                await accept_many(connection, [wish(key) for key in keys])


async def _claim_in_turns(taken: dict[str, list[float]], claims_each: int) -> None:
    connections = {database: await _connect(database) for database in taken}
    for number in range(claims_each + 10):
        if number % VACUUM_EVERY == 0:
            # Autovacuum would come to one of them sooner than to the other, and that is what would be measured.
            for connection in connections.values():
                await connection.execute("VACUUM penstock.lanes, penstock.leases")
        for database, connection in connections.items():
            began = time.perf_counter()
            options: dict[str, Any] = {"wants": {ROUTE: CLAIM}, "worker_id": WORKER, "look": CLAIM}
            leases = (await claims.claim_in_line(connection, pool=POOL, **options)).leases
            if number >= 10:
                taken[database].append(time.perf_counter() - began)
            changes = Changes()
            for item in await claims.read_heads(connection, leases, max_bytes=1 << 24):
                changes.decide(item, DONE)
            await settle(connection, WORKER, changes)
            keys = await (
                await connection.execute(
                    "SELECT key FROM penstock.sessions WHERE lane_id = ANY (%s)", [[lease.lane_id for lease in leases]]
                )
            ).fetchall()
            await accept_many(connection, [wish(key) for (key,) in keys if key != "deep"])
    for connection in connections.values():
        await connection.close()


async def _connect(database: str) -> Connection:
    connection = await psycopg.AsyncConnection.connect(database, autocommit=True)
    arrays.register(connection)
    return connection


# -- throughput


def _throughput(conninfo: str, sessions: int, requests: int, rounds: int) -> None:
    ours: list[float] = []
    bare: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        scratch_database(conninfo) as database,
        scratch_database(conninfo, migrated=False) as other,
        start_mock_process("--latency", "0s") as mock,
        served(Path(folder), "--quiet", "--base-url", mock.base_url, database=database) as running,
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as callers,
    ):
        callers.submit(_call_all, running.port, sessions, sessions).result()
        for _ in range(rounds):
            ours.append(requests / callers.submit(_call_all, running.port, sessions, requests).result())
            bare.append(requests / timed(lambda: _three_commits(other, requests)))
    print_table(
        [f"{requests:,} requests, instant upstream", "requests/s", "ratio", "by round"],
        [
            [
                f"{sessions:,} sessions: accept, claim, settle, answer",
                f"{median(ours):,.0f}",
                f"{median(ours) / median(bare):.2f}",
                ", ".join(f"{a / b:.2f}" for a, b in zip(ours, bare, strict=True)),
            ],
            ["a bare loop, three single-row commits each", f"{median(bare):,.0f}", "1.00", ""],
        ],
    )


def _three_commits(database: str, requests: int) -> None:
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS bare (id bigint PRIMARY KEY, state text, body text)")
        connection.execute("TRUNCATE bare")
        body = json.dumps(BODY)
        for number in range(requests):
            connection.execute("INSERT INTO bare VALUES (%s, 'accepted', %s)", [number, body])
            connection.execute("UPDATE bare SET state = 'claimed' WHERE id = %s", [number])
            connection.execute("UPDATE bare SET state = 'done', body = %s WHERE id = %s", [body, number])


def _call_all(port: int, sessions: int, requests: int) -> float:
    return uvloop.run(_callers(port, sessions, requests))


async def _callers(port: int, sessions: int, requests: int) -> float:
    """Seconds until every session has had its share of the requests answered, one after the other."""
    lines = [await asyncio.open_connection("127.0.0.1", port) for _ in range(sessions)]
    share, left = divmod(requests, sessions)
    began = time.perf_counter()
    await asyncio.gather(
        *(_caller(reader, writer, f"s{n}", share + (n < left)) for n, (reader, writer) in enumerate(lines))
    )
    took = time.perf_counter() - began
    for _, writer in lines:
        writer.close()
    return took


async def _caller(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str, times: int) -> None:
    head = (
        f"POST /v1/sessions/{key}/requests HTTP/1.1\r\nhost: localhost\r\n"
        f"content-type: application/json\r\ncontent-length: {len(ASKED)}\r\n\r\n"
    ).encode()
    for _ in range(times):
        writer.write(head + ASKED)
        answer = await reader.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200"):
            raise AssertionError(answer)
        length = int(answer.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        await reader.readexactly(length)


# -- latency


def _latency(conninfo: str, times: int) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        scratch_database(conninfo) as database,
        start_mock_process("--latency", "0s") as mock,
        served(Path(folder), "--quiet", "--base-url", mock.base_url, database=database) as running,
        psycopg.connect(database, autocommit=True) as connection,
    ):
        connection.execute("CREATE TABLE bare (id bigint PRIMARY KEY, body text)")
        ids = itertools.count()
        upstream, ours = (HTTPConnection("127.0.0.1", port) for port in (mock.port, running.port))
        body = json.dumps(BODY)
        straight = ("straight to the upstream", lambda _: _call(upstream, CHAT, body.encode()))
        insert = "INSERT INTO bare VALUES (%s, %s)"
        commit = ("a commit of one row", lambda _: connection.execute(insert, [next(ids), body]))
        session = ("through a session", lambda n: _call(ours, f"/v1/sessions/s{n % 10}/requests", ASKED))
        passed = ("passed on, nothing stored", lambda _: _call(ours, CHAT, body.encode()))
        _in_turns(times, straight, commit, session)
        with _relay(mock.port, database) as relay_port:
            relay = HTTPConnection("127.0.0.1", relay_port)
            relayed = ("a bare relay: commit, call, commit", lambda _: _call(relay, CHAT, body.encode()))
            _in_turns(times // 2, straight, commit, passed, relayed, session)


def _in_turns(times: int, *actions: tuple[str, Callable[[int], Any]]) -> None:
    """Ten of each a second, evenly spread. The first is what the others are compared with, the second a commit."""
    taken: dict[str, list[float]] = {name: [] for name, _ in actions}
    next_at = time.perf_counter()
    for number in range(times + 10):
        for name, action in actions:
            seconds = timed(partial(action, number))
            if number >= 10:
                taken[name].append(seconds)
            next_at += INTERVAL_S / len(actions)
            time.sleep(max(0.0, next_at - time.perf_counter()))
    straight, commit = (median(taken[name]) for name, _ in actions[:2])
    print_table(
        ["ten a second of each", "p50, ms", "p95, ms", "more than straight, in commits"],
        [
            [
                name,
                f"{1000 * median(figures):.2f}",
                f"{1000 * quantiles(figures, n=20)[-1]:.2f}",
                f"{(median(figures) - straight) / commit:.1f}" if place > 1 else "",
            ]
            for place, (name, figures) in enumerate(taken.items())
        ],
    )


@contextmanager
def _relay(upstream_port: int, database: str) -> Iterator[int]:
    command = [sys.executable, "-m", "bench.relay", str(upstream_port), database]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        if process.stdout is None:
            raise AssertionError("it has no output")
        yield int(process.stdout.readline())
        process.terminate()


def _call(connection: HTTPConnection, path: str, body: bytes) -> None:
    connection.request("POST", path, body, {"content-type": "application/json"})
    answer = connection.getresponse()
    content = answer.read()
    if answer.status != 200:
        raise AssertionError(f"{answer.status}: {content!r}")


if __name__ == "__main__":
    main()

"""Two replicas remove what was deleted while a worker claims from another batch: who waits, and what claiming costs.

    python -m bench.erase [--quick]

A file of 1,000,000 lines is deleted. Two processes take its rows out of the tables as servers do, once with the rests
that servers make by default and once without any; a third process claims, reads and settles 100 items at a time of
another batch. The purge goes on and pauses in turns, so that whatever else the machine does falls on both alike; what
autovacuum does about the removed rows counts as purging.

A lock waited for longer than a millisecond is in the server's log, and a connection that does nothing else looks for
waiting ones all the time. Rows tried are those within the bounds of every statement that was sent to remove some.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
import uvloop
from psycopg.rows import TupleRow

from bench.ground import median, options, print_table, scratch_database, settle_down, sized
from penstock.batches.create import create_batch
from penstock.claim import claim as claims
from penstock.claim import liveness
from penstock.config import Config
from penstock.db import arrays
from penstock.db.embedded import postgres
from penstock.db.embedded.cluster import LOG
from penstock.db.pool import Connection
from penstock.erase import erase, purge
from penstock.model import Lease, Outcome, OutcomeState
from penstock.settle.write import Changes, settle
from tests.support.db import with_connection
from tests.support.engine import claim_due, make_file

BODY = b'{"input": "' + b"x" * 587 + b'"}'
ANSWER = b'{"output": "' + b"y" * 486 + b'"}'
POOL, ROUTE = "bench", "model-0"
CLAIM = 100
REST_S = 0.01
"""Between two claims: calls take their time."""
LINES = 100_000
"""Of the file that is worked on, again and again."""
REPLICAS = 2
MARGIN_S = 0.2
"""At the beginning of every turn, until what was under way has ended."""
PATIENCE_S = 60.0
DEADLINE_S = 900.0

# Every wait for a lock that lasts is logged, where "lasts" is a hundredth of what the server would take notice of.
SETTINGS = {"log_lock_waits": "on", "deadlock_timeout": "1ms"}
_WAIT = re.compile(
    r"still waiting for (\w+) on (?:relation|tuple [^ ]+ of relation|extension of relation) (\d+) of database (\d+)"
)

_processes = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Figures:
    quiet_ms: list[float]
    """Every claim's time while nothing was purged or vacuumed."""
    purging_ms: list[float]
    """Every claim's time meanwhile."""
    purging_s: float
    tried: list[int]
    """Rows, by replica."""
    waits_seen: int
    looks: int
    logged: dict[str, int]
    deadlocks: int


def main() -> None:
    chosen = options(__doc__).parse_args()
    rows, turn_s = sized(chosen, 1_000_000, 200_000), 1.0 if chosen.quick else 5.0
    throttle_s = Config().erase.purge_throttle_ms / 1000
    kinds = {"default rests": throttle_s, "no rests": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        data_dir = Path(folder) / "data"
        with postgres.acquire(data_dir, settings=SETTINGS) as running:
            found = {
                name: _measure(running.conninfo, data_dir / LOG, rows, turn_s, rest_s) for name, rest_s in kinds.items()
            }
    print_table(
        [
            f"{rows:,} rows, two replicas",
            "tried by each",
            "rows/s",
            "tried twice",
            "waits seen",
            "in looks",
            "logged",
            "deadlocks",
        ],
        [
            [
                *(name, " + ".join(f"{count:,}" for count in each.tried), f"{rows / each.purging_s:,.0f}"),
                *(f"{sum(each.tried) - rows:,}", f"{each.waits_seen:,}", f"{each.looks:,}"),
                *(f"{sum(each.logged.values()):,}", f"{each.deadlocks:,}"),
            ]
            for name, each in found.items()
        ],
    )
    for name, each in found.items():
        for lock, times in each.logged.items():
            print(f"{name}: {times} logged for {lock}\n")
    print_table(
        [f"claim {CLAIM}, ms", "claims", "p50", "ratio", "p95", "ratio"],
        [
            [f"{name}: {when}", f"{len(times):,}", *_against(times, each.quiet_ms)]
            for name, each in found.items()
            for when, times in (("not purging", each.quiet_ms), ("purging", each.purging_ms))
        ],
    )


def _against(times: list[float], base: list[float]) -> Iterator[str]:
    for share in (0.5, 0.95):
        yield f"{_quantile(times, share):.2f}"
        yield f"{_quantile(times, share) / _quantile(base, share):.2f}"


def _quantile(values: list[float], share: float) -> float:
    if share == 0.5:
        return median(values)
    return sorted(values)[int(share * (len(values) - 1))]


def _measure(conninfo: str, log: Path, rows: int, turn_s: float, rest_s: float) -> Figures:
    with scratch_database(conninfo) as database:
        doomed = with_connection(database, lambda connection: _store(connection, rows))
        settle_down(database)
        deadlocks, log_from = _deadlocks(database), log.stat().st_size
        with _looking(database) as looker, _claiming(database) as claimer, _purging(database, rest_s) as purgers:
            begun = time.perf_counter()
            time.sleep(2 * turn_s)
            turns = [("quiet", begun, time.perf_counter())]
            assert with_connection(database, lambda connection: erase.delete_file(connection, doomed, None))
            while not purgers.done:
                for name, act in (("purging", purgers.go_on), ("quiet", purgers.pause)):
                    begun = time.perf_counter()
                    act(turn_s)
                    turns.append((name, begun, time.perf_counter()))
            # Once autovacuum is done too, as long again as before.
            begun = time.perf_counter()
            while looker.quiet_s < 2 * turn_s and time.perf_counter() < begun + PATIENCE_S:
                time.sleep(turn_s / 5)
            turns.append(("quiet", begun, time.perf_counter()))
            taken = claimer.times()
            replicas = purgers.reports()
        found: dict[str, list[float]] = {"quiet": [], "purging": []}
        for name, begun, ended in turns:
            for at, seconds in taken:
                if begun + MARGIN_S <= at <= ended - seconds:
                    vacuumed = any(abs(at - seen) < MARGIN_S for seen in looker.vacuums)
                    found["purging" if vacuumed else name].append(1e3 * seconds)
        left = with_connection(database, _left)
        if left != LINES:
            raise AssertionError(f"{left:,} rows are left, not {LINES:,}")
        return Figures(
            found["quiet"],
            found["purging"],
            sum(ended - begun for name, begun, ended in turns if name == "purging"),
            replicas,
            looker.waits,
            looker.looks,
            _logged(database, log, log_from),
            _deadlocks(database) - deadlocks,
        )


async def _store(connection: Connection, rows: int) -> UUID:
    await make_file(connection, [LINES], body=BODY)
    return await make_file(connection, [rows], body=BODY)


async def _left(connection: Connection) -> int:
    row = await (await connection.execute("SELECT count(*) FROM penstock.templates")).fetchone()
    assert row is not None
    return int(row[0])


def _logged(database: str, log: Path, log_from: int) -> dict[str, int]:
    """Waits for locks in this database, by kind of lock and table."""
    found: dict[str, int] = {}
    with psycopg.connect(database, autocommit=True) as connection:
        for lock, relation, oid in _WAIT.findall(log.read_bytes()[log_from:].decode("utf-8", "replace")):
            row = connection.execute(
                "SELECT %s::regclass::text FROM pg_database WHERE datname = current_database() AND oid = %s",
                [int(relation), int(oid)],
            ).fetchone()
            if row is not None:
                found[f"{lock} on {row[0]}"] = found.get(f"{lock} on {row[0]}", 0) + 1
    return found


def _deadlocks(database: str) -> int:
    with psycopg.connect(database, autocommit=True) as connection:
        row = connection.execute("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()").fetchone()
        assert row is not None
        return int(row[0])


# -- looking for who waits


class _Looker:
    def __init__(self) -> None:
        self.looks = 0
        self.waits = 0
        self.vacuums: list[float] = []
        """When autovacuum was seen at what is left of the removed rows."""
        self.ended = threading.Event()
        self._begun = time.perf_counter()

    @property
    def quiet_s(self) -> float:
        """How long autovacuum has not been seen."""
        return time.perf_counter() - (self.vacuums[-1] if self.vacuums else self._begun)

    def run(self, database: str) -> None:
        with psycopg.connect(database, autocommit=True) as connection:
            while not self.ended.wait(0.005):
                row = connection.execute(
                    "SELECT count(*) FILTER (WHERE wait_event_type = 'Lock'),"
                    "       count(*) FILTER (WHERE query LIKE 'autovacuum: %penstock.templates%')"
                    "  FROM pg_stat_activity WHERE datname = current_database()"
                ).fetchone()
                assert row is not None
                self.looks += 1
                self.waits += row[0]
                if row[1]:
                    self.vacuums.append(time.perf_counter())


@contextmanager
def _looking(database: str) -> Iterator[_Looker]:
    looker = _Looker()
    thread = threading.Thread(target=looker.run, args=(database,))
    thread.start()
    try:
        yield looker
    finally:
        looker.ended.set()
        thread.join()


# -- the process that claims


class _Claimer:
    def __init__(self, stop: Event, pipe: Pipe) -> None:
        self._stop = stop
        self._pipe = pipe

    def times(self) -> list[tuple[float, float]]:
        """When each claim began, and how long it took."""
        self._stop.set()
        times: list[tuple[float, float]] = self._pipe.recv()
        return times


@contextmanager
def _claiming(database: str) -> Iterator[_Claimer]:
    stop, (ours, theirs) = _processes.Event(), _processes.Pipe()
    process = _processes.Process(target=_claim_process, args=(database, stop, theirs))
    process.start()
    try:
        ours.recv()
        yield _Claimer(stop, ours)
    finally:
        stop.set()
        process.join(DEADLINE_S)


def _claim_process(database: str, stop: Event, pipe: Pipe) -> None:
    pipe.send(uvloop.run(_claim_all(database, stop, pipe)))


async def _claim_all(database: str, stop: Event, pipe: Pipe) -> list[tuple[float, float]]:
    times = []
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as connection:
        arrays.register(connection)
        worker_id = uuid4()
        await liveness.register(connection, worker_id, POOL)
        cursor = await connection.execute("SELECT id FROM penstock.files WHERE lines = %s", [LINES])
        ((file_id,),) = await cursor.fetchall()
        pipe.send(None)
        while not stop.is_set():
            await create_batch(connection, file_id=file_id, owner="local", pool=POOL, batch_id=uuid4())
            while not stop.is_set():
                begun = time.perf_counter()
                leases = await claim_due(
                    connection, pool=POOL, wants={ROUTE: CLAIM}, worker_id=worker_id, taper_floor=CLAIM
                )
                times.append((begun, time.perf_counter() - begun))
                if not leases:
                    break
                await _answer(connection, worker_id, leases)
                await asyncio.sleep(REST_S)
    return times


async def _answer(connection: Connection, worker_id: UUID, leases: list[Lease]) -> None:
    changes = Changes()
    for lease in leases:
        for item in await claims.read_bodies(
            connection, lease, lease.ranges, max_rows=CLAIM, max_bytes=10 * CLAIM * len(BODY)
        ):
            changes.decide(item, Outcome(OutcomeState.COMPLETED, ANSWER, 200))
    await settle(connection, worker_id, changes)


# -- the processes that purge


class _Purgers:
    def __init__(self, going: Event, ended: list[Event], pipes: list[Pipe]) -> None:
        self._going = going
        self._ended = ended
        self._pipes = pipes

    @property
    def done(self) -> bool:
        return all(ended.is_set() for ended in self._ended)

    def go_on(self, seconds: float) -> None:
        """For so long, or until nothing is left."""
        end = time.perf_counter() + seconds
        self._going.set()
        for ended in self._ended:
            ended.wait(max(end - time.perf_counter(), 0))

    def pause(self, seconds: float) -> None:
        self._going.clear()
        time.sleep(seconds)

    def reports(self) -> list[int]:
        """Rows tried, by replica."""
        return [pipe.recv() for pipe in self._pipes]


@contextmanager
def _purging(database: str, rest_s: float) -> Iterator[_Purgers]:
    going, ended = _processes.Event(), [_processes.Event() for _ in range(REPLICAS)]
    pipes = [_processes.Pipe() for _ in ended]
    processes = [
        _processes.Process(target=_purge_process, args=(database, rest_s, going, mine, theirs))
        for mine, (_, theirs) in zip(ended, pipes, strict=True)
    ]
    for process in processes:
        process.start()
    try:
        for ours, _ in pipes:
            ours.recv()
        yield _Purgers(going, ended, [ours for ours, _ in pipes])
    finally:
        going.set()
        for process in processes:
            process.join(DEADLINE_S)


class _NotingConnection(psycopg.AsyncConnection[TupleRow]):
    """Notes the bounds of every statement that removes rows."""

    bounds: list[tuple[int, int]]

    async def execute(self, query: Any, params: Any = None, **more: Any) -> Any:
        if params and "rows" in params:
            self.bounds.append((params["next"], min(params["next"] + params["rows"], params["total"])))
        return await super().execute(query, params, **more)


def _purge_process(database: str, rest_s: float, going: Event, ended: Event, pipe: Pipe) -> None:
    uvloop.run(_purge_all(database, rest_s, going, ended, pipe))


async def _purge_all(database: str, rest_s: float, going: Event, ended: Event, pipe: Pipe) -> None:
    rows, begun = Config().erase.purge_batch_size, False
    async with await _NotingConnection.connect(database, autocommit=True) as connection:
        connection.bounds = []
        pipe.send(None)
        while True:
            if not going.is_set():
                await asyncio.to_thread(going.wait)
            if await purge.purge_step(connection, rows):
                begun = True
            elif begun:
                break
            await asyncio.sleep(rest_s)
        ended.set()
        pipe.send(sum(end - start for start, end in connection.bounds))


if __name__ == "__main__":
    main()

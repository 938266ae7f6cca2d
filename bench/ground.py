"""Where measurements take place: a server of their own, scratch databases, tables for the results."""

from __future__ import annotations

import random
import statistics
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from uuid import uuid4

import psycopg
from psycopg.conninfo import make_conninfo

from penstock.db.embedded import postgres
from penstock.db.migrate import migrate


def options(about: str | None) -> ArgumentParser:
    """The options every measurement has."""
    parser = ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    return parser


def words(size: int, chance: random.Random) -> str:
    """Text of about four letters a word, of which some are frequent: it compresses as text does."""
    known = ["".join(chance.choices("etaoinshrdlu", k=chance.randint(2, 9))) for _ in range(2_000)]
    text = " ".join(chance.choices(known, weights=[1 / (n + 1) for n in range(len(known))], k=size // 2))
    return text[:size]


def body(size: int) -> bytes:
    """A JSON body of that many bytes."""
    return f'{{"text": "{words(size - 12, random.Random(size))}"}}'.encode()


def sized(chosen: Namespace, full: int, quick: int) -> int:
    return quick if chosen.quick else full


@contextmanager
def server() -> Iterator[str]:
    """The conninfo of an embedded PostgreSQL with Penstock's settings, fsync on, gone afterwards."""
    with tempfile.TemporaryDirectory() as folder, postgres.acquire(Path(folder) / "data") as running:
        yield running.conninfo


@contextmanager
def scratch_database(server: str, *, migrated: bool = True) -> Iterator[str]:
    name = f"bench_{uuid4().hex[:8]}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
        conninfo = make_conninfo(server, dbname=name)
        if migrated:
            migrate(conninfo)
        yield conninfo
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


def settle_down(conninfo: str) -> None:
    """Have statistics gathered and dirty pages written now, not in the middle of what is measured."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE")
        connection.execute("CHECKPOINT")


def timed(action: Callable[[], object]) -> float:
    started = perf_counter()
    action()
    return perf_counter() - started


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table in Markdown, numbers to the right."""
    print("| " + " | ".join(head) + " |")
    print("|" + "|".join(["---", *["---:"] * (len(head) - 1)]) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print(flush=True)

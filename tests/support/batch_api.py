"""The batch API under test: a server with a mock upstream, requests to send it, and its events read as they come."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import openai
import psycopg
from openai.types import Batch
from psycopg.conninfo import make_conninfo

from tests.support.cli import request_line
from tests.support.mock_process import MockProcess, start_mock_process
from tests.support.server import ServerProcess, served
from tests.support.wait import wait_until

DEADLINE_S = 60.0
ENDPOINT: Final = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Ground:
    """A running server, what it calls, and its database."""

    server: ServerProcess
    mock: MockProcess
    database: str

    def client(self, key: str = "none") -> openai.OpenAI:
        return self.server.closing(openai.OpenAI(base_url=self.server.base_url, api_key=key, max_retries=0))

    def count(self, query: str) -> int:
        """The only number that a query answers."""
        with psycopg.connect(self.database) as connection:
            row = connection.execute(query.encode()).fetchone()
        assert row is not None
        return int(row[0])


@contextmanager
def open_ground(
    directory: Path, server: str, *mock: str, settings: tuple[str, ...] = (), workers: int = 1
) -> Iterator[Ground]:
    """A server with a database of its own on the PostgreSQL server; `mock` are options of the upstream."""
    name = f"api_{uuid4().hex}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE template_penstock".encode())
    database = make_conninfo(server, dbname=name)
    options = [part for setting in settings for part in ("--set", setting)]
    with ExitStack() as stack:
        upstream = stack.enter_context(start_mock_process(*mock))
        running = stack.enter_context(
            served(directory, "--base-url", upstream.base_url, *options, database=database, workers=workers)
        )
        yield Ground(running, upstream, database)


def jsonl(count: int, *, prefix: str = "r", model: str = "small") -> bytes:
    """A file of requests."""
    lines = (request_line(f"{prefix}{number}", f"question {number}", model) for number in range(count))
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def submit(client: openai.OpenAI, content: bytes, **options: Any) -> Batch:
    file = client.files.create(file=("requests.jsonl", content), purpose="batch")
    options.setdefault("completion_window", "24h")
    return client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, **options)


def until(client: openai.OpenAI, batch_id: str, *statuses: str) -> Batch:
    """The batch, as soon as it has one of these statuses."""
    seen: list[Batch] = []

    def arrived() -> bool:
        seen.append(client.batches.retrieve(batch_id))
        return seen[-1].status in statuses

    arrived.__qualname__ = f"{batch_id} is {' or '.join(statuses)}"
    wait_until(arrived, DEADLINE_S)
    return seen[-1]


def custom_ids(content: bytes) -> list[str]:
    return [json.loads(line)["custom_id"] for line in content.splitlines()]


@dataclass(frozen=True, slots=True)
class Event:
    name: str
    data: Any
    id: str | None


class EventReader:
    """Server-sent events, one at a time."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.response = response

    def __iter__(self) -> Iterator[Event]:
        fields: dict[str, str] = {}
        for raw in self.response:
            line = raw.decode().rstrip("\n")
            if line:
                name, _, value = line.partition(": ")
                fields[name] = value
            else:
                if "data" in fields:
                    yield Event(fields.get("event", "message"), json.loads(fields["data"]), fields.get("id"))
                fields = {}


@contextmanager
def events(ground: Ground, batch_id: str, query: str = "", **headers: str) -> Iterator[EventReader]:
    """Follow a batch; leaving the block hangs up."""
    connection = http.client.HTTPConnection("127.0.0.1", ground.server.port, timeout=DEADLINE_S)
    with contextlib.closing(connection):
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("GET", f"/v1/batches/{batch_id}/events{query}", headers=sent)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        yield EventReader(response)

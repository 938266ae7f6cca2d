"""Sessions under test: servers with an upstream under the test's thumb, and requests to send them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import openai
import psycopg
from psycopg.conninfo import make_conninfo

from tests.support.recorder import Recorder, recording
from tests.support.server import Answered, ServerProcess, served

CHAT = "/v1/chat/completions"
PROVIDER_KEY = "sk-the-providers-own-key"


@dataclass(frozen=True, slots=True)
class Place:
    server: ServerProcess
    upstream: Recorder
    database: str

    def send(self, key: str, text: str, query: str = "", **headers: str) -> Answered:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.server.ask("POST", f"/v1/sessions/{key}/requests{query}", asking(text), headers=sent)

    def queue(self, key: str, text: str, **headers: str) -> dict[str, Any]:
        """Send without waiting."""
        answer = self.send(key, text, prefer="respond-async", **headers)
        assert answer.status == 202, answer.content
        queued: dict[str, Any] = answer.json
        return queued

    def get(self, path: str) -> Any:
        answer = self.server.ask("GET", f"/v1/sessions{path}")
        assert answer.status == 200, answer.content
        return answer.json

    def ended(self, key: str, request_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.get(f"/{key}/requests/{request_id}?wait=30")
        assert found["status"] not in ("pending", "processing")
        return found

    def client(self, session: str | None = None, **options: Any) -> openai.OpenAI:
        """The official client, as its users have it."""
        return client(self.server, session, **options)


def client(server: ServerProcess, session: str | None = None, **options: Any) -> openai.OpenAI:
    headers = None if session is None else {"X-Session-Id": session}
    options.setdefault("max_retries", 0)
    made = openai.OpenAI(base_url=server.base_url, api_key="the-callers-key", default_headers=headers, **options)
    return server.closing(made)


def asking(text: str, model: str = "small", endpoint: str = CHAT) -> dict[str, Any]:
    return {"endpoint": endpoint, "body": {"model": model, "messages": [{"role": "user", "content": text}]}}


@contextmanager
def new_database(server: str) -> Iterator[str]:
    """A migrated database of its own."""
    name = f"sessions_{uuid4().hex}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE template_penstock".encode())
    yield make_conninfo(server, dbname=name)


def write_config(directory: Path, upstream: Recorder, **settings: object) -> Path:
    """One provider with a key of its own, and a few settings."""
    (directory / "provider.key").write_text(PROVIDER_KEY)
    lines = [f"{name} = {value}" for name, value in settings.items()]
    lines += ["[[providers]]", 'name = "main"', f'base_url = "{upstream.base_url}"', 'models = ["small", "other"]']
    lines.append(f'api_key_file = "{directory / "provider.key"}"')
    path = directory / "penstock.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


@contextmanager
def open_place(directory: Path, server: str, **settings: object) -> Iterator[Place]:
    with recording() as upstream, new_database(server) as database:
        config = write_config(directory, upstream, **settings)
        with served(directory, "--config", config, database=database) as running:
            yield Place(running, upstream, database)

"""Servers with adapters: their configuration, and what they say they found."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.file_servers import FileServer
from tests.support.jobs import CONFIG, PROCESSORS
from tests.support.server import ServerProcess, served

PRICE = {"processor": "price", "jobType": "prices"}
NEVER_S = 86_400
"""Interval of scans that only happen when asked for."""


def adapter_tables(*entries: Mapping[str, Any]) -> str:
    """`[[adapters]]` as they stand in penstock.toml."""
    return "".join(
        "\n[[adapters]]\n" + "".join(f"{name} = {_value(value)}\n" for name, value in entry.items())
        for entry in entries
    )


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{name} = {_value(inner)}" for name, inner in value.items()) + " }"
    return json.dumps(value)


def adapter(place: FileServer, name: str, **fields: Any) -> dict[str, Any]:
    """An adapter of the local user's whose files are tables for the processor `price`."""
    common = {"owner": "local", "pattern": "**/*.csv", "spec": PRICE, "scan_every_s": NEVER_S}
    return {**place.entry(name), **common, **fields}


def write_config(directory: Path, *entries: Mapping[str, Any]) -> Path:
    (directory / "processors_of_tests.py").write_text(PROCESSORS)
    file = directory / "penstock.toml"
    file.write_text(CONFIG + adapter_tables(*entries))
    return file


def python_path(directory: Path) -> str:
    """`PYTHONPATH` with this directory at its beginning."""
    return os.pathsep.join(filter(None, (str(directory), os.environ.get("PYTHONPATH"))))


@contextmanager
def adapters_server(
    directory: Path, database: str, places: Mapping[str, FileServer], *entries: Mapping[str, Any], name: str = "serve"
) -> Iterator[ServerProcess]:
    """A server that works nothing off, with these adapters. `places` are for their secrets."""
    config = ("--config", write_config(directory, *entries), "--set", "scan_timeout_s=5")
    env = {"PYTHONPATH": python_path(directory)}
    for place in places.values():
        env |= place.env
    with served(directory, *config, database=database, workers=0, env=env, name=name) as server:
        yield server


def scan(server: ServerProcess, **options: Any) -> dict[str, Any]:
    """`POST /api/ingestion/scan`: what was found, by adapter."""
    answer = server.ask("POST", "/api/ingestion/scan", **options)
    assert answer.status == 200, answer.content
    return {found["adapter"]: found for found in answer.json["adapters"]}


def ingested(server: ServerProcess, page_size: int = 100, user_id: str = "me", **options: Any) -> list[Any]:
    """What was taken and set aside, newest first, page by page."""
    files: list[Any] = []
    after = ""
    while True:
        answer = server.ask("GET", f"/api/ingestion/files?userId={user_id}&pageSize={page_size}{after}", **options)
        assert answer.status == 200, answer.content
        files += answer.json["files"]
        if answer.json["next"] is None:
            return files
        after = f"&after={answer.json['next']}"

"""Jobs over the API: a server with registered processors, and uploads as a browser sends them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.server import Answered, ServerProcess, served
from tests.support.tenants import form
from tests.support.wait import wait_until

PROCESSORS = '''
import penstock

def price(item):
    """Every tenth is not there, every tenth from the fifth on is sold out."""
    sku = item.body["sku"]
    if sku % 10 == 0:
        raise penstock.NotFound("no such article")
    if sku % 10 == 5:
        raise penstock.Fail("sold out", code="sold_out")
    return {"price": sku * 2, "currency": "EUR"}
'''
CONFIG = """
[[processors]]
name = "price"
function = "processors_of_tests:price"
"""


@contextmanager
def jobs_server(
    directory: Path,
    *args: str,
    database: str,
    workers: int = 1,
    name: str = "serve",
    processors: str = PROCESSORS,
    config_text: str = CONFIG,
) -> Iterator[ServerProcess]:
    """A server that knows the processor `price`, or others."""
    (directory / "processors_of_tests.py").write_text(processors)
    (directory / "penstock.toml").write_text(config_text)
    config = ("--config", directory / "penstock.toml", "--set", "retry_base_s=0.001")
    env = {"PYTHONPATH": os.pathsep.join(filter(None, (str(directory), os.environ.get("PYTHONPATH"))))}
    with served(directory, *config, *args, database=database, workers=workers, env=env, name=name) as server:
        yield server


def post_job(
    server: ServerProcess,
    content: bytes,
    spec: Mapping[str, Any] | str,
    *,
    filename: str = "rows.csv",
    headers: Mapping[str, str] | None = None,
    key: str | None = None,
    timeout_s: float = 30.0,
) -> Answered:
    """`POST /api/jobs` with one file."""
    body, kind = form({"spec": spec if isinstance(spec, str) else json.dumps(spec), "file": content}, filename)
    sent = {"content-type": kind, **(headers or {})}
    return server.ask("POST", "/api/jobs", body, headers=sent, key=key, timeout_s=timeout_s)


def start_job(
    server: ServerProcess,
    content: bytes,
    spec: Mapping[str, Any],
    *,
    filename: str = "rows.csv",
    timeout_s: float = 30.0,
) -> str:
    answer = post_job(server, content, spec, filename=filename, timeout_s=timeout_s)
    assert answer.status == 200, answer.content
    name: str = answer.json["jobId"]
    return name


def job_of(server: ServerProcess, name: str) -> Any:
    answer = server.ask("GET", f"/api/jobs/{name}")
    assert answer.status == 200, answer.content
    return answer.json


def until_state(server: ServerProcess, name: str, *states: str, deadline_s: float = 60) -> Any:
    wait_until(lambda: job_of(server, name)["state"] in states, deadline_s)
    return job_of(server, name)


def items_of(server: ServerProcess, name: str, page_size: int = 1000, narrow: str = "") -> list[Any]:
    """All rows of a job, page by page; or some of them."""
    items: list[Any] = []
    place: str | None = "1"
    while place is not None:
        answer = server.ask("GET", f"/api/jobs/{name}/items?from={place}&pageSize={page_size}{narrow}")
        assert answer.status == 200, answer.content
        items += answer.json["items"]
        place = answer.json["next"]
    return items


def table(rows: int) -> bytes:
    """A CSV file of so many articles."""
    lines = [f"{number};  Chair {number} ;{'=1+1' if number == 1 else ''}" for number in range(1, rows + 1)]
    return "\n".join(["SKU;Product Title;Note", *lines, ""]).encode()

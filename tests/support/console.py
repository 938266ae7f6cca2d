"""Work to look at in the console, and its page."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Page, expect

from tests.support.batch_api import jsonl
from tests.support.server import ServerProcess
from tests.support.tenants import form

PRICE = {"processor": "price", "jobType": "prices"}
"""Spec of a job with the processor that `jobs_server` has: of ten articles one fails, and one is not found."""


def work_of(server: ServerProcess, name: str) -> Any:
    answer = server.ask("GET", f"/api/work/{name}")
    assert answer.status == 200, answer.content
    return answer.json


def start_batch(server: ServerProcess, content: bytes, name: str) -> str:
    """A batch with this name over a file of requests."""
    body, kind = form({"purpose": "batch", "file": content}, "requests.jsonl")
    uploaded = server.ask("POST", "/v1/files", body, headers={"content-type": kind})
    assert uploaded.status == 200, uploaded.content
    asked = {
        "input_file_id": uploaded.json["id"],
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
        "metadata": {"name": name},
    }
    created = server.ask("POST", "/v1/batches", asked)
    assert created.status == 200, created.content
    id_: str = created.json["id"]
    return id_


def start_requests(server: ServerProcess, count: int, name: str) -> str:
    """A batch of so many requests, with the custom ids `r1`, `r2` and so on."""
    return start_batch(server, jsonl(count), name)


def open_work(page: Page, server: ServerProcess, name: str, query: str = "") -> None:
    page.goto(f"{server.url}/console/#/work/{name}{query}")
    expect(page.get_by_role("region", name="Progress")).to_be_visible()

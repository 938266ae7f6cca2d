"""Requests with their answers, and attempts that failed: page by page, in every state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.batch_api import Ground, jsonl, open_ground, submit, until


@pytest.fixture(scope="module")
def ground(server_18: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """An upstream that refuses some requests."""
    with open_ground(tmp_path_factory.mktemp("results"), server_18, "--reject-rate", "0.3") as opened:
        yield opened


@pytest.fixture
def client(ground: Ground) -> Iterator[openai.OpenAI]:
    with ground.client() as made:
        yield made


def walk(ground: Ground, path: str, query: str = "") -> list[dict[str, Any]]:
    """Every row, page by page."""
    rows: list[dict[str, Any]] = []
    after = ""
    while True:
        page = ground.server.ask("GET", f"{path}?{query}{after}").json
        assert page["object"] == "list"
        if page["data"]:
            assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
        rows += page["data"]
        if not page["has_more"]:
            return rows
        after = f"&after={page['last_id']}"


def test_inputs_and_answers_side_by_side(ground: Ground, client: openai.OpenAI) -> None:
    done = until(client, submit(client, jsonl(53)).id, "completed")
    assert done.request_counts is not None
    path = f"/v1/batches/{done.id}/results"
    rows = walk(ground, path, "limit=10")
    assert [row["line"] for row in rows] == list(range(1, 54))
    assert [row["custom_id"] for row in rows] == [f"r{number}" for number in range(53)]
    for row in rows:
        assert row["body"]["messages"][0]["content"] == f"question {row['line'] - 1}"
        assert row["url"] == "/v1/chat/completions"
        assert row["attempts"] == 1
        assert row["finished_at"]
    good = [row for row in rows if row["status"] == "completed"]
    bad = [row for row in rows if row["status"] == "failed"]
    assert (len(good), len(bad)) == (done.request_counts.completed, done.request_counts.failed)
    assert all(row["response"]["body"]["object"] == "chat.completion" and row["error"] is None for row in good)
    assert all(row["response"]["status_code"] == 400 and row["error"]["code"] for row in bad)
    assert walk(ground, path, "limit=7&status=failed") == bad
    assert walk(ground, path, "limit=100&status=failed,completed") == rows
    assert walk(ground, path, "status=pending") == []


def test_rows_that_are_not_decided_say_so(server_18: str, tmp_path: Path) -> None:
    with open_ground(tmp_path, server_18, workers=0) as ground, ground.client() as client:
        batch = until(client, submit(client, jsonl(5)).id, "in_progress")
        path = f"/v1/batches/{batch.id}/results"
        rows = walk(ground, path, "limit=2")
        assert [row["status"] for row in rows] == ["pending"] * 5
        assert {(row["response"], row["error"], row["finished_at"], row["attempts"]) for row in rows} == {
            (None, None, None, 0)
        }
        client.batches.cancel(batch.id)
        until(client, batch.id, "cancelled")
        rows = walk(ground, path, "limit=2&status=cancelled")
        assert [row["error"]["code"] for row in rows] == ["batch_cancelled"] * 5


def test_attempts_that_failed_are_listed(ground: Ground, client: openai.OpenAI) -> None:
    done = until(client, submit(client, jsonl(40)).id, "completed")
    assert done.request_counts is not None
    path = f"/v1/batches/{done.id}/attempts"
    rows = walk(ground, path, "limit=3")
    assert len(rows) == len({row["id"] for row in rows}) == done.request_counts.failed > 3
    for row in rows:
        assert (row["object"], row["attempt"], row["counted"], row["status_code"]) == ("batch.attempt", 1, True, 400)
        assert row["error"]["message"]
    one = rows[1]
    assert walk(ground, path, f"request_id={one['request_id']}") == [one]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("results?limit=0", "limit"),
        ("results?limit=101", "limit"),
        ("results?status=lost", "status"),
        ("results?after=batch_req_x", "after"),
        ("results?after=batch_req_" + "0" * 32 + "_1", "after"),
        ("attempts?limit=0", "limit"),
        ("attempts?after=1", "after"),
        ("attempts?after=attempt_99999999999999999999_1_1", "after"),
        ("attempts?request_id=7", "request_id"),
    ],
)
def test_what_cannot_be_asked(ground: Ground, client: openai.OpenAI, query: str, param: str) -> None:
    batch = submit(client, jsonl(1))
    answer = ground.server.ask("GET", f"/v1/batches/{batch.id}/{query}")
    assert answer.status == 400
    assert answer.json["error"]["param"] == param

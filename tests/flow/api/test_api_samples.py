"""Charts over the API: what a batch and a job did, second by second."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from penstock.latency import LATENCY_BOUNDS_MS
from tests.support.batch_api import Ground, jsonl, open_ground, submit, until
from tests.support.jobs import start_job, until_state
from tests.support.wait import wait_until

LINES = 60
CHAT = {"processor": {"type": "chat", "provider": "default", "model": "small", "prompt": "{{ a }}"}}


@pytest.fixture(scope="module")
def ground(server_18: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """An upstream that refuses some requests."""
    with open_ground(tmp_path_factory.mktemp("samples"), server_18, "--reject-rate", "0.3") as opened:
        yield opened


def chart(ground: Ground, path: str, query: str = "") -> Any:
    answer = ground.server.ask("GET", f"{path}{query}")
    assert answer.status == 200, answer.content
    return answer.json


def test_a_batch_second_by_second(ground: Ground) -> None:
    with ground.client() as client:
        batch = until(client, submit(client, jsonl(LINES)).id, "completed")
    assert batch.request_counts is not None
    path = f"/v1/batches/{batch.id}/samples"
    wait_until(lambda: sum(sum(at["latency"]) for at in chart(ground, path)["data"]) == LINES, 30)
    wait_until(lambda: all(at["complete"] for at in chart(ground, path)["data"]), 30)
    told = chart(ground, path)
    assert (told["object"], told["resolution"]) == ("list", 1)
    assert told["latency_bounds_ms"] == list(LATENCY_BOUNDS_MS)
    points = told["data"]
    assert sum(point["completed"] for point in points) == batch.request_counts.completed
    assert sum(point["failed"] for point in points) == batch.request_counts.failed > 0
    assert sum(point["input_tokens"] for point in points) > 0
    assert {point["seconds"] for point in points} == {1}
    assert all(0 <= point["p50_ms"] <= point["p95_ms"] <= point["p99_ms"] for point in points)
    assert batch.in_progress_at is not None
    assert batch.completed_at is not None
    assert all(batch.in_progress_at <= point["at"] <= batch.completed_at for point in points)
    # From one second, to before it.
    last = points[-1]
    assert chart(ground, path, f"?from={last['at']}")["data"] == [last]
    assert chart(ground, path, f"?to={last['at']}")["data"] == points[:-1]
    (day,) = chart(ground, path, "?resolution=86400")["data"]
    assert (day["completed"], day["seconds"]) == (batch.request_counts.completed, 86_400)


def test_calls_in_flight_and_how_many_there_may_be(ground: Ground) -> None:
    """The calls last until they are seen: they are looked at once a second."""
    ground.mock.set(latency="300ms")
    with ground.client() as client:
        batch = submit(client, jsonl(100 * LINES))
    try:
        path = f"/v1/batches/{batch.id}/samples"
        limited: list[Any] = []

        def has_limits() -> bool:
            limited[:] = [at for at in chart(ground, path)["data"] if at["limit_now"] is not None]
            return bool(limited)

        wait_until(has_limits, 30)
    finally:
        ground.mock.set(latency="0ms")
        ground.server.ask("POST", f"/v1/batches/{batch.id}/cancel")
    assert all(at["in_flight"] >= 1 and at["limit_now"] >= 1 for at in limited)


def test_a_job_second_by_second(ground: Ground) -> None:
    job = start_job(ground.server, b"a\n" + b"1\n" * LINES, CHAT)
    until_state(ground.server, job, "DONE")
    path = f"/api/jobs/{job}/samples"
    wait_until(lambda: sum(sum(at["latency"]) for at in chart(ground, path)["samples"]) == LINES, 30)
    told = chart(ground, path)
    assert told["latencyBoundsMs"] == list(LATENCY_BOUNDS_MS)
    first = told["samples"][0]
    assert datetime.fromisoformat(first["at"]).microsecond == 0
    assert {"notFound", "inputTokens", "p50Ms", "limitNow", "inFlight"} <= set(first)
    assert chart(ground, path, "?to=2020-01-01T00:00:00Z")["samples"] == []


@pytest.mark.parametrize("query", ["resolution=2", "resolution=0", "from=yesterday", "from=-1"])
def test_what_cannot_be_asked(ground: Ground, query: str) -> None:
    with ground.client() as client:
        batch = submit(client, jsonl(1))
    assert ground.server.ask("GET", f"/v1/batches/{batch.id}/samples?{query}").status == 400


def test_more_points_than_there_may_be_are_refused(ground: Ground) -> None:
    with ground.client() as client:
        batch = until(client, submit(client, jsonl(1)).id, "completed")
    path = f"/v1/batches/{batch.id}/samples"
    wait_until(lambda: chart(ground, path)["data"], 30)
    add = (
        "INSERT INTO penstock.samples (batch_id, resolution_s, at, completed, failed, not_found, skipped, retried,"
        "  refused, input_tokens, output_tokens, latency)"
        f" SELECT '{batch.id.removeprefix('batch_')}', 60, now() - interval '2 hours', 1, 0, 0, 0, 0, 0, 0, 0, '{{}}'"
        " RETURNING 1"
    )
    assert ground.count(add) == 1
    assert chart(ground, path)["resolution"] == 10
    refused = ground.server.ask("GET", f"{path}?resolution=1")
    assert refused.status == 400
    assert refused.json["error"]["param"] == "resolution"
    assert "ask for 10" in refused.json["error"]["message"]

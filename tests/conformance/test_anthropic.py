"""The official Anthropic client, unmodified: every method of message batches, plain and beta, sync and async."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import pytest

from tests.conformance.conftest import Driver, Place
from tests.support.thorough import some

DEADLINE_S = 60.0


def message(custom_id: str, content: str = "Hello") -> dict[str, Any]:
    params = {"model": "small", "max_tokens": 16, "messages": [{"role": "user", "content": content}]}
    return {"custom_id": custom_id, "params": params}


def many(count: int) -> list[dict[str, Any]]:
    return [message(f"r{number}") for number in range(count)]


@pytest.fixture(params=some(["messages.batches", "beta.messages.batches"], 1))
def prefix(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(params=some(["sync", "async"], 1))
def anthropic_driver(request: pytest.FixtureRequest, place: Place) -> Iterator[Driver]:
    make: Callable[..., Any] = anthropic.Anthropic if request.param == "sync" else anthropic.AsyncAnthropic
    driver = Driver(make(base_url=place.url, api_key=place.key, max_retries=0))
    yield driver
    driver.close()


def ended(driver: Driver, prefix: str, batch: Any) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while batch.processing_status != "ended":
        assert time.monotonic() < deadline, batch
        counts = batch.request_counts
        assert (counts.succeeded, counts.errored, counts.canceled, counts.expired) == (0, 0, 0, 0)
        assert batch.results_url is None
        batch = driver.do(f"{prefix}.retrieve", batch.id)
    return batch


def test_from_requests_to_results(anthropic_driver: Driver, prefix: str) -> None:
    batch = anthropic_driver.do(f"{prefix}.create", requests=many(10))
    assert batch.id.startswith("msgbatch_")
    assert (batch.type, batch.processing_status, batch.request_counts.processing) == (
        "message_batch",
        "in_progress",
        10,
    )
    assert (batch.expires_at - batch.created_at).total_seconds() == 86_400
    done = ended(anthropic_driver, prefix, batch)
    assert (done.request_counts.succeeded, done.request_counts.processing) == (10, 0)
    assert done.ended_at >= done.created_at
    assert (done.cancel_initiated_at, done.archived_at) == (None, None)
    results = anthropic_driver.walk(f"{prefix}.results", batch.id)
    assert sorted(result.custom_id for result in results) == sorted(f"r{number}" for number in range(10))
    for result in results:
        assert result.result.type == "succeeded"
        assert result.result.message.content[0].type == "text"


def test_what_the_upstream_refuses_is_errored(anthropic_driver: Driver, prefix: str) -> None:
    bad = message("bad")
    bad["params"]["messages"] = "not a list"
    done = ended(anthropic_driver, prefix, anthropic_driver.do(f"{prefix}.create", requests=[message("good"), bad]))
    assert (done.request_counts.succeeded, done.request_counts.errored) == (1, 1)
    by_id = {result.custom_id: result.result for result in anthropic_driver.walk(f"{prefix}.results", done.id)}
    assert by_id["good"].type == "succeeded"
    assert by_id["bad"].type == "errored"
    assert by_id["bad"].error.error.type == "invalid_request_error"
    assert by_id["bad"].error.error.message


def test_cancel(anthropic_driver: Driver, prefix: str) -> None:
    batch = anthropic_driver.do(f"{prefix}.create", requests=many(10_000))
    with pytest.raises(anthropic.APIStatusError) as early:
        anthropic_driver.do(f"{prefix}.delete", batch.id)
    assert early.value.status_code in (400, 409)
    cancelled = anthropic_driver.do(f"{prefix}.cancel", batch.id)
    assert cancelled.processing_status in ("canceling", "ended")
    assert cancelled.cancel_initiated_at
    deadline = time.monotonic() + DEADLINE_S
    while cancelled.processing_status != "ended":
        assert time.monotonic() < deadline, cancelled
        cancelled = anthropic_driver.do(f"{prefix}.retrieve", batch.id)
    counts = cancelled.request_counts
    assert counts.canceled > 0
    assert counts.succeeded + counts.errored + counts.canceled == 10_000
    kinds = [result.result.type for result in anthropic_driver.walk(f"{prefix}.results", batch.id)]
    assert (len(kinds), kinds.count("canceled")) == (10_000, counts.canceled)


def test_lists_both_ways_and_deletes(anthropic_driver: Driver, prefix: str) -> None:
    made = [anthropic_driver.do(f"{prefix}.create", requests=[message("one")]).id for _ in range(5)]
    seen = [batch.id for batch in anthropic_driver.walk(f"{prefix}.list", limit=2)]
    assert seen[:5] == made[::-1]
    assert len(set(seen)) == len(seen)
    newer = [batch.id for batch in anthropic_driver.walk(f"{prefix}.list", limit=2, before_id=made[0])]
    assert set(newer) == set(made[1:])
    page = anthropic_driver.do(f"{prefix}.list", limit=1)
    assert (page.has_more, page.first_id, page.last_id) == (True, made[-1], made[-1])
    last = anthropic_driver.do(f"{prefix}.retrieve", made[-1])
    ended(anthropic_driver, prefix, last)
    gone = anthropic_driver.do(f"{prefix}.delete", made[-1])
    assert (gone.id, gone.type) == (made[-1], "message_batch_deleted")
    with pytest.raises(anthropic.NotFoundError):
        anthropic_driver.do(f"{prefix}.retrieve", made[-1])


@pytest.mark.parametrize(
    ("requests", "named"),
    [
        ([], "requests"),
        ([message("same"), message("same")], "requests.1.custom_id"),
        ([{"custom_id": "x"}], "requests.0.params"),
        ([message("bad id!")], "requests.0.custom_id"),
    ],
)
def test_refusals(anthropic_driver: Driver, prefix: str, requests: list[Any], named: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        anthropic_driver.do(f"{prefix}.create", requests=requests)
    body: Any = refused.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert named in body["error"]["message"]
    assert refused.value.request_id


def test_unknown_ids_and_wrong_keys(anthropic_driver: Driver, prefix: str, place: Place) -> None:
    for name in ("retrieve", "cancel", "delete"):
        with pytest.raises(anthropic.NotFoundError):
            anthropic_driver.do(f"{prefix}.{name}", "msgbatch_nonsense")
    mine = anthropic_driver.do(f"{prefix}.create", requests=[message("one")])
    other = Driver(anthropic.Anthropic(base_url=place.url, api_key=place.other_key, max_retries=0))
    with pytest.raises(anthropic.NotFoundError):
        other.do(f"{prefix}.retrieve", mine.id)
    other.close()
    wrong = Driver(anthropic.Anthropic(base_url=place.url, api_key="sk-wrong", max_retries=0))
    with pytest.raises(anthropic.AuthenticationError):
        wrong.do(f"{prefix}.list")
    wrong.close()


def test_the_header_of_older_clients(place: Place) -> None:
    key: Any = {"x-api-key": place.key, "Authorization": anthropic.Omit()}
    driver = Driver(anthropic.Anthropic(base_url=place.url, api_key="unused", max_retries=0, default_headers=key))
    assert isinstance(driver.walk("messages.batches.list"), list)
    driver.close()

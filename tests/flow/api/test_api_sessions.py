"""Sessions over HTTP: answered one at a time and in order, waited for, steered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from tests.support.session_api import CHAT, Place, asking, open_place
from tests.support.wait import wait_until

FIELDS = {
    *("id", "object", "session", "sequence", "status", "response", "error", "attempts"),
    *("created_at", "completed_at"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, server_18: str) -> Iterator[Place]:
    settings = {"max_attempts": 1, "session_max_body_bytes": 100_000}
    with open_place(tmp_path_factory.mktemp("sessions"), server_18, **settings) as opened:
        yield opened


@pytest.fixture
def key() -> str:
    return f"k-{uuid4().hex[:12]}"


# -- sending


def test_a_call_blocks_until_its_answer(place: Place, key: str) -> None:
    answer = place.send(key, "hello")
    assert answer.status == 200
    told = answer.json
    assert set(told) == FIELDS
    assert told["object"] == "session.request"
    assert told["id"].startswith("sreq_")
    assert (told["session"], told["sequence"], told["status"], told["attempts"]) == (key, 1, "completed", 1)
    assert told["error"] is None
    assert told["response"]["status_code"] == 200
    assert told["response"]["body"]["choices"][0]["message"]["content"] == "echo hello"
    assert told["created_at"] <= told["completed_at"]
    assert place.get(f"/{key}/requests/{told['id']}") == told
    assert place.get(f"/{key}/requests/{told['id']}?include=request") == {**told, "request": asking("hello")}


def test_what_a_request_asks_is_read_with_it_until_it_is_erased(place: Place, key: str) -> None:
    asks = b'{"model":"small", "messages":[{"content":"\\u00e9"}], "seed":12345678901234567890}'
    body = b'{"endpoint": "/v1/chat/completions", "body": ' + asks + b"}"
    headers = {"content-type": "application/json"}
    told = place.server.ask("POST", f"/v1/sessions/{key}/requests", body, headers=headers).json
    path = f"/v1/sessions/{key}/requests/{told['id']}"
    for query in ("?include=request", "?wait=1&include=request"):
        asked = place.server.ask("GET", path + query)
        assert asked.status == 200
        assert b'"request":{"endpoint":"/v1/chat/completions","body":' + asks in asked.content
    assert "request" not in place.get(f"/{key}/requests")["data"][0]
    with psycopg.connect(place.database) as connection:
        connection.execute("DELETE FROM penstock.templates WHERE body = %s", [asks])
    assert place.get(f"/{key}/requests/{told['id']}?include=request") == {**told, "request": None}


def test_the_body_goes_out_byte_by_byte(place: Place, key: str) -> None:
    asks = b'{ "model":"small",  "messages":[{"content":"\\u00e9 %b"}] }' % key.encode()
    body = b'{"endpoint": "/v1/chat/completions", "body": ' + asks + b"}"
    headers = {"content-type": "application/json"}
    answer = place.server.ask("POST", f"/v1/sessions/{key}/requests", body, headers=headers)
    assert answer.status == 200
    # What an earlier test left queued may be called at any time.
    assert [call.raw for call in place.upstream.calls if key in call.text] == [asks]


def test_requests_are_answered_in_order_one_at_a_time(place: Place, key: str) -> None:
    queued = [place.queue(key, f"hold {key} {number}") for number in range(5)]
    assert [entry["sequence"] for entry in queued] == [1, 2, 3, 4, 5]
    place.upstream.wait_called(f"hold {key} 0")
    assert place.get(f"/{key}")["queued"] == 4
    place.upstream.release(key)
    for entry in queued:
        assert place.ended(key, entry["id"])["status"] == "completed"
    calls = [call for call in place.upstream.calls if call.text.startswith(f"hold {key}")]
    assert [call.text for call in calls] == [f"hold {key} {number}" for number in range(5)]
    assert place.upstream.overlaps(calls) == []


def test_a_failed_request_wakes_its_caller(place: Place, key: str) -> None:
    told = place.send(key, "fail 400").json
    assert told["status"] == "failed"
    assert told["response"]["status_code"] == 400
    assert told["response"]["body"]["error"]["message"] == "it fails"
    assert told["error"]["code"] == "oops"


def test_async_is_answered_at_once_with_a_place_to_look(place: Place, key: str) -> None:
    answer = place.send(key, f"hold {key}", prefer="respond-async")
    assert answer.status == 202
    assert answer.headers["preference-applied"] == "respond-async"
    assert answer.json["status"] in ("pending", "processing")
    assert answer.headers["location"] == f"/v1/sessions/{key}/requests/{answer.json['id']}"
    place.upstream.release(key)
    assert place.ended(key, answer.json["id"])["status"] == "completed"


@pytest.mark.parametrize(("query", "headers"), [("?wait=0.05", {}), ("", {"prefer": "wait=0"})])
def test_time_is_up_and_the_same_key_gets_the_stored_answer(
    place: Place, key: str, query: str, headers: dict[str, str]
) -> None:
    text = f"hold {key}"
    answer = place.send(key, text, query, idempotency_key="once", **headers)
    assert answer.status == 503
    assert answer.headers["retry-after"] == "1"
    assert "x-should-retry" not in answer.headers
    assert answer.json["error"]["code"] == "wait_timeout"
    assert answer.json["id"] in answer.json["error"]["message"]
    assert answer.headers["location"].endswith(answer.json["id"])
    place.upstream.release(key)
    again = place.send(key, text, idempotency_key="once")
    assert again.status == 200
    assert again.json["id"] == answer.json["id"]
    assert again.json["status"] == "completed"
    assert place.send(key, text, idempotency_key="once").json == again.json
    assert place.upstream.texts.count(text) == 1


def test_without_a_key_official_clients_are_told_not_to_repeat(place: Place, key: str) -> None:
    answer = place.send(key, f"hold {key}", "?wait=0.01")
    assert (answer.status, answer.headers["x-should-retry"]) == (503, "false")
    place.upstream.release(key)


def test_an_idempotency_key_is_for_one_request(place: Place, key: str) -> None:
    assert place.send(key, "this", idempotency_key="k").status == 200
    answer = place.send(key, "that", idempotency_key="k")
    assert (answer.status, answer.json["error"]["code"]) == (409, "idempotency_conflict")
    assert place.send(f"{key}-other", "that", idempotency_key="k").status == 200


def test_many_at_once_under_one_key_are_one_request(place: Place, key: str) -> None:
    with ThreadPoolExecutor(8) as threads:
        sent = [threads.submit(place.send, key, f"hold {key}", idempotency_key="k") for _ in range(8)]
        place.upstream.wait_called(f"hold {key}")
        place.upstream.release(key)
        ids = {future.result().json["id"] for future in sent}
    assert len(ids) == 1
    assert place.upstream.texts.count(f"hold {key}") == 1


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (asking("x", model="unheard-of"), 400, "model_not_found", "body.model"),
        ({"endpoint": CHAT, "body": {}}, 400, "missing_required_parameter", "body.model"),
        ({"endpoint": CHAT, "body": {"model": 3}}, 400, "invalid_type", "body.model"),
        ({"endpoint": CHAT, "body": [1]}, 400, "invalid_type", "body"),
        ({"endpoint": "/v1/files", "body": {"model": "small"}}, 400, "invalid_value", "endpoint"),
        ({"endpoint": CHAT, "body": {"model": "small"}, "more": 1}, 422, "unknown_parameter", "more"),
        ({"endpoint": CHAT, "body": {"model": "small", "pad": "x" * 100_001}}, 413, "request_too_large", None),
    ],
)
def test_what_cannot_be_run_is_refused(
    place: Place, key: str, body: dict[str, Any], status: int, code: str, param: str | None
) -> None:
    answer = place.server.ask("POST", f"/v1/sessions/{key}/requests", body)
    error = answer.json["error"]
    assert (answer.status, error["code"], error["param"]) == (status, code, param)
    assert place.server.ask("GET", f"/v1/sessions/{key}").status == 404


@pytest.mark.parametrize("odd", ["%00", "a%0Ab", "x" * 257, "a%2Fb"])
def test_odd_keys_are_refused(place: Place, odd: str) -> None:
    answer = place.server.ask("POST", f"/v1/sessions/{odd}/requests", asking("x"))
    assert answer.status in (400, 404), answer.content


# -- looking


def test_requests_are_listed_in_order_page_by_page(place: Place, key: str) -> None:
    ids = [place.send(key, f"{number}").json["id"] for number in range(5)]
    first = place.get(f"/{key}/requests?limit=2")
    assert ([entry["id"] for entry in first["data"]], first["has_more"]) == (ids[:2], True)
    rest = place.get(f"/{key}/requests?limit=3&after={first['last_id']}")
    assert ([entry["id"] for entry in rest["data"]], rest["has_more"]) == (ids[2:], False)
    assert place.get(f"/{key}/requests?status=failed")["data"] == []
    newest = place.get(f"/{key}/requests?limit=3&order=desc")
    assert ([entry["id"] for entry in newest["data"]], newest["has_more"]) == (ids[:1:-1], True)
    oldest = place.get(f"/{key}/requests?limit=3&order=desc&after={newest['last_id']}")
    assert ([entry["id"] for entry in oldest["data"]], oldest["has_more"]) == (ids[1::-1], False)


def test_sessions_are_listed_newest_first(place: Place, key: str) -> None:
    keys = [f"{key}-{number}" for number in range(3)]
    for name in keys:
        place.send(name, "x")
    page = place.get("?limit=2")
    assert [entry["key"] for entry in page["data"]] == [keys[2], keys[1]]
    assert page["has_more"]
    assert place.get(f"?limit=1&after={page['last_id']}")["data"][0]["key"] == keys[0]


def test_what_is_not_there_is_not_found(place: Place, key: str) -> None:
    assert place.server.ask("GET", f"/v1/sessions/{key}").status == 404
    assert place.server.ask("GET", f"/v1/sessions/{key}/requests").status == 404
    known = place.send(key, "x").json["id"]
    for text in ("sreq_" + "0" * 32, "nonsense", known[:-1]):
        assert place.server.ask("GET", f"/v1/sessions/{key}/requests/{text}").status == 404
    assert place.server.ask("GET", f"/v1/sessions/{key}-other/requests/{known}").status == 404


# -- steering


def test_a_queued_request_can_be_cancelled_and_is_never_sent(place: Place, key: str) -> None:
    head = place.queue(key, f"hold {key}")
    victim = place.queue(key, f"never {key}")
    place.upstream.wait_called(f"hold {key}")
    path = f"/v1/sessions/{key}/requests/{victim['id']}"
    for _ in range(2):
        answer = place.server.ask("DELETE", path)
        assert (answer.status, answer.json["status"]) == (200, "cancelled")
    answer = place.server.ask("DELETE", f"/v1/sessions/{key}/requests/{head['id']}")
    assert (answer.status, answer.headers["x-should-retry"]) == (409, "false")
    place.upstream.release(key)
    assert place.send(key, "after").json["sequence"] == 3
    assert f"never {key}" not in place.upstream.texts
    assert place.get(f"/{key}/requests/{victim['id']}")["status"] == "cancelled"


def test_a_full_session_answers_429(place: Place, key: str) -> None:
    put = place.server.ask("PUT", f"/v1/sessions/{key}", {"max_queued": 2})
    assert put.json["max_queued"] == 2
    place.queue(key, f"hold {key}")
    place.upstream.wait_called(f"hold {key}")
    place.queue(key, "1")
    place.queue(key, "2")
    answer = place.send(key, "3")
    assert (answer.status, answer.headers["retry-after"]) == (429, "1")
    assert answer.json["error"]["code"] == "session_queue_full"
    place.upstream.release(key)


def test_a_session_has_a_timeout_of_its_own(place: Place, key: str) -> None:
    place.server.ask("PUT", f"/v1/sessions/{key}", {"wait_timeout_s": 0.1})
    assert place.send(key, f"hold {key}").status == 503
    place.upstream.release(key)


def test_a_dead_head_blocks_if_asked_to_until_somebody_decides(place: Place, key: str) -> None:
    place.server.ask("PUT", f"/v1/sessions/{key}", {"on_dead_head": "block"})
    assert place.send(key, "fail 400").json["status"] == "failed"
    waiting = place.queue(key, f"behind {key}")
    assert place.get(f"/{key}")["status"] == "blocked"
    resumed = place.server.ask("POST", f"/v1/sessions/{key}/resume", {"retry_head": True})
    assert resumed.status == 200
    wait_until(lambda: place.get(f"/{key}")["status"] == "blocked", 30)
    assert f"behind {key}" not in place.upstream.texts
    assert place.server.ask("POST", f"/v1/sessions/{key}/resume").json["status"] == "open"
    assert place.ended(key, waiting["id"])["status"] == "completed"
    assert place.server.ask("POST", f"/v1/sessions/{key}/resume").status == 409


def test_a_deleted_session_is_gone_and_its_callers_are_told(place: Place, key: str) -> None:
    place.queue(key, f"hold {key}")
    with ThreadPoolExecutor(1) as threads:
        caller = threads.submit(place.send, key, f"never {key}")
        wait_until(lambda: place.get(f"/{key}")["queued"] == 1, 30)
        deleted = place.server.ask("DELETE", f"/v1/sessions/{key}")
        assert (deleted.status, deleted.json["deleted"]) == (200, True)
        told = caller.result()
        # The request may be purged before its caller is told of it.
        assert told.status == 404 or told.json["status"] == "cancelled"
    place.upstream.release(key)
    assert place.server.ask("GET", f"/v1/sessions/{key}").status == 404
    assert place.server.ask("DELETE", f"/v1/sessions/{key}").status == 404
    assert place.send(key, "anew").json["sequence"] == 1


# -- callers who go away


def hang_up(place: Place, key: str, text: str, query: str = "") -> dict[str, Any]:
    """Send, see it stored, and leave; the request."""
    with closing(HTTPConnection("127.0.0.1", place.server.port, timeout=30)) as connection:
        headers = {"content-type": "application/json"}
        connection.request("POST", f"/v1/sessions/{key}/requests{query}", json.dumps(asking(text)), headers)
        wait_until(lambda: len(place.get(f"/{key}/requests")["data"]) == 2, 30)
    found: dict[str, Any] = place.get(f"/{key}/requests")["data"][1]
    return found


def test_a_caller_that_goes_away_cancels_nothing(place: Place, key: str) -> None:
    place.queue(key, f"hold {key}")
    request = hang_up(place, key, f"stays {key}")
    place.upstream.release(key)
    assert place.ended(key, request["id"])["status"] == "completed"


def test_unless_it_asked_to(place: Place, key: str) -> None:
    place.queue(key, f"hold {key}")
    request = hang_up(place, key, f"goes {key}", "?cancel_on_disconnect=true")
    wait_until(lambda: place.get(f"/{key}/requests/{request['id']}")["status"] == "cancelled", 30)
    place.upstream.release(key)
    assert place.send(key, "after").json["sequence"] == 3
    assert f"goes {key}" not in place.upstream.texts


def test_models_of_one_session_may_differ(place: Place, key: str) -> None:
    first = place.server.ask("POST", f"/v1/sessions/{key}/requests", asking(f"1 {key}"))
    other = place.server.ask("POST", f"/v1/sessions/{key}/requests", asking(f"2 {key}", model="other"))
    last = place.server.ask("POST", f"/v1/sessions/{key}/requests", asking(f"3 {key}"))
    assert [answer.json["sequence"] for answer in (first, other, last)] == [1, 2, 3]
    assert other.json["response"]["body"]["model"] == "other"

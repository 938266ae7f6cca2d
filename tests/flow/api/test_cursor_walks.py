"""Lists read page by page while objects are made and deleted under them: whatever was there all the time is seen, and
nothing is seen twice."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import psycopg
import pytest

from tests.support.batch_api import jsonl
from tests.support.tenants import TenantGround, tenant_ground
from tests.support.thorough import thorough
from tests.support.wait import wait_until

DEADLINE_S = 60.0
KEPT = 10
"""Objects that are there from beginning to end."""
CHURN = 3
"""Made, and deleted, between any two pages."""
LIMITS = (1, 4) if thorough() else (4,)
"""Of the pages of each walk."""


@dataclass(slots=True)
class Kind:
    """How objects of a kind are made, deleted and listed."""

    path: str
    make: Callable[[TenantGround], str]
    delete: Callable[[TenantGround, str], object]
    tenant: str = "alice"
    cursor: str = "after"
    options: tuple[dict[str, str], ...] = ({},)


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory, server_18: str) -> Iterator[TenantGround]:
    # Half of the calls fail at first, so that there are attempts to walk over. None fails as often as it may be tried.
    mock = ("--error-rate", "0.5", "--seed", "3")
    settings = ("--set", "retry_base_s=0.01", "--set", "retry_cap_s=0.02", "--set", "max_attempts=50")
    with tenant_ground(tmp_path_factory.mktemp("walks"), server_18, *settings, mock=mock) as ground:
        yield ground


def make_file(ground: TenantGround) -> str:
    return ground.put("alice", b"some bytes", purpose="user_data")


def make_batch(ground: TenantGround) -> str:
    return ground.start("alice", jsonl(1))


def make_message_batch(ground: TenantGround) -> str:
    params = {"model": "small", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    asked = {"requests": [{"custom_id": "a", "params": params}]}
    made: str = ground.ok("alice", "POST", "/v1/messages/batches", asked)["id"]
    return made


def delete_message_batch(ground: TenantGround, id_: str) -> None:
    way = f"/v1/messages/batches/{id_}"
    ground.until("alice", way, "processing_status", "ended")
    ground.ok("alice", "DELETE", way)


def make_webhook(ground: TenantGround) -> str:
    hook = {"event_types": ["batch.expired"], "name": "hook", "url": "http://127.0.0.1:9/hook"}
    made: str = ground.ok("alice", "POST", "/v1/webhook_endpoints", hook)["id"]
    return made


def make_key(ground: TenantGround) -> str:
    made: str = ground.ok("root", "POST", "/v1/keys", {"owner": "walker"})["id"]
    return made


def delete_at(path: str) -> Callable[[TenantGround, str], object]:
    return lambda ground, id_: ground.ok("alice", "DELETE", f"{path}/{id_}")


def forget_key(ground: TenantGround, id_: str) -> None:
    """Keys stay in the list when they are revoked; an administrator of the database can still remove one."""
    with psycopg.connect(ground.database, autocommit=True) as connection:
        connection.execute("DELETE FROM penstock.api_keys WHERE id = %s", [id_.removeprefix("key_")])


KINDS = {
    "files": Kind(
        "/v1/files",
        make_file,
        delete_at("/v1/files"),
        options=({"order": "asc"}, {"order": "desc"}, {"purpose": "user_data"}),
    ),
    "batches": Kind(
        "/v1/batches",
        make_batch,
        delete_at("/v1/batches"),
        options=({}, {"status": "in_progress,completed,validating"}, {"created_after": "1"}),
    ),
    "message batches": Kind("/v1/messages/batches", make_message_batch, delete_message_batch, cursor="after_id"),
    "webhook endpoints": Kind("/v1/webhook_endpoints", make_webhook, delete_at("/v1/webhook_endpoints")),
    "keys": Kind("/v1/keys", make_key, forget_key, tenant="root"),
}


def pages(
    ground: TenantGround, tenant: str, path: str, cursor: str, limit: int, options: dict[str, str]
) -> Iterator[Any]:
    """Page after page, as the official clients read them: on from the last object for as long as there is more."""
    query = {**options, "limit": str(limit)}
    while True:
        page = ground.ok(tenant, "GET", f"{path}?{urlencode(query)}")
        assert len(page["data"]) <= limit
        assert [page["first_id"], page["last_id"]] == (
            [page["data"][0]["id"], page["data"][-1]["id"]] if page["data"] else [None, None]
        )
        yield page
        if not page["has_more"]:
            return
        assert page["data"], "there is more, but nothing to go on from"
        query[cursor] = page["last_id"]


@pytest.mark.parametrize("name", KINDS)
def test_walks_over_what_changes(ground: TenantGround, name: str) -> None:
    kind = KINDS[name]
    chance = random.Random(name)
    kept: list[str] = []
    passing: list[str] = []
    for _ in range(KEPT):
        kept.append(kind.make(ground))
        passing.append(kind.make(ground))
    for limit in LIMITS:
        for options in kind.options:
            seen: list[str] = []
            for page in pages(ground, kind.tenant, kind.path, kind.cursor, limit, options):
                seen += [entry["id"] for entry in page["data"]]
                if len(passing) < CHURN:
                    passing += [kind.make(ground) for _ in range(CHURN)]
                for _ in range(CHURN):
                    # The one that the walk will go on from, too.
                    last = [one for one in passing if one == page["last_id"]]
                    gone = last[0] if last else chance.choice(passing)
                    passing.remove(gone)
                    kind.delete(ground, gone)
                    if len(seen) < 2 * KEPT:  # a walk towards the newest would never end otherwise
                        passing.append(kind.make(ground))
                    if not passing:
                        break
            assert len(seen) == len(set(seen)), options
            assert set(kept) <= set(seen), options
            assert seen == sorted(seen, reverse=options.get("order") != "asc")
    for id_ in passing + kept:
        kind.delete(ground, id_)


def test_message_batches_are_walked_backwards(ground: TenantGround) -> None:
    kept = [make_message_batch(ground) for _ in range(12)]
    passing = [make_message_batch(ground) for _ in range(12)]
    seen: list[str] = []
    query = {"limit": "3", "before_id": kept[0]}
    while True:
        page = ground.ok("alice", "GET", f"/v1/messages/batches?{urlencode(query)}")
        ids = [entry["id"] for entry in page["data"]]
        assert ids == sorted(ids, reverse=True)
        seen += reversed(ids)
        if passing:
            delete_message_batch(ground, passing.pop())
        if not page["has_more"]:
            break
        query["before_id"] = page["first_id"]
    assert len(seen) == len(set(seen))
    assert set(kept[1:]) <= set(seen)
    for id_ in kept + passing:
        delete_message_batch(ground, id_)


# -- inside a batch, while it runs


@contextmanager
def busy_batch(ground: TenantGround, lines: int) -> Iterator[str]:
    """A batch whose requests fail and are tried again while the block reads about it."""
    batch_id = ground.start("alice", jsonl(lines, prefix="walk"))
    path = f"/v1/batches/{batch_id}"
    wait_until(lambda: ground.ok("alice", "GET", f"{path}/attempts?limit=1")["data"], DEADLINE_S)
    yield batch_id
    ground.until("alice", path, "status", "completed")


def test_results_are_walked_while_they_arrive(ground: TenantGround) -> None:
    lines = 300
    with busy_batch(ground, lines) as batch_id:
        path = f"/v1/batches/{batch_id}/results"
        for limit in (7, 100, 29):
            seen = [
                entry["custom_id"]
                for page in pages(ground, "alice", path, "after", limit, {})
                for entry in page["data"]
            ]
            assert seen == [f"walk{number}" for number in range(lines)]
        for status in ("completed", "pending,processing"):
            listed = [
                entry["line"]
                for page in pages(ground, "alice", path, "after", 11, {"status": status})
                for entry in page["data"]
            ]
            assert listed == sorted(set(listed))
    done = [
        entry["line"]
        for page in pages(ground, "alice", path, "after", 31, {"status": "completed"})
        for entry in page["data"]
    ]
    assert done == list(range(1, lines + 1))


def test_attempts_are_walked_while_they_are_made(ground: TenantGround) -> None:
    with busy_batch(ground, 300) as batch_id:
        path = f"/v1/batches/{batch_id}/attempts"
        for limit in (5, 100, 17):
            before = _attempts(ground, batch_id)
            seen = [entry["id"] for page in pages(ground, "alice", path, "after", limit, {}) for entry in page["data"]]
            assert len(seen) == len(set(seen))
            assert len(seen) >= before
    total = _attempts(ground, batch_id)
    seen = [entry["id"] for page in pages(ground, "alice", path, "after", 13, {}) for entry in page["data"]]
    assert len(seen) == len(set(seen)) == total


def _attempts(ground: TenantGround, batch_id: str) -> int:
    query = "SELECT count(*) FROM penstock.attempts a JOIN penstock.lanes l ON l.id = a.lane_id WHERE l.batch_id = %s"
    with psycopg.connect(ground.database, autocommit=True) as connection:
        (row,) = connection.execute(query.encode(), [batch_id.removeprefix("batch_")]).fetchall()
    return int(row[0])


def test_output_is_followed_from_offset_to_offset(ground: TenantGround) -> None:
    """Lines in the order in which they were recorded: none twice, none missing, whenever one asks."""
    lines = 300
    with busy_batch(ground, lines) as batch_id:
        output = ground.ok("alice", "GET", f"/v1/batches/{batch_id}")["output_file_id"]
        content: list[bytes] = []
        whole = False
        while not whole:
            answer = ground.ask("alice", "GET", f"/v1/files/{output}/content?offset={len(content)}")
            assert answer.status == 200
            content += answer.content.splitlines()
            assert int(answer.headers["x-last-line"]) == len(content)
            whole = answer.headers["x-incomplete"] == "false"
    assert len(content) == len(set(content)) == lines

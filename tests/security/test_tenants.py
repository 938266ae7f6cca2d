"""S13: what belongs to another tenant is answered exactly like what does not exist, on every route there is.

The matrix is made from the routes that the application serves. A new route is in it by itself; one that takes a body
has to say here what a good one looks like, so that its handler is really reached.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import psycopg
import pytest

from penstock.api.app import endpoints
from penstock.api.endpoint import Endpoint, Nothing, Role
from tests.support.batch_api import ENDPOINT, jsonl
from tests.support.server import Answered
from tests.support.tenants import (
    DEADLINE_S,
    TENANTS,
    TenantGround,
    digest_rows,
    form,
    furnish,
    sibling,
    tenant_ground,
)
from tests.support.wait import wait_until

VARIABLE = re.compile(r"{(\w+)(?::\w+)?}")
TABLES = (
    *("files", "file_lanes", "file_chunks", "templates", "batches", "lanes", "leases", "outcomes", "deferrals"),
    *("uploads", "upload_parts", "webhook_endpoints", "webhook_deliveries", "erasures", "api_keys", "jobs"),
    *("operations", "job_errors", "audit", "quotas", "reservations"),
)
# Which of a tenant's objects each variable part of a path names.
NAMED_BY = {
    "file_id": ("file", "output file", "error file", "running output file"),
    "batch_id": ("batch", "running batch"),
    "message_batch_id": ("message batch",),
    "upload_id": ("upload",),
    "webhook_endpoint_id": ("webhook endpoint",),
    "erasure_id": ("erasure",),
    "key_id": ("key",),
    "job_id": ("job", "paused job"),
    "work_id": ("job", "paused job", "batch", "running batch", "message batch"),
    "operation_id": (),
    "row": (),
    "request_id": (),
    # Names, not ids: everybody's, or everybody's own.
    "model": (),
    "name": (),
    "key": (),
    "owner": (),
}
NAMES = {"model", "name", "key", "owner"}
BODIES: Mapping[str, Any] = {
    "/v1/batches/{batch_id}/retry": {},
    "/api/jobs/{job_id}/reprocess": {"scope": "job"},
    "/v1/uploads/{upload_id}/complete": {"part_ids": ["part_" + "0" * 32]},
    "/v1/webhook_endpoints/{webhook_endpoint_id}": {"name": "mine now", "url": "http://127.0.0.1:9/mine"},
    "/v1/webhook_endpoints/{webhook_endpoint_id}/rotate_secret": {"keep_old_secret_active_for_24_hours": True},
    "/v1/webhook_endpoints/{webhook_endpoint_id}/test": {"event_type": "batch.failed"},
}
_OF_ITS_OWN = {"date", "x-request-id", "request-id"}


@dataclass(frozen=True, slots=True)
class Furnished:
    ground: TenantGround
    ids: Mapping[str, str]


@pytest.fixture(scope="module")
def furnished(tmp_path_factory: pytest.TempPathFactory, server_18: str) -> Iterator[Furnished]:
    # The last two own nothing, whatever the tests do.
    tenants: dict[str, Role] = {**TENANTS, "carol": "user", "warden": "admin"}
    options = ("--set", "pending_dashboard=true")
    with tenant_ground(tmp_path_factory.mktemp("tenants"), server_18, *options, tenants=tenants) as ground:
        yield Furnished(ground, furnish(ground, "alice"))


# What other tests have begun, and servers end by themselves.
MOVING = (
    "erasures WHERE finished_at IS NULL",
    "upload_parts p WHERE p.upload_id IN (SELECT id FROM penstock.uploads WHERE cancelled_at IS NOT NULL)",
    "batches WHERE deleted_at IS NULL AND state NOT IN ('paused', 'completed', 'failed', 'cancelled', 'expired')",
)


def rows_at_rest(ground: TenantGround) -> dict[str, tuple[int, str]]:
    """What is stored, once nothing changes it but requests."""
    with psycopg.connect(ground.database, autocommit=True) as connection:
        for moving in MOVING:
            wait_until(partial(_finds_none, connection, f"SELECT FROM penstock.{moving} LIMIT 1"), DEADLINE_S)
    ground.until_still()
    return digest_rows(ground.database, TABLES)


def _finds_none(connection: psycopg.Connection, query: str) -> bool:
    return connection.execute(query.encode()).fetchall() == []


def routes() -> list[Endpoint]:
    return [endpoint for endpoint in endpoints() if endpoint.role != "anyone"]


def with_ids() -> list[Endpoint]:
    """What is made under a name that the caller chooses is not among them: there is nothing to find."""
    found = [endpoint for endpoint in routes() if VARIABLE.search(endpoint.path)]
    return [endpoint for endpoint in found if endpoint.method == "GET" or variable(endpoint) not in NAMES]


def named(endpoint: Endpoint) -> str:
    return f"{endpoint.method} {endpoint.path}"


def call(ground: TenantGround, tenant: str | None, endpoint: Endpoint, path: str, method: str = "") -> Answered:
    """A request that has nothing wrong with it but, perhaps, the id."""
    body: Any = None
    headers = {}
    if endpoint.form is not None:
        body, headers["content-type"] = form({"data": b"theirs"})
    elif endpoint.body is not None and endpoint.body != Nothing | None:
        body = BODIES[endpoint.path]
    return ground.ask(tenant, method or endpoint.method, path, body, headers=headers)


def comparable(answer: Answered, id_: str) -> tuple[int, dict[str, str], bytes]:
    headers = {name: value for name, value in answer.headers.items() if name not in _OF_ITS_OWN}
    told = answer.content.replace(id_.encode(), b"ID")
    return answer.status, headers, re.sub(rb'"request_id":"req_[0-9a-f]+"', b"", told)


def variable(endpoint: Endpoint) -> str:
    """The part of a path that names an object; the last, if there are several."""
    return str(VARIABLE.findall(endpoint.path)[-1])


@pytest.mark.parametrize("endpoint", with_ids(), ids=named)
def test_somebody_elses_object_answers_like_none(furnished: Furnished, endpoint: Endpoint) -> None:
    ground, kinds = furnished.ground, NAMED_BY[variable(endpoint)]
    before = rows_at_rest(ground)
    for kind, id_ in furnished.ids.items():
        unknown = sibling(id_)
        for method in (endpoint.method, "HEAD") if endpoint.method == "GET" else (endpoint.method,):
            theirs, nobodys = (
                comparable(call(ground, "bob", endpoint, VARIABLE.sub(which, endpoint.path), method), which)
                for which in (id_, unknown)
            )
            assert theirs == nobodys, (kind, method)
            if kinds:
                assert theirs[0] == (403 if endpoint.role == "admin" else 404), (kind, method, theirs)
    assert digest_rows(ground.database, TABLES) == before


READS = [endpoint for endpoint in with_ids() if endpoint.method == "GET" and NAMED_BY[variable(endpoint)]]


@pytest.mark.parametrize("endpoint", READS, ids=named)
def test_its_owner_and_an_admin_do_find_it(furnished: Furnished, endpoint: Endpoint) -> None:
    """Otherwise nothing would be shown by nobody else finding it."""
    for kind in NAMED_BY[variable(endpoint)]:
        path = VARIABLE.sub(furnished.ids[kind], endpoint.path)
        if path.endswith("/events") and kind == "running batch":
            continue  # it would be followed for as long as it runs
        for tenant in ("alice", "root"):
            assert furnished.ground.ask(tenant, "GET", path).status == 200, (kind, tenant)


def test_every_kind_of_id_is_named_by_some_route(furnished: Furnished) -> None:
    found = {kind for endpoint in with_ids() for kind in NAMED_BY[variable(endpoint)]}
    assert set(furnished.ids) - found == {"part", "deleted file"}


LISTS = [endpoint for endpoint in routes() if endpoint.query is not None and not VARIABLE.search(endpoint.path)]
LISTS = [endpoint for endpoint in LISTS if endpoint.method == "GET" and endpoint.role == "user"]
# Files that an adapter found are the operator's doing, not the tenant's: flow/api/test_api_ingestion.py has some.
# Ticks are a stream of what /api/work lists: flow/console/test_work.py reads it.
LISTS = [endpoint for endpoint in LISTS if endpoint.path not in ("/api/ingestion/files", "/api/ticks")]


@pytest.mark.parametrize("endpoint", LISTS, ids=named)
def test_lists_show_only_ones_own(furnished: Furnished, endpoint: Endpoint) -> None:
    ground = furnished.ground
    entries = {"/api/jobs": "jobs", "/api/pending": "items", "/api/work": "work"}.get(endpoint.path, "data")
    assert ground.ok("alice", "GET", endpoint.path)[entries]
    nothing = ground.ask("carol", "GET", endpoint.path)
    assert nothing.json[entries] == []
    assert {nothing.json.get(place) for place in ("first_id", "last_id", "next")} == {None}
    # An admin's lists are their own, too.
    assert ground.ok("warden", "GET", endpoint.path)[entries] == []
    # Whoever says that they are somebody else is not believed.
    for query in ("owner=alice", "tenant_id=alice", "scope=all", "limit=100&owner=alice"):
        assert ground.ask("carol", "GET", f"{endpoint.path}?{query}").json == nothing.json
    # Nor does somebody else's id as a cursor tell whether it is one.
    assert endpoint.query is not None
    cursors = {"after", "after_id", "before_id"} & set(endpoint.query.__struct_fields__)
    assert cursors
    for name in cursors:
        for kind, id_ in furnished.ids.items():
            theirs, nobodys = (
                comparable(ground.ask("carol", "GET", f"{endpoint.path}?{name}={which}"), which)
                for which in (id_, sibling(id_))
            )
            assert theirs == nobodys, (name, kind)


def test_ids_in_bodies_are_no_way_round(furnished: Furnished) -> None:
    ground, ids = furnished.ground, furnished.ids
    before = rows_at_rest(ground)
    asked = {"endpoint": ENDPOINT, "completion_window": "24h"}
    for kind, id_ in ids.items():
        for who in ("bob", "root"):
            theirs, nobodys = (
                comparable(ground.ask(who, "POST", "/v1/batches", {**asked, "input_file_id": which}), which)
                for which in (id_, sibling(id_))
            )
            assert theirs == nobodys, kind
            assert theirs[0] == 404
    assert digest_rows(ground.database, TABLES) == before


def test_somebody_elses_part_cannot_be_built_in(furnished: Furnished) -> None:
    ground, ids = furnished.ground, furnished.ids
    opened = {"bytes": 3, "filename": "f", "mime_type": "text/plain", "purpose": "batch"}
    upload = ground.ok("bob", "POST", "/v1/uploads", opened)["id"]
    theirs, nobodys = (
        comparable(ground.ask("bob", "POST", f"/v1/uploads/{upload}/complete", {"part_ids": [which]}), which)
        for which in (ids["part"], sibling(ids["part"]))
    )
    assert theirs == nobodys
    assert theirs[0] == 400
    # Nor one's own part into somebody else's upload.
    content, kind = form({"data": b"abc"})
    headers = {"content-type": kind}
    ground.ok("bob", "POST", f"/v1/uploads/{upload}/parts", content, headers=headers)
    assert ground.ask("bob", "POST", f"/v1/uploads/{ids['upload']}/parts", content, headers=headers).status == 404
    ground.ok("bob", "POST", f"/v1/uploads/{upload}/cancel")


def test_requests_of_another_batch_cannot_be_named(furnished: Furnished) -> None:
    ground, ids = furnished.ground, furnished.ids
    request_id = f"batch_req_{ids['batch'].removeprefix('batch_')}_1"
    mine = ground.start("bob", jsonl(2))
    for path in (f"/v1/batches/{mine}/results?after=", f"/v1/batches/{mine}/attempts?request_id="):
        theirs, nobodys = (
            comparable(ground.ask("bob", "GET", path + which), which)
            for which in (request_id, sibling(request_id[:-2]) + "_1")
        )
        assert theirs == nobodys
        assert theirs[0] == 400
    assert ground.ask("bob", "POST", f"/v1/batches/{mine}/retry", {"request_ids": [request_id]}).status == 400
    ground.ok("bob", "DELETE", f"/v1/batches/{mine}")


def test_operations_are_out_of_reach(furnished: Furnished) -> None:
    """The matrix has one id for all parts of a path; here the job and its operation both are somebody's."""
    ground, job = furnished.ground, furnished.ids["job"]
    operation = ground.ask("alice", "POST", f"/api/jobs/{job}/reprocess", {"scope": "job"}).json["operationId"]
    path = f"/api/jobs/{job}/operations/{operation}"
    ground.until("alice", path, "state", "DONE")
    for method, rest, theirs in (("GET", "", 200), ("POST", "/cancel", 409)):
        assert ground.ask("alice", method, path + rest).status == theirs
        told, nobodys = (
            comparable(ground.ask("bob", method, f"/api/jobs/{which}/operations/{operation}{rest}"), which)
            for which in (job, sibling(job))
        )
        assert told == nobodys
        assert told[0] == 404


def test_idempotency_keys_are_everybodys_own(furnished: Furnished) -> None:
    ground = furnished.ground
    headers = {"idempotency-key": "same", "content-type": "text/plain"}
    put = ("PUT", "/v1/files?purpose=batch", jsonl(2))
    files = {who: ground.ok(who, *put, headers=headers)["id"] for who in ("alice", "bob")}
    assert files["alice"] != files["bob"]
    asked = {"endpoint": ENDPOINT, "completion_window": "24h"}
    opened = {"bytes": 3, "filename": "f", "mime_type": "text/plain", "purpose": "batch"}
    keyed = {"idempotency-key": "same"}
    made = {
        who: (
            ground.ok(who, "POST", "/v1/batches", {**asked, "input_file_id": files[who]}, headers=keyed)["id"],
            ground.ok(who, "POST", "/v1/uploads", opened, headers=keyed)["id"],
        )
        for who in files
    }
    assert not set(made["alice"]) & set(made["bob"])
    for who, file_id in files.items():
        assert ground.ok(who, *put, headers=headers)["id"] == file_id
        ground.until(who, f"/v1/batches/{made[who][0]}", "status", "completed")
        ground.ok(who, "DELETE", f"/v1/files/{file_id}")
        ground.ok(who, "POST", f"/v1/uploads/{made[who][1]}/cancel")


# -- sessions: named by keys that every owner chooses for itself

STEERING = [one for one in routes() if one.path.startswith("/v1/sessions/{key}") and one.method != "GET"]
MAKING = {"PUT /v1/sessions/{key}", "POST /v1/sessions/{key}/requests"}
ASKED = {"endpoint": ENDPOINT, "body": {"model": "small", "messages": [{"role": "user", "content": "hello"}]}}
SESSION_BODIES = {
    "PUT /v1/sessions/{key}": {"on_dead_head": "block", "max_queued": 1},
    "POST /v1/sessions/{key}/requests": ASKED,
    "POST /v1/sessions/{key}/resume": {"retry_head": True},
}


@pytest.fixture(scope="module")
def session(furnished: Furnished) -> tuple[str, str]:
    """A session of alice's with one request: its key, and the request's id."""
    answered = furnished.ground.ok("alice", "POST", "/v1/sessions/alices/requests", ASKED)
    return "alices", answered["id"]


def rows_of_alice(database: str) -> list[Any]:
    query = "SELECT count(*), md5(string_agg(t::text, '|' ORDER BY t::text)) FROM penstock.{} t WHERE owner = 'alice'"
    with psycopg.connect(database, autocommit=True) as connection:
        tables = ("sessions", "session_requests", "lanes")
        return [connection.execute(query.format(table).encode()).fetchone() for table in tables]


@pytest.mark.parametrize("endpoint", STEERING, ids=named)
@pytest.mark.parametrize("tenant", ["bob", "root"])
def test_somebody_elses_session_is_out_of_reach(
    furnished: Furnished, session: tuple[str, str], endpoint: Endpoint, tenant: str
) -> None:
    ground, (key, request_id) = furnished.ground, session
    before = rows_of_alice(ground.database)
    answers: list[tuple[Any, ...]] = []
    for which in (key, "nobody"):  # as long, so that lengths can be compared
        path = endpoint.path.replace("{key}", which).replace("{request_id}", request_id)
        answer = ground.ask(tenant, endpoint.method, path, SESSION_BODIES.get(named(endpoint)))
        # What was made is one's own, under the same name.
        answers.append((answer.status,) if named(endpoint) in MAKING else comparable(answer, which))
        ground.ask(tenant, "DELETE", f"/v1/sessions/{which}")
    assert answers[0] == answers[1]
    assert answers[0][0] == (200 if named(endpoint) in MAKING else 404)
    assert rows_of_alice(ground.database) == before


def test_priority_above_the_default_is_given_by_the_operator(furnished: Furnished) -> None:
    ground = furnished.ground
    for priority, status in ((0, 200), (-5, 200), (1, 403), (100, 403)):
        assert ground.ask("bob", "PUT", "/v1/sessions/urgent", {"priority": priority}).status == status
    ground.ok("root", "PUT", "/v1/sessions/urgent", {"priority": 100})
    for tenant in ("bob", "root"):
        ground.ok(tenant, "DELETE", "/v1/sessions/urgent")


@pytest.mark.parametrize("endpoint", [one for one in routes() if one.role == "admin"], ids=named)
def test_what_is_for_admins_is_refused_before_anything_is_looked_at(furnished: Furnished, endpoint: Endpoint) -> None:
    ground = furnished.ground
    for id_ in (furnished.ids["key"], "key_" + "0" * 32, "nonsense"):
        path = VARIABLE.sub(id_, endpoint.path)
        for body in (None, b"", b"{nonsense", {"owner": "bob", "role": "admin"}):
            refused = ground.ask("bob", endpoint.method, path, body if endpoint.method != "GET" else None)
            assert refused.status == 403
            assert refused.json["error"]["type"] == "permission_error"


@pytest.mark.parametrize("endpoint", endpoints(), ids=named)
def test_without_a_key_only_health_answers(furnished: Furnished, endpoint: Endpoint) -> None:
    ground = furnished.ground
    for id_ in (*furnished.ids.values(), "nonsense"):
        path = VARIABLE.sub(id_, endpoint.path)
        answer = ground.ask(None, endpoint.method, path)
        if endpoint.role == "anyone":
            assert answer.status == 200
            continue
        assert answer.status == 401, path
        assert answer.headers["www-authenticate"] == "Bearer"
        assert id_.encode() not in answer.content
        if path == endpoint.path:
            break


def test_without_a_key_no_path_tells_whether_it_exists(furnished: Furnished) -> None:
    known, unknown = (comparable(furnished.ground.ask(None, "GET", path), "-") for path in ("/v1/files", "/v1/nothing"))
    assert known == unknown
    assert {one.path for one in endpoints() if one.role == "anyone"} == {"/healthz", "/readyz"}
    for path in ("/metrics", "/docs", "/openapi.json", "/", "/admin"):
        assert furnished.ground.ask(None, "GET", path).status == 401

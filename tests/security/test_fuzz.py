"""Every operation with ids that exist and values that do not belong there: no request makes the server fail.

`make fuzz REQUESTS=100000 SEED=7` sends more; `make test` a few of each operation.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock.api.app import endpoints
from penstock.console.views import PAGES
from tests.support.batch_api import ENDPOINT, jsonl
from tests.support.fuzz import Good, is_fault, make_requests, send
from tests.support.images import png
from tests.support.tenants import TenantGround, form, furnish, tenant_ground

REQUESTS = int(os.environ.get("FUZZ_REQUESTS", "600"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
CHAT = {"model": "small", "messages": [{"role": "user", "content": "hello"}]}
PROMPT = {"type": "chat", "provider": "default", "model": "small", "prompt": "{{ a }}"}
FETCH = {
    **{"type": "http", "provider": "default", "method": "POST", "path": "/x/{{ a }}", "query": {"q": "{{ a }}"}},
    **{"headers": {"x-a": "b"}, "body": {"a": ["{{ a }}"]}, "columns": {"b": "c[0].d"}},
    "rules": [{"outcome": "fail", "path": "e", "equals": {"f": 1}, "message": "{{ answer }}"}],
    "strategies": [{"name": "s", "body": None}],
}
CONSOLE = {"x-penstock-console": "1", "sec-fetch-site": "same-origin"}
NEVER_DONE = {
    "POST /api/ingestion/scan": "no adapter is configured",
    "POST /v1/webhook_endpoints/{webhook_endpoint_id}/test": "nobody listens at the hook's address",
    "POST /api/jobs/{job_id}/operations/{operation_id}/cancel": "operations over so few rows have ended",
    "POST /v1/keys/{key_id}/revoke": "left out: the requests that follow need their keys",
}
"""Operations that no request here is answered well by, each with the reason."""


def good_requests(ids: Mapping[str, str], spare: Mapping[str, str], secret: str, cookie: str) -> dict[str, Good]:
    """What each operation takes, by method and path."""
    hook = Good({"event_types": ["batch.failed"], "name": "hook", "url": "http://127.0.0.1:9/hook"})
    batch = {"input_file_id": ids["file"], "endpoint": ENDPOINT, "completion_window": "24h", "metadata": {}}
    asked = {"endpoint": ENDPOINT, "body": CHAT}
    event = {
        "specversion": "1.0",
        "id": "1",
        "source": "s",
        "type": "com.penstock.session.request",
        "subject": "fuzz",
        "data": asked,
    }
    session, running, paused = {"key": "fuzz"}, {"batch_id": ids["running batch"]}, {"job_id": ids["paused job"]}
    operation = {"job_id": ids["image job"], "operation_id": ids["operation"]}
    blocked = {"key": "blocked", "request_id": ids["session request"]}
    still = {"work_id": ids["third still batch"]}
    one_hook = "/v1/webhook_endpoints/{webhook_endpoint_id}"
    return {
        "POST /v1/files": Good({"purpose": "batch", "file": jsonl(2)}),
        "PUT /v1/files": Good(jsonl(2), {"content-type": "text/plain"}, "purpose=batch&filename=a.jsonl"),
        "GET /v1/files/{file_id}/content": Good(path={"file_id": ids["output file"]}),
        "POST /v1/uploads": Good({"bytes": 3, "filename": "f", "mime_type": "text/plain", "purpose": "batch"}),
        "POST /v1/uploads/{upload_id}/parts": Good({"data": b"abc"}),
        "POST /v1/uploads/{upload_id}/complete": Good(
            {"part_ids": [ids["line part"]]}, path={"upload_id": ids["line upload"]}
        ),
        "POST /v1/batches": Good(batch),
        "POST /v1/batches/{batch_id}/cancel": Good(path={"batch_id": ids["still batch"]}),
        "POST /v1/batches/{batch_id}/pause": Good(path=running),
        "POST /v1/batches/{batch_id}/resume": Good(path=running),
        "POST /v1/batches/{batch_id}/retry": Good({}, path={"batch_id": ids["failed batch"]}),
        "POST /api/jobs": Good({"spec": {"processor": PROMPT, "columns": {"keep": ["a"]}}, "file": b"a,b\n1,2\n"}),
        "POST /api/jobs/preview": Good({"spec": {"processor": FETCH}, "file": b"a,b\n1,2\n"}),
        "POST /api/jobs/{job_id}/pause": Good(path=paused),
        "POST /api/jobs/{job_id}/resume": Good(path=paused),
        "POST /api/jobs/{job_id}/cancel": Good(path={"job_id": ids["still job"]}),
        "POST /api/jobs/{job_id}/export": Good(query="format=csv"),
        "GET /api/jobs/{job_id}/export": Good(query="format=csv"),
        "GET /api/jobs/{job_id}/items/{row}": Good(path={"row": "1"}),
        "GET /api/jobs/{job_id}/items/{row}/image": Good(path={"job_id": ids["image job"], "row": "1"}),
        "POST /api/work/{work_id}/pause": Good(path=still),
        "POST /api/work/{work_id}/resume": Good(path=still),
        "POST /api/work/{work_id}/cancel": Good(path={"work_id": ids["second still batch"]}),
        "GET /api/ticks": Good(query="home=true"),
        "POST /api/jobs/{job_id}/reprocess": Good({"scope": "job", "statuses": ["DONE"]}),
        "GET /api/jobs/{job_id}/operations/{operation_id}": Good(path=operation),
        "POST /api/jobs/{job_id}/operations/{operation_id}/cancel": Good(path=operation),
        "POST /api/jobs/{job_id}/kickoff": Good(query="durationMs=1"),
        "POST /v1/messages/batches": Good({"requests": [{"custom_id": "a", "params": {**CHAT, "max_tokens": 5}}]}),
        "POST /v1/messages/batches/{message_batch_id}/cancel": Good(
            path={"message_batch_id": ids["still message batch"]}
        ),
        "POST /v1/sessions/{key}/requests": Good(asked, {"prefer": "respond-async"}, "wait=1", session),
        "GET /v1/sessions/{key}/requests": Good(path=session),
        "GET /v1/sessions/{key}/requests/{request_id}": Good(path=blocked),
        "DELETE /v1/sessions/{key}/requests/{request_id}": Good(
            path={**blocked, "request_id": spare["session request"]}
        ),
        "GET /v1/sessions/{key}": Good(path=session),
        "DELETE /v1/sessions/{key}": Good(path={"key": "of bob"}),
        "PUT /v1/sessions/{key}": Good(
            {"on_dead_head": "block", "max_queued": 5, "wait_timeout_s": 1, "priority": 0}, path=session
        ),
        "POST /v1/sessions/{key}/resume": Good({"retry_head": True}, path=blocked),
        "POST /v1/events": Good(event, {"content-type": "application/cloudevents+json"}),
        **dict.fromkeys(("POST /v1/chat/completions", "POST /v1/completions"), Good(CHAT)),
        "POST /v1/responses": Good({"model": "small", "input": "a"}),
        "POST /v1/embeddings": Good({"model": "small", "input": "a"}),
        "POST /v1/moderations": Good({"model": "small", "input": "a"}),
        "POST /v1/messages": Good({**CHAT, "max_tokens": 5}),
        "POST /v1/webhook_endpoints": hook,
        f"POST {one_hook}": hook,
        f"POST {one_hook}/rotate_secret": Good({"keep_old_secret_active_for_24_hours": True}),
        f"POST {one_hook}/test": Good({"event_type": "batch.failed"}),
        "GET /v1/models/{model:path}": Good(path={"model": "small"}),
        "POST /v1/providers/{name}/resume": Good(path={"name": "default"}),
        "POST /v1/keys": Good({"owner": "fuzz", "name": "n", "role": "user", "expires_after_s": 60}),
        "GET /api/limits/{owner:path}": Good(path={"owner": "alice"}),
        "GET /": Good(headers={"accept": "text/html"}),
        "GET /console/static/{name:path}": Good(path={"name": "app/main.js"}),
        "POST /console/session": Good({"key": secret}, CONSOLE),
        "DELETE /console/session": Good(headers={**CONSOLE, "cookie": cookie}),
    }


def furnish_more(ground: TenantGround) -> dict[str, str]:
    """Objects of Alice's that `furnish` makes none of."""
    upload = {"bytes": len(jsonl(1)), "filename": "f.jsonl", "mime_type": "application/jsonl", "purpose": "batch"}
    upload_id = ground.ok("alice", "POST", "/v1/uploads", upload)["id"]
    content, media = form({"data": jsonl(1)})
    part = ground.ok("alice", "POST", f"/v1/uploads/{upload_id}/parts", content, headers={"content-type": media})
    look = json.dumps({"processor": {**PROMPT, "prompt": "{{ name }}"}})
    content, media = form({"spec": look, "file": png(2, 2)}, "a.png")
    job = ground.ok("alice", "POST", "/api/jobs", content, headers={"content-type": media})["jobId"]
    ground.until("alice", f"/api/jobs/{job}", "state", "DONE")
    answer = ground.ask("alice", "POST", f"/api/jobs/{job}/reprocess", {"scope": "job", "statuses": ["DONE"]})
    refused = json.dumps({"custom_id": "a", "method": "POST", "url": ENDPOINT, "body": {"model": "small"}}) + "\n"
    failed = ground.start("alice", refused.encode())
    ground.until("alice", f"/v1/batches/{failed}", "status", "completed")
    with ground.server.frozen_workers():
        asked = {"requests": [{"custom_id": "a", "params": {**CHAT, "max_tokens": 5}}]}
        messages = ground.ok("alice", "POST", "/v1/messages/batches", asked)["id"]
        still = [ground.start("alice", jsonl(2)) for _ in range(3)]
        content, media = form({"spec": json.dumps({"processor": PROMPT}), "file": b"a\n1\n"}, "rows.csv")
        still_job = ground.ok("alice", "POST", "/api/jobs", content, headers={"content-type": media})["jobId"]
        for each in (messages, *still, still_job):
            ground.until("alice", f"/api/work/{each}", "state", "QUEUED")
            ground.ok("alice", "POST", f"/api/work/{each}/pause")
    return {
        "work": job,
        "line upload": upload_id,
        "line part": part["id"],
        "image job": job,
        "operation": answer.json["operationId"],
        "failed batch": failed,
        "still message batch": messages,
        "still batch": still[0],
        "second still batch": still[1],
        "third still batch": still[2],
        "still job": still_job,
        "session request": block_session(ground, "alice"),
    }


def block_session(ground: TenantGround, tenant: str) -> str:
    """A session that is blocked by a request which was refused: the id of one that waits behind it."""
    ground.ok(tenant, "PUT", "/v1/sessions/blocked", {"on_dead_head": "block"})
    for body in ({"model": "small"}, CHAT):
        asked, headers = {"endpoint": ENDPOINT, "body": body}, {"prefer": "respond-async"}
        made = ground.ask(tenant, "POST", "/v1/sessions/blocked/requests", asked, headers=headers)
    waiting: str = made.json["id"]
    return waiting


def sign_in(ground: TenantGround) -> str:
    answer = ground.ask(None, "POST", "/console/session", {"key": ground.keys["alice"]}, headers=CONSOLE)
    return answer.headers["set-cookie"].partition(";")[0]


@pytest.mark.timeout(3 * 3600)
def test_no_request_makes_the_server_fail(tmp_path: Path, server_18: str) -> None:
    # The upstream is quick: a wait is the server's own.
    options = ("--set", "pending_dashboard=true", "--set", "session_wait_timeout_s=1")
    with tenant_ground(tmp_path, server_18, *options, mock=()) as ground:
        found = furnish(ground, "alice") | furnish_more(ground)
        ids = {kind: each for kind, each in found.items() if each}  # with nothing refused there is no error file
        spare = furnish(ground, "bob") | {"session request": block_session(ground, "bob")}
        good = good_requests(ids, spare, ground.keys["alice"], sign_in(ground))
        operations = [each for each in (*endpoints(), *PAGES) if each.path != "/v1/keys/{key_id}/revoke"]
        waiting = {f"{each.method} {each.path}": b"not asked" for each in operations}
        failures = []
        requests = make_requests(operations, ids, good, REQUESTS, SEED, cookie=sign_in(ground), spare=spare)
        for number, sent in enumerate(requests):
            # An admin reaches everybody's objects by id; the owner also what only owners reach.
            admins = sent.operation.role == "admin" if sent.as_it_should_be else number % 2 == 0
            spared = sent.as_it_should_be and sent.method == "DELETE"
            tenant = "bob" if spared else "root" if admins else "alice"
            status, content = send(ground.server.port, ground.keys[tenant], sent)
            if is_fault(sent, status, content):
                failures.append((status, content, sent))
            name = f"{sent.operation.method} {sent.operation.path}"
            if status is not None and status < 400 and sent.method == sent.operation.method:
                waiting.pop(name, None)
            elif name in waiting and sent.as_it_should_be:
                waiting[name] = content[:200]
        assert failures == []
        assert {name: why for name, why in waiting.items() if name not in NEVER_DONE} == {}
        assert [line for line in ground.server.log.splitlines() if " ERROR " in line or "Traceback" in line] == []
        assert ground.ask("alice", "GET", "/v1/files").status == 200

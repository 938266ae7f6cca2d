"""Every operation with ids that exist and values that do not belong there: no request makes the server fail.

`make fuzz REQUESTS=100000 SEED=7` sends more; `make test` a few of each operation.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.api.app import endpoints
from tests.support.batch_api import ENDPOINT
from tests.support.fuzz import is_fault, make_requests, send
from tests.support.tenants import furnish, tenant_ground

REQUESTS = int(os.environ.get("FUZZ_REQUESTS", "600"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
CHAT = {"model": "small", "messages": [{"role": "user", "content": "hello"}]}
ROWS = {"processor": {"type": "chat", "provider": "default", "model": "small", "prompt": "{{ a }}"}}


def good_bodies(ids: dict[str, str]) -> dict[str, object]:
    """What each operation takes, to be changed in one place."""
    hook = {"event_types": ["batch.failed"], "name": "hook", "url": "http://127.0.0.1:9/hook"}
    one = "/v1/webhook_endpoints/{webhook_endpoint_id}"
    return {
        "/v1/batches": {"input_file_id": ids["file"], "endpoint": ENDPOINT, "completion_window": "24h", "metadata": {}},
        "/v1/batches/{batch_id}/retry": {"request_ids": [f"batch_req_{ids['batch'].removeprefix('batch_')}_1"]},
        "/v1/uploads": {"bytes": 3, "filename": "f", "mime_type": "text/plain", "purpose": "batch"},
        "/v1/uploads/{upload_id}/complete": {"part_ids": [ids["part"]], "md5": "x"},
        "/v1/webhook_endpoints": hook,
        one: hook,
        f"{one}/rotate_secret": {"keep_old_secret_active_for_24_hours": True},
        f"{one}/test": {"event_type": "batch.failed"},
        "/v1/messages/batches": {"requests": [{"custom_id": "a", "params": {**CHAT, "max_tokens": 5}}]},
        "/v1/keys": {"owner": "fuzz", "name": "n", "role": "user", "expires_after_s": 60},
        "/v1/sessions/{key}": {"on_dead_head": "block", "max_queued": 5, "wait_timeout_s": 1, "priority": 0},
        "/v1/sessions/{key}/requests": {"endpoint": ENDPOINT, "body": CHAT},
        "/v1/sessions/{key}/resume": {"retry_head": True},
        "/v1/events": {"specversion": "1.0", "id": "1", "source": "s", "type": "penstock.request", "subject": "fuzz"},
        "/api/jobs": {"spec": ROWS},
        "/api/jobs/{job_id}/reprocess": {"scope": "items", "itemIds": ["1"], "statuses": ["ERROR"]},
        **dict.fromkeys(("/v1/chat/completions", "/v1/messages", "/v1/completions", "/v1/embeddings"), CHAT),
    }


@pytest.mark.timeout(3 * 3600)
def test_no_request_makes_the_server_fail(tmp_path: Path, server_18: str) -> None:
    # The upstream is quick: a wait is the server's own.
    options = ("--set", "pending_dashboard=true", "--set", "session_wait_timeout_s=1")
    with tenant_ground(tmp_path, server_18, *options) as ground:
        ids = furnish(ground, "alice")
        operations = [each for each in endpoints() if each.path != "/v1/keys/{key_id}/revoke"]
        failures = []
        for number, sent in enumerate(make_requests(operations, ids, good_bodies(ids), REQUESTS, SEED)):
            # An admin reaches everybody's objects by id; the owner also what only owners reach.
            tenant = ("root", "alice")[number % 2]
            status, content = send(ground.server.port, ground.keys[tenant], sent)
            if is_fault(sent, status, content):
                failures.append((status, content, sent))
        assert failures == []
        assert [line for line in ground.server.log.splitlines() if " ERROR " in line or "Traceback" in line] == []
        assert ground.ask("alice", "GET", "/v1/files").status == 200

"""A server with several tenants, and one object of every kind that belongs to the first of them.

    with tenant_ground(tmp_path, server_18) as ground:
        ground.ask("bob", "GET", "/v1/files")
        belongings = furnish(ground, "alice")

The upstream refuses some requests for good, so that batches have both an output and an error file.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode
from uuid import uuid4

import psycopg
from psycopg.conninfo import make_conninfo

from penstock.api import keys
from penstock.api.endpoint import Role
from tests.support.batch_api import ENDPOINT, jsonl
from tests.support.cli import PENSTOCK
from tests.support.db import connected, with_connection
from tests.support.mock_process import MockProcess, start_mock_process
from tests.support.server import Answered, ServerProcess, served
from tests.support.wait import wait_until

DEADLINE_S = 60.0
TENANTS: Mapping[str, Role] = {"alice": "user", "bob": "user", "root": "admin"}
LINES = 40
MANY_LINES = 2_000


@dataclass(frozen=True, slots=True)
class TenantGround:
    server: ServerProcess
    mock: MockProcess
    database: str
    keys: Mapping[str, str]
    key_ids: Mapping[str, str]

    def ask(self, tenant: str | None, method: str, path: str, body: Any = None, **options: Any) -> Answered:
        """One request with a tenant's key, or with none."""
        return self.server.ask(method, path, body, key=None if tenant is None else self.keys[tenant], **options)

    def ok(self, tenant: str, method: str, path: str, body: Any = None, **options: Any) -> Any:
        answer = self.ask(tenant, method, path, body, **options)
        assert answer.status == 200, (method, path, answer.status, answer.content[:500])
        return answer.json

    def put(self, tenant: str, content: bytes, **query: str) -> str:
        query = {"purpose": "batch", "filename": "requests.jsonl", **query}
        way = f"/v1/files?{urlencode(query)}"
        found: str = self.ok(tenant, "PUT", way, content, headers={"content-type": "text/plain"})["id"]
        return found

    def start(self, tenant: str, content: bytes, **fields: Any) -> str:
        """A batch over these lines."""
        body = {"endpoint": ENDPOINT, "completion_window": "24h", "input_file_id": self.put(tenant, content), **fields}
        found: str = self.ok(tenant, "POST", "/v1/batches", body)["id"]
        return found

    def until(self, tenant: str, path: str, field: str, *values: str) -> Any:
        """The object, as soon as its field has one of these values."""
        seen: list[Any] = []

        def arrived() -> bool:
            seen.append(self.ok(tenant, "GET", path))
            return seen[-1][field] in values

        arrived.__qualname__ = f"{path}: {field} is {' or '.join(values)}"
        wait_until(arrived, DEADLINE_S)
        return seen[-1]

    def until_still(self) -> None:
        """Wait until nothing is in flight, to be tried again, or being read."""
        with psycopg.connect(self.database, autocommit=True) as connection:
            for moving in ("leases", "deferrals WHERE NOT held", "jobs WHERE ingested_at IS NULL"):
                count = f"SELECT count(*) FROM penstock.{moving}".encode()
                wait_until(partial(_finds_none, connection, count), DEADLINE_S)


@contextmanager
def tenant_ground(
    directory: Path,
    server: str,
    *options: str | Path,
    mock: tuple[str, ...] = ("--reject-rate", "0.3", "--seed", "7"),
    tenants: Mapping[str, Role] = TENANTS,
    env: Mapping[str, str] | None = None,
    workers: int = 1,
    program: Sequence[str] = PENSTOCK,
) -> Iterator[TenantGround]:
    name = f"tenants_{uuid4().hex}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE template_penstock".encode())
    database = make_conninfo(server, dbname=name)
    made = asyncio.run(_make_keys(database, tenants))
    with ExitStack() as stack:
        upstream = stack.enter_context(start_mock_process(*mock))
        running = stack.enter_context(
            served(
                directory,
                *("--base-url", upstream.base_url),
                *options,
                database=database,
                workers=workers,
                program=program,
                env={"PENSTOCK_WEBHOOK_ALLOW": "127.0.0.1", **(env or {})},
            )
        )
        yield TenantGround(
            running,
            upstream,
            database,
            {owner: secret for owner, (_, secret) in made.items()},
            {owner: f"key_{key.id.hex}" for owner, (key, _) in made.items()},
        )


async def _make_keys(database: str, tenants: Mapping[str, Role]) -> dict[str, tuple[keys.Key, str]]:
    async with connected(database) as connection:
        return {
            owner: await keys.create_key(connection, owner=owner, name=f"of {owner}", role=role)
            for owner, role in tenants.items()
        }


def furnish(ground: TenantGround, tenant: str) -> dict[str, str]:
    """One object of every kind, all at rest: their ids by kind."""
    batch_id = ground.start(tenant, jsonl(LINES))
    batch = ground.until(tenant, f"/v1/batches/{batch_id}", "status", "completed")
    running = _paused(ground, tenant)
    asked = {
        "requests": [
            {"custom_id": f"m{number}", "params": {"model": "small", "max_tokens": 9, "messages": _MESSAGES}}
            for number in range(3)
        ]
    }
    message_batch = ground.ok(tenant, "POST", "/v1/messages/batches", asked)["id"]
    ground.until(tenant, f"/v1/messages/batches/{message_batch}", "processing_status", "ended")
    upload = ground.ok(
        tenant,
        "POST",
        "/v1/uploads",
        {"bytes": 3, "filename": "parts.jsonl", "mime_type": "application/jsonl", "purpose": "batch"},
    )["id"]
    content, kind = form({"data": b"abc"})
    part = ground.ok(tenant, "POST", f"/v1/uploads/{upload}/parts", content, headers={"content-type": kind})["id"]
    hook = {"event_types": ["batch.failed"], "name": "hook", "url": "http://127.0.0.1:9/hook"}
    webhook = ground.ok(tenant, "POST", "/v1/webhook_endpoints", hook)["id"]
    prompt = {"type": "chat", "provider": "default", "model": "small", "prompt": "{{ a }}"}
    content, kind = form({"spec": json.dumps({"processor": prompt}), "file": b"a,b\n1,2\n"}, "rows.csv")
    job = ground.ok(tenant, "POST", "/api/jobs", content, headers={"content-type": kind})["jobId"]
    ground.until(tenant, f"/api/jobs/{job}", "state", "DONE")
    rows = b"a\n" + b"1\n" * MANY_LINES
    content, kind = form({"spec": json.dumps({"processor": prompt}), "file": rows}, "rows.csv")
    paused = ground.ok(tenant, "POST", "/api/jobs", content, headers={"content-type": kind})["jobId"]
    ground.ok(tenant, "POST", f"/api/jobs/{paused}/pause")
    ground.until_still()
    session = f"of {tenant}"
    ground.ok(tenant, "PUT", f"/v1/sessions/{quote(session)}", {})
    gone = ground.put(tenant, jsonl(2))
    ground.ok(tenant, "DELETE", f"/v1/files/{gone}")
    (erasure,) = ground.ok(tenant, "GET", "/v1/erasures")["data"]
    ground.until(tenant, f"/v1/erasures/{erasure['id']}", "status", "finished")
    return {
        "file": batch["input_file_id"],
        "output file": batch["output_file_id"],
        "error file": batch["error_file_id"],
        "deleted file": gone,
        "running output file": running["output_file_id"],
        "batch": batch_id,
        "running batch": running["id"],
        "message batch": message_batch,
        "upload": upload,
        "part": part,
        "webhook endpoint": webhook,
        "key": ground.key_ids[tenant],
        "erasure": erasure["id"],
        "job": job,
        "paused job": paused,
    }


def _paused(ground: TenantGround, tenant: str) -> Any:
    """A batch that has begun and stands still."""
    batch_id = ground.start(tenant, jsonl(MANY_LINES))
    path = f"/v1/batches/{batch_id}"
    wait_until(lambda: ground.ok(tenant, "GET", path)["request_counts"]["completed"], DEADLINE_S)
    ground.ok(tenant, "POST", f"{path}/pause")
    ground.until_still()
    return ground.ok(tenant, "GET", path)


def _finds_none(connection: psycopg.Connection[Any], count: bytes) -> bool:
    return connection.execute(count).fetchone() == (0,)


_MESSAGES = [{"role": "user", "content": "hello"}]


def form(fields: Mapping[str, str | bytes], filename: str = "upload") -> tuple[bytes, str]:
    """A multipart body and its content type; bytes are files."""
    boundary = "boundary-of-the-form"
    content = b""
    for name, value in fields.items():
        shown = filename.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")
        content += f'--{boundary}\r\ncontent-disposition: form-data; name="{name}"'.encode()
        content += (
            f'; filename="{shown}"\r\n\r\n'.encode() + value
            if isinstance(value, bytes)
            else (b"\r\n\r\n" + value.encode())
        )
        content += b"\r\n"
    return content + f"--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"


def sibling(public_id: str) -> str:
    """An id of the same shape and age that nobody has."""
    return public_id[:-1] + ("0" if public_id[-1] != "0" else "1")


def digest_rows(database: str, tables: tuple[str, ...]) -> dict[str, tuple[int, str]]:
    """What is in these tables, to be compared with later: so many rows, and a digest of them."""
    query = "SELECT count(*), coalesce(md5(string_agg(t::text, '|' ORDER BY t::text)), '') FROM {} t"
    with psycopg.connect(database, autocommit=True) as connection:
        places = {table: _FOLDED.get(table, f"penstock.{table}") for table in tables}
        return {name: connection.execute(query.format(place).encode()).fetchall()[0] for name, place in places.items()}


# Rows that maintenance sums up at any time: compared by their sums.
_FOLDED = {
    "job_errors": "(SELECT batch_id, fingerprint, sum(count), min(first_at), max(last_at) FROM penstock.job_errors"
    " GROUP BY batch_id, fingerprint)"
}


def make_key(database: str, owner: str) -> str:
    """A user's key."""
    _, secret = with_connection(
        database, lambda connection: keys.create_key(connection, owner=owner, name=owner, role="user")
    )
    return secret

"""Batches requested by callers: recorded at once, validated right after, then started or failed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from penstock.batches.finish import fail_batch
from penstock.batches.lifecycle import log_created
from penstock.batches.read import Batch, get_batch
from penstock.db import sql
from penstock.db.pool import Connection, Now, fetch_one
from penstock.model import new_id
from penstock.quotas.quotas import check_open_batches, hold_owner

_SQL = sql.load("penstock.batches", "validate.sql")

_UNVALIDATED_LIMIT = 1_000

Problem = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Requested:
    batch: Batch
    existed: bool
    """The key had created this batch before. Its fingerprint tells whether the request was the same."""


async def request_batch(
    connection: Connection,
    *,
    owner: str,
    dialect: str,
    file_id: UUID,
    endpoint: str | None,
    completion_window: str | None,
    window_s: float | None,
    metadata: Mapping[str, str] | None = None,
    priority: int = 0,
    key: str | None = None,
    fingerprint: bytes | None = None,
    output_expires_after_s: int | None = None,
    batch_id: UUID | None = None,
    max_open: int = 0,
    now: Now = None,
) -> Requested | None:
    """Record a requested batch over a file; None if the owner has no such file to run.

    Raises QuotaExceeded if the owner has `max_open` open batches already, unless its key created this one. 0 is no
    limit.
    """
    batch_id = batch_id or new_id()
    # A message batch has results, but not as files.
    output_file_id, error_file_id = (new_id(), new_id()) if dialect == "openai" else (None, None)
    wish = {
        "id": batch_id,
        "owner": owner,
        "file_id": file_id,
        "dialect": dialect,
        "key": key,
        "fingerprint": fingerprint,
        "endpoint": endpoint,
        "completion_window": completion_window,
        "window_s": window_s,
        "metadata": json.dumps(dict(metadata or {})),
        "priority": priority,
        "output_file_id": output_file_id,
        "error_file_id": error_file_id,
        "output_expires_after_s": output_expires_after_s,
        "now": now,
    }
    # Without a limit it is one statement.
    async with connection.transaction() if max_open else nullcontext():
        if max_open:
            await hold_owner(connection, owner)
            if await _find_by_key(connection, owner, key) is None:
                await check_open_batches(connection, owner, max_open)
        recorded = await fetch_one(connection, _SQL["request_batch_if_ready"], wish)
    if recorded is None:
        earlier = await _find_by_key(connection, owner, key)
        if earlier is None:
            return None
        batch_id = earlier
    else:
        log_created(batch_id, owner, dialect)
    batch = await get_batch(connection, batch_id, owner, now=now)
    return Requested(batch, recorded is None) if batch else None


async def _find_by_key(connection: Connection, owner: str, key: str | None) -> UUID | None:
    if key is None:
        return None
    row = await fetch_one(connection, _SQL["find_id_by_key"], {"owner": owner, "key": key})
    return row[0] if row else None


async def list_unvalidated(connection: Connection) -> list[UUID]:
    """List batches that wait to be validated, oldest first."""
    cursor = await connection.execute(_SQL["list_unvalidated"], {"limit": _UNVALIDATED_LIMIT})
    return [batch_id for (batch_id,) in await cursor.fetchall()]


async def validate_batch(
    connection: Connection,
    batch_id: UUID,
    pool_of: Callable[[str], str | None],
    *,
    max_reported: int = 20,
    now: Now = None,
) -> None:
    """Start a requested batch, or fail it and say why. A batch that is decided already is left alone.

    `pool_of` names the pool that serves a model; None if nobody does.
    """
    row = await (await connection.execute(_SQL["read_wish"], {"id": batch_id})).fetchone()
    if row is None:
        return
    endpoint, file_id, source_id, lines, problems, lanes, routes, endpoints = row
    pools = [pool_of(route) for route in routes]
    if not problems and lines == 0:
        problems = [_problem("empty_file", None, "The input file contains no requests.", None)]
    if not problems:
        wrong = _wrong_lanes(endpoint, lanes, routes, endpoints, pools)
        problems = await _problems(connection, source_id, wrong, max_reported)
    if problems:
        await fail_batch(connection, batch_id, problems[:max_reported], now=now)
        return
    await connection.execute(
        _SQL["validate_if_validating"],
        {
            "id": batch_id,
            "file_id": file_id,
            "source_id": source_id,
            "total": lines,
            "lanes": lanes,
            "pools": pools,
            "now": now,
        },
    )


def _wrong_lanes(
    endpoint: str | None,
    lanes: Sequence[int],
    routes: Sequence[str],
    endpoints: Sequence[str],
    pools: Sequence[str | None],
) -> dict[int, tuple[str, str, str]]:
    """Problem with the lines of each wrong lane: code, message, parameter."""
    wrong: dict[int, tuple[str, str, str]] = {}
    for lane, route, url, pool in zip(lanes, routes, endpoints, pools, strict=True):
        if endpoint is not None and url != endpoint:
            message = f"The URL provided for this request ({url}) does not match the batch endpoint ({endpoint})."
            wrong[lane] = ("url_mismatch", message, "url")
        elif pool is None:
            wrong[lane] = ("model_not_found", f"The provided model '{route}' is not served here.", "body.model")
    return wrong


async def _problems(
    connection: Connection, source_id: int, wrong: Mapping[int, tuple[str, str, str]], limit: int
) -> list[Problem]:
    """One entry for each of the first wrong lines."""
    if not wrong:
        return []
    parameters = {"source_id": source_id, "lanes": list(wrong), "limit": limit}
    cursor = await connection.execute(_SQL["read_first_lines"], parameters)
    found = [(line, *wrong[lane]) for line, lane in await cursor.fetchall()]
    return [_problem(code, line, message, param) for line, code, message, param in found]


def _problem(code: str, line: int | None, message: str, param: str | None) -> Problem:
    return {"code": code, "line": line, "message": message, "param": param}

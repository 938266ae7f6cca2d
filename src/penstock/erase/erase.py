"""Deletion of files, batches and sessions: one transaction, after which nothing of them is seen, claimed or settled.

Their rows are then deleted by `purge`, in small steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

from penstock.backoff import jittered
from penstock.batches.finish import end_if_over
from penstock.db import sql
from penstock.db.pool import Connection, Now, fetch_one
from penstock.errors import PenstockError
from penstock.model import new_id

_SQL = sql.load("penstock.erase", "erase.sql")

MESSAGE_RESULTS_KEPT = timedelta(days=29)
"""Time from the creation of a message batch until it is archived."""

# Rows of one stretch: replicas that purge take a stretch each.
_STRETCH_ROWS = 100_000
# Above every id and transaction number.
_BEYOND = 2**62

_TRIES = 50
_REST_S = 0.02


class NotErasable(PenstockError):  # noqa: N818 - what it is
    """File, batch or session that cannot be deleted now; the message says why."""


class _InUseError(Exception):
    """Session that was used again since it was listed as unused."""


class _BusyError(Exception):
    """Batch of which work is being settled while it is being deleted: try once more."""


async def delete_file(
    connection: Connection, file_id: UUID, owner: str | None, *, hidden: bool = False, now: Now = None
) -> bool:
    """Delete a file: for everybody and at once. False if that owner has no such file.

    Batches over an input file lose it, and those that have not ended are cancelled by the same commit: leases are taken
    from their workers, outcomes stay. A result file is a batch's output or its errors: those outcomes go.
    The input of a message batch is found only with `hidden`.
    """

    async def delete() -> bool:
        row = await fetch_one(connection, _SQL["find_file"], {"file_id": file_id, "owner": owner, "hidden": hidden})
        if row is None:
            return False
        kind, batch_id = row
        if kind == "input":
            return await _delete_input(connection, file_id, now)
        return await _delete_result(connection, file_id, batch_id, now)

    return await _atomically(connection, delete)


async def delete_batch(
    connection: Connection,
    batch_id: UUID,
    owner: str | None,
    *,
    archived: bool = False,
    with_input: bool = False,
    now: Now = None,
) -> bool:
    """Delete a batch and its results: for everybody and at once, whatever is in flight. The input of a message batch or
    of a job goes with it; that of another batch `with_input`, unless there is a batch besides that runs over it.

    With `archived`, the batch itself stays, without requests and results.
    """

    async def delete() -> bool:
        found = {"batch_id": batch_id, "owner": owner, "with_input": with_input}
        row = await fetch_one(connection, _SQL["find_batch"], found)
        if row is None:
            return False
        (file_id,) = row
        held = {"file_id": file_id, "batch_id": batch_id}
        whole = file_id is not None and await fetch_one(connection, _SQL["hold_file_if_there"], held) is not None
        # Asked under the file's lock: no batch begins over it any more.
        if whole and await fetch_one(connection, _SQL["has_other_batches"], held) == (True,):
            whole = False
        if await fetch_one(connection, _SQL["hold_batch_if_there"], {"batch_id": batch_id}) is None:
            return False
        await connection.execute(_SQL["hold_job"], {"batch_id": batch_id})
        await _fence(connection, [batch_id])
        order = _order(now)
        if whole:
            await connection.execute(_SQL["cancel_batches_of_file"], {"file_id": file_id, "now": now})
            await _erase_file(connection, file_id, [], order)  # the batch's own rows go with the batch
        parameters = {"batch_id": batch_id, "archived": archived, **order}
        await connection.execute(_SQL["erase_batch_if_held"], parameters)
        return True

    return await _atomically(connection, delete)


async def archive_batches(connection: Connection, limit: int, *, now: Now = None) -> int:
    """Delete requests and results of message batches older than `MESSAGE_RESULTS_KEPT`. Returns how many batches."""
    parameters = {"kept_s": MESSAGE_RESULTS_KEPT.total_seconds(), "limit": limit, "now": now}
    due = await (await connection.execute(_SQL["list_archivable"], parameters)).fetchall()
    return sum([await delete_batch(connection, batch_id, None, archived=True, now=now) for (batch_id,) in due])


async def expire_batches(
    connection: Connection, kept_s: float, after: UUID, limit: int, *, now: Now = None
) -> tuple[UUID | None, int]:
    """Delete those of the next `limit` batches and jobs after an id that ended longer than `kept_s` ago, with their
    inputs, unless others run over these. Message batches are archived instead, in their own time.

    Returns the id to go on from, None if there are no more, and how many were deleted.
    """
    parameters = {"after": after, "kept_s": kept_s, "limit": limit, "now": now}
    found = await (await connection.execute(_SQL["list_ended"], parameters)).fetchall()
    old = [batch_id for batch_id, is_old in found if is_old]
    deleted = [await delete_batch(connection, batch_id, None, with_input=True, now=now) for batch_id in old]
    return found[-1][0] if len(found) == limit else None, sum(deleted)


async def delete_session(
    connection: Connection, owner: str, key: str, *, unused_s: float | None = None, now: Now = None
) -> bool:
    """Delete a session with everything in it: for everybody and at once, whatever is in flight.

    Its key is free from now on: the next request under it makes a new session. With `unused_s`, a session that was used
    within so many seconds is left alone.
    """

    async def delete() -> bool:
        row = await fetch_one(connection, _SQL["hold_session_if_there"], {"owner": owner, "key": key})
        if row is None:
            return False
        (session_id,) = row
        await _fence(connection, [session_id])
        if unused_s is not None:
            asked = {"session_id": session_id, "kept_s": unused_s, "now": now}
            if await fetch_one(connection, _SQL["is_in_use"], asked) == (True,):
                raise _InUseError
        parameters = {"session_id": session_id, **_order(now)}
        await connection.execute(_SQL["erase_session_if_held"], parameters)
        return True

    try:
        return await _atomically(connection, delete)
    except _InUseError:
        return False


async def expire_sessions(
    connection: Connection, kept_s: float, after: UUID, limit: int, *, now: Now = None
) -> tuple[UUID | None, int]:
    """Delete those of the next `limit` sessions after an id that have been unused for `kept_s`.

    Returns the id to go on from, None if there are no more old sessions, and how many were deleted.
    """
    parameters = {"after": after, "kept_s": kept_s, "limit": limit, "now": now}
    found = await (await connection.execute(_SQL["list_old_sessions"], parameters)).fetchall()
    deleted = [
        await delete_session(connection, owner, key, unused_s=kept_s, now=now)
        for _, owner, key, unused in found
        if unused
    ]
    return found[-1][0] if len(found) == limit else None, sum(deleted)


async def expire_files(connection: Connection, limit: int, *, now: Now = None) -> int:
    """Delete files that have expired. Returns how many."""
    cursor = await connection.execute(_SQL["list_expired"], {"limit": limit, "now": now})
    expired = [file_id for (file_id,) in await cursor.fetchall()]
    return sum([await delete_file(connection, file_id, None, hidden=True, now=now) for file_id in expired])


async def _delete_input(connection: Connection, file_id: UUID, now: Now) -> bool:
    if await fetch_one(connection, _SQL["hold_file_if_there"], {"file_id": file_id}) is None:
        return False
    cursor = await connection.execute(_SQL["cancel_batches_of_file"], {"file_id": file_id, "now": now})
    batches = await cursor.fetchall()
    unfinished = [batch_id for batch_id, running in batches if running]
    if unfinished:
        await _fence(connection, unfinished)
        await end_if_over(connection, unfinished, now=now)
    await _erase_file(connection, file_id, [batch_id for batch_id, _ in batches], _order(now))
    return True


async def _erase_file(connection: Connection, file_id: UUID, batches: Sequence[UUID], order: Mapping[str, Any]) -> None:
    parameters = {"file_id": file_id, "batches": list(batches), **order}
    await connection.execute(_SQL["erase_file_if_held"], parameters)


async def _delete_result(connection: Connection, file_id: UUID, batch_id: UUID, now: Now) -> bool:
    batch = await fetch_one(connection, _SQL["hold_batch_if_there"], {"batch_id": batch_id})
    if batch is None or await fetch_one(connection, _SQL["hold_file_if_there"], {"file_id": file_id}) is None:
        return False
    if batch != (True,):
        raise NotErasable("The batch is still writing this file. Cancel the batch, or wait for its end.")
    parameters = {"file_id": file_id, "batch_id": batch_id, **_order(now)}
    await connection.execute(_SQL["erase_result_if_held"], parameters)
    return True


def _order(now: Now) -> dict[str, Any]:
    return {"erasure_id": new_id(), "stretch": _STRETCH_ROWS, "beyond": _BEYOND, "now": now}


async def _fence(connection: Connection, batches: Sequence[UUID]) -> None:
    """Fence these batches off: nothing more of them is claimed, and nothing in flight can be settled any more."""
    parameters = {"ids": list(batches)}
    for statement in ("hold_leases", "close_lanes", "end_leases_if_free"):
        await connection.execute(_SQL[statement], parameters)
    if await fetch_one(connection, _SQL["has_leases"], parameters) == (True,):
        raise _BusyError


async def _atomically(connection: Connection, delete: Callable[[], Awaitable[bool]]) -> bool:
    for attempt in range(1, _TRIES + 1):
        try:
            async with connection.transaction():
                return await delete()
        except _BusyError:
            await asyncio.sleep(jittered(_REST_S * min(attempt, 10), 0))
    raise NotErasable("Its requests are being settled just now.", hint="Try again.")

"""Reprocessing: rows of a job that are run again, as an operation that outlives its request and its server.

An operation looks at the job's outcomes in the order of the rows, a chunk at a time. Each chunk commits with the place
that the operation has reached: one that was cut off goes on from there, and looks at no row twice.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, NamedTuple
from uuid import UUID

import msgspec

from penstock.batches import run_again
from penstock.batches.error_groups import list_failures_of
from penstock.batches.finish import finish_batch
from penstock.db import sql
from penstock.db.pool import Connection, Now, fetch_one
from penstock.errors import PenstockError
from penstock.model import new_id

_SQL = sql.load("penstock.batches", "reprocess.sql")

_CHUNK_ROWS = 1_000
_FIRST, _LAST = UUID(int=0), UUID(int=2**128 - 1)

OperationState = Literal["running", "done", "failed", "cancelled"]


class Wish(msgspec.Struct, frozen=True):
    """Rows of a job that are to run again, and how."""

    states: list[str]
    """States of the outcomes they have."""
    max_attempts: int
    """Rows that have had so many attempts are left as they are."""
    ordinals: list[int] | None = None
    """The rows alone that are named, ascending; None for all."""
    fingerprint: str | None = None
    """The failures alone of one group of errors."""
    afresh: bool = False
    """They have all their attempts again, rather than those that are left."""
    unrun: bool = False
    """Rows too that a cancelled job never ran."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One reprocessing of a job, as far as it is."""

    id: UUID
    state: OperationState
    place: int
    """Ordinal of the last row that was looked at; -1 before the first."""
    requeued: int
    """Rows that run again, and those that a cancelled job had never run."""
    worn_out: int
    """Rows left as they are, for they have had their attempts."""
    error: str | None
    created_at: datetime
    ended_at: datetime | None


class KeyTaken(PenstockError):  # noqa: N818 - a verdict on the input
    """The idempotency key was used for another operation on the job."""


class RowsRefused(PenstockError):  # noqa: N818 - a verdict on the input
    """Rows that were named cannot run again. Nothing of the operation is done."""

    def __init__(self, ordinals: Sequence[int], why: str) -> None:
        super().__init__(why)
        self.ordinals = ordinals


# -- asking


async def find_by_key(connection: Connection, batch_id: UUID, key: str, wish: Wish) -> UUID | None:
    """Find the operation that was asked for before under a key. Raises KeyTaken if that asked for something else."""
    found = await fetch_one(connection, _SQL["find_operation_by_key"], {"batch_id": batch_id, "key": key})
    if found is None:
        return None
    if msgspec.convert(found[1], Wish) != wish:
        raise KeyTaken("the idempotency key was used before for an operation that differs")
    earlier: UUID = found[0]
    return earlier


async def start(
    connection: Connection, batch_id: UUID, wish: Wish, *, key: str | None = None, now: Now = None
) -> tuple[UUID, bool]:
    """Store an operation, to be done by a server; or find that of another request under the same key. Returns also
    whether it is new."""
    operation_id = new_id()
    wanted = msgspec.json.encode(wish).decode()
    told = {"id": operation_id, "batch_id": batch_id, "wish": wanted, "key": key, "now": now}
    if await fetch_one(connection, _SQL["insert_operation"], told) is not None:
        return operation_id, True
    return await find_by_key(connection, batch_id, str(key), wish) or operation_id, False


async def check_named(connection: Connection, batch_id: UUID, wish: Wish) -> None:
    """Check that every row named can run again. Raises RowsRefused, with those that cannot."""
    named = wish.ordinals or []
    lane = await _find_lane(connection, batch_id)
    if lane is None or named[-1] >= lane.total:
        raise RowsRefused([o for o in named if lane is None or o >= lane.total], "there is no such row")
    parameters = {"batch_id": batch_id, "lane": lane.id, "ordinals": named}
    cursor = await connection.execute(_SQL["list_live"], parameters)
    live = {ordinal for start, stop in await cursor.fetchall() for ordinal in range(start, stop)}
    if found := [ordinal for ordinal in named if ordinal in live or ordinal >= lane.next]:
        raise RowsRefused(found, "they wait or are in flight")
    cursor = await connection.execute(_SQL["read_states"], parameters)
    past = {ordinal: (state, attempts) for ordinal, state, attempts in await cursor.fetchall()}
    if other := [o for o in named if o not in past or past[o][0] not in wish.states]:
        raise RowsRefused(other, "they have another status than those to run again")
    if worn_out := [o for o in named if past[o][1] >= wish.max_attempts]:
        hint = "" if wish.afresh else "; resetAttempts gives them all their attempts again"
        raise RowsRefused(worn_out, f"they have had {wish.max_attempts} attempts or more{hint}")


async def list_operations(
    connection: Connection, batch_id: UUID, *, below: UUID | None = None, limit: int
) -> list[Operation]:
    """List operations on a job, newest first."""
    parameters = {"batch_id": batch_id, "below": below or _LAST, "from": _FIRST, "limit": limit}
    cursor = await connection.execute(_SQL["list_operations"], parameters)
    return [Operation(*row) for row in await cursor.fetchall()]


async def find_operation(connection: Connection, batch_id: UUID, operation_id: UUID) -> Operation | None:
    parameters = {"batch_id": batch_id, "below": UUID(int=operation_id.int + 1), "from": operation_id, "limit": 1}
    row = await fetch_one(connection, _SQL["list_operations"], parameters)
    return Operation(*row) if row else None


async def cancel_operation(
    connection: Connection, batch_id: UUID, operation_id: UUID, owner: str | None, *, now: Now = None
) -> bool:
    """End an operation that is running; False if it is not. Rows that it has put back run."""
    told = {"id": operation_id, "batch_id": batch_id, "owner": owner, "now": now}
    return await fetch_one(connection, _SQL["cancel_operation_if_running"], told) is not None


# -- doing


class Doing(NamedTuple):
    """An operation that this server does."""

    id: UUID
    batch_id: UUID


async def take(
    connection: Connection,
    worker_id: UUID,
    grace_s: float,
    *,
    after: UUID = _FIRST,
    besides: Collection[UUID] = (),
    now: Now = None,
) -> Doing | None:
    """Take the next operation after an id that no server alive does, and not one of those `besides`; None if there is
    none."""
    parameters = {"worker_id": worker_id, "grace_s": grace_s, "after": after, "besides": list(besides), "now": now}
    row = await fetch_one(connection, _SQL["take_operation_if_free"], parameters)
    return Doing(*row) if row else None


class Step(enum.Enum):
    """What a step of an operation came to."""

    MOVED = enum.auto()
    NO_ROOM = enum.auto()
    """As many rows of the job are in flight as may be. The operation was given back."""
    ENDED = enum.auto()


class _Chunk(NamedTuple):
    place: int
    requeued: int = 0
    worn_out: int = 0
    state: OperationState = "running"
    error: str | None = None


async def do_step(connection: Connection, doing: Doing, worker_id: UUID, *, now: Now = None) -> Step:
    """Do the next chunk of an operation, in a transaction of its own. Its job, which waits for it, may end with it."""
    async with connection.transaction():
        held = await run_again.hold(connection, doing.batch_id, None, now=now)
        row = await fetch_one(connection, _SQL["hold_if_doing"], {"id": doing.id, "worker_id": worker_id})
        if row is None:
            return Step.ENDED
        wish, place = msgspec.convert(row[0], Wish), row[1]
        if held is None:
            chunk: _Chunk | None = _Chunk(place, state="cancelled")
        elif (refusal := _refusal(held, wish)) is not None:
            chunk = _Chunk(place, state="failed", error=refusal)
        else:
            chunk = await _do_chunk(connection, doing, held, wish, place, now)
        if chunk is None:
            await connection.execute(_SQL["give_back_if_held"], {"id": doing.id})
            return Step.NO_ROOM
        await connection.execute(_SQL["advance_if_held"], {"id": doing.id, **chunk._asdict(), "now": now})
    if chunk.state == "running":
        return Step.MOVED
    await finish_batch(connection, doing.batch_id, now=now)
    return Step.ENDED


def _refusal(held: run_again.Held, wish: Wish) -> str | None:
    if (refusal := held.refusal("job")) is not None:
        return refusal[0]
    if held.cut_short and not wish.unrun:
        what = f"{held.not_run} rows were never run" if held.not_run else "Some rows were never read"
        return f"{what}: the job was cancelled before."
    return None


async def _do_chunk(
    connection: Connection, doing: Doing, held: run_again.Held, wish: Wish, place: int, now: Now
) -> _Chunk | None:
    """Run the next rows again; None if there is no room for any in flight.

    A job that was cut short is reopened before that is asked: its rows that wait for a retry take up room, and give it
    back only when they run.
    """
    reopens = held.cut_short
    if reopens:
        await run_again.reopen(connection, doing.batch_id, now=now)
    lane = await _find_lane(connection, doing.batch_id)
    if lane is None:
        return _Chunk(place, state="done")
    room = await fetch_one(connection, _SQL["hold_room"], {"lane": lane.id})
    limit = _CHUNK_ROWS if room is None else min(_CHUNK_ROWS, room[0])
    not_run = held.not_run if reopens else 0
    if not limit:
        return _Chunk(place, not_run) if not_run else None
    picked = await _pick(connection, lane.id, wish, place, limit)
    ordinals = await run_again.cut_by_bytes(connection, lane.id, picked)
    settled = await run_again.read_settled(connection, doing.batch_id, lane.id, ordinals)
    wanted = [one for one in settled if one.result.state in wish.states]
    again = [one for one in wanted if one.attempts < wish.max_attempts]
    if held.ended and again and not reopens:
        reopens = True
        await run_again.reopen(connection, doing.batch_id, now=now)
    if again:
        await run_again.rerun(connection, doing.batch_id, lane.id, again, afresh=wish.afresh, reopened=reopens, now=now)
    return _Chunk(
        ordinals[-1] if ordinals else place,
        not_run + len(again),
        len(wanted) - len(again),
        "done" if len(ordinals) == len(picked) < limit else "running",
    )


async def _pick(connection: Connection, lane: int, wish: Wish, after: int, limit: int) -> list[int]:
    """Pick the next rows of an operation, by their ordinals."""
    if wish.ordinals is not None:
        return [ordinal for ordinal in wish.ordinals if ordinal > after][:limit]
    if wish.fingerprint is not None:
        return await list_failures_of(connection, lane, wish.fingerprint, after, limit)
    parameters = {"lane": lane, "after": after, "states": list(wish.states), "limit": limit}
    cursor = await connection.execute(_SQL["list_outcomes_of_states"], parameters)
    return [ordinal for (ordinal,) in await cursor.fetchall()]


class _Lane(NamedTuple):
    id: int
    next: int
    total: int


async def _find_lane(connection: Connection, batch_id: UUID) -> _Lane | None:
    row = await fetch_one(connection, _SQL["find_lane"], {"batch_id": batch_id})
    return _Lane(*row) if row else None

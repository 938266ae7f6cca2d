"""Running failures again: their outcomes are taken back, a chunk at a time, and the batch goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from penstock.db import sql
from penstock.db.pool import Connection, Now
from penstock.errors import PenstockError
from penstock.model import BatchState
from penstock.results import Result, openai_line

_SQL = sql.load("penstock.work", "work.sql")

_CHUNK_ROWS = 1_000

_RUNNING = (BatchState.IN_PROGRESS, BatchState.PAUSED)
_ENDED = (BatchState.COMPLETED, BatchState.CANCELLED, BatchState.EXPIRED)


@dataclass(frozen=True, slots=True)
class Retried:
    requests: int
    """How many will run again, those that were never run included."""
    reopened: bool
    """The batch had ended and goes on."""


class NotRetryable(PenstockError):  # noqa: N818 - what it is
    """This batch cannot run anything again; the message says why."""


class NotFailed(PenstockError):  # noqa: N818 - what it is
    """Some of the requests named are no failures of the batch, or not of this batch at all. Nothing runs again."""

    def __init__(self, named: Sequence[str | int]) -> None:
        super().__init__(f"{len(named)} of the requests named have not failed")
        self.named = named
        """By custom id or line, as they were asked for."""


@dataclass(frozen=True, slots=True)
class _Wish:
    batch_id: UUID
    owner: str | None
    custom_ids: Sequence[str] | None
    lines: Sequence[int] | None
    now: Now

    @property
    def everything(self) -> bool:
        return self.custom_ids is None and self.lines is None


async def retry_batch(
    connection: Connection,
    batch_id: UUID,
    owner: str | None,
    *,
    custom_ids: Sequence[str] | None = None,
    lines: Sequence[int] | None = None,
    now: Now = None,
) -> Retried:
    """Run again what failed, and what an ended batch never ran; or what is named of the failures.

    Completed requests are never run again. A batch that had ended goes on, with as much time as it had at first.
    Chunks commit one by one: after a crash in between, some run again and the rest has failed as before.
    """
    wish = _Wish(batch_id, owner, custom_ids, lines, now)
    requests, reopened, after = 0, False, -1
    lanes: list[int] | None = None
    while lanes is None or lanes:
        async with connection.transaction():
            not_run = await _hold(connection, wish)
            if lanes is None:
                lanes = await _lanes_with_failures(connection, batch_id)
                await _check_named(connection, wish, lanes)
            rows = await _failures(connection, wish, lanes[0], after) if lanes else []
            reopens = not_run is not None and bool(rows or (not_run and wish.everything))
            if reopens:
                await connection.execute(_SQL["reopen_if_ended"], {"id": batch_id, "now": now})
                requests, reopened = requests + (not_run or 0), True
            if rows:
                requests += await _rerun(connection, wish, lanes[0], rows, reopened=reopens)
                after = rows[-1][0]
        if len(rows) < _CHUNK_ROWS:
            lanes, after = lanes[1:], -1
    return Retried(requests, reopened)


async def _hold(connection: Connection, wish: _Wish) -> int | None:
    """Lock the batch, or say why it cannot be. If it has ended: how many of its requests were never run."""
    cursor = await connection.execute(_SQL["hold_if_known"], {"id": wish.batch_id, "owner": wish.owner})
    row = await cursor.fetchone()
    if row is None:
        raise NotRetryable(f"no batch {wish.batch_id}", hint="It may have been deleted.")
    name, has_inputs, has_results, limited, not_run = row
    state = BatchState(name)
    if state not in _RUNNING + _ENDED:
        raise NotRetryable(f"Cannot retry a batch with status '{state}'.")
    if not has_inputs:
        raise NotRetryable("Cannot retry a batch whose input file was deleted.")
    if not has_results:
        raise NotRetryable("Cannot retry a batch whose output or error file was deleted.")
    if limited:
        raise NotRetryable("Cannot retry requests that run one after the other.")
    if not_run and not wish.everything:
        raise NotRetryable(
            f"Cannot retry some requests of a batch with status '{state}' that was not run to its end.",
            hint="Retry it as a whole.",
        )
    return int(not_run) if state in _ENDED else None


async def _lanes_with_failures(connection: Connection, batch_id: UUID) -> list[int]:
    """The batch is held: no lane is added or taken away between the two reads, and no outcome taken back."""
    cursor = await connection.execute(_SQL["list_lanes_of_batch"], {"id": batch_id})
    lanes = [lane for (lane,) in await cursor.fetchall()]
    cursor = await connection.execute(_SQL["list_lanes_with_failures"], {"lanes": lanes})
    return [lane for (lane,) in await cursor.fetchall()]


async def _check_named(connection: Connection, wish: _Wish, lanes: Sequence[int]) -> None:
    """Before anything is taken back: whoever names something wrong is told, and can ask again."""
    named: Sequence[str | int] = wish.lines or wish.custom_ids or ()
    if not named:
        return
    parameters = {"lanes": list(lanes), "custom_ids": list(wish.custom_ids or ()), "lines": list(wish.lines or ())}
    cursor = await connection.execute(_SQL["find_named_failures"], parameters)
    failed = {line if wish.lines else custom_id for custom_id, line in await cursor.fetchall()}
    if unknown := [one for one in dict.fromkeys(named) if one not in failed]:
        raise NotFailed(unknown)


async def _failures(connection: Connection, wish: _Wish, lane: int, after: int) -> list[Any]:
    parameters = {
        "lane": lane,
        "after": after,
        "custom_ids": None if wish.custom_ids is None else list(wish.custom_ids),
        "lines": None if wish.lines is None else list(wish.lines),
        "limit": _CHUNK_ROWS,
    }
    cursor = await connection.execute(_SQL["read_failures"], parameters, binary=True)
    return await cursor.fetchall()


async def _rerun(connection: Connection, wish: _Wish, lane: int, rows: Sequence[Any], *, reopened: bool) -> int:
    # What the lines took of the error file is known only by making them again.
    size = sum(len(openai_line(wish.batch_id, Result(*outcome))) for _, *outcome in rows)
    parameters = {
        "id": wish.batch_id,
        "lane": lane,
        "ordinals": [ordinal for ordinal, *_ in rows],
        "bytes": size,
        "reopened": reopened,
        "now": wish.now,
    }
    row = await (await connection.execute(_SQL["rerun_failures"], parameters)).fetchone()
    return int(row[0]) if row else 0

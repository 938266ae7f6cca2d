"""Inputs that are run again, a chunk at a time: each keeps its outcome until a new one replaces it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from uuid import UUID

from penstock.batches.error_groups import put_back, stored_fingerprint, take_away
from penstock.config import RetryLimits
from penstock.db import sql
from penstock.db.pool import Connection, Now, fetch_one
from penstock.errors import PenstockError
from penstock.export.result_lines import OutcomeRow, openai_line
from penstock.model import BatchState

_SQL = sql.load("penstock.batches", "run_again.sql")

_CHUNK_ROWS = 1_000
_CHUNK_BYTES = 8 << 20
"""Bytes of results that are read at once, to count those of their lines; one result alone may have more."""
_LIMITS = RetryLimits()

_RUNNING = (BatchState.IN_PROGRESS, BatchState.PAUSED)
_ENDED = (BatchState.COMPLETED, BatchState.CANCELLED, BatchState.EXPIRED)


@dataclass(frozen=True, slots=True)
class Retried:
    requests: int
    """Requests that will run again, those that were never run included."""
    reopened: bool
    """Whether the batch had ended and goes on."""
    worn_out: int = 0
    """Failed requests that will not run again: they have had all the attempts they may have."""


class NotRetryable(PenstockError):  # noqa: N818 - what it is
    """This batch cannot run anything again; the message says why."""


class NotFailed(PenstockError):  # noqa: N818 - what it is
    """Some of the requests named are no failures of the batch, or not of this batch at all. Nothing runs again."""

    def __init__(self, named: Sequence[str | int]) -> None:
        super().__init__(f"{len(named)} of the requests named have not failed")
        self.named = named
        """Custom ids or lines, as the caller named them."""


@dataclass(frozen=True, slots=True)
class _Wish:
    batch_id: UUID
    owner: str | None
    custom_ids: Sequence[str] | None
    lines: Sequence[int] | None
    fingerprint: str | None
    max_attempts: int
    now: Now

    @property
    def everything(self) -> bool:
        return self.custom_ids is None and self.lines is None and self.fingerprint is None


async def retry_batch(
    connection: Connection,
    batch_id: UUID,
    owner: str | None,
    *,
    custom_ids: Sequence[str] | None = None,
    lines: Sequence[int] | None = None,
    fingerprint: str | None = None,
    limits: RetryLimits = _LIMITS,
    now: Now = None,
) -> Retried:
    """Run failed requests again, and those that an ended batch never ran; or the named failures alone, or those of one
    group of errors.

    Completed requests are never run again. A batch that had ended goes on, with as much time as it had at first.
    Chunks commit one by one: after a crash in between, some run again and the rest has failed as before.
    """
    wish = _Wish(batch_id, owner, custom_ids, lines, fingerprint, limits.max_attempts_lifetime, now)
    requests, worn_out, reopened, after = 0, 0, False, -1
    lanes: list[int] | None = None
    while lanes is None or lanes:
        async with connection.transaction():
            not_run = await _hold(connection, wish)
            if lanes is None:
                lanes = await _list_lanes_with_failures(connection, batch_id)
                await _check_named(connection, wish, lanes)
            found = await _list_failures(connection, wish, lanes[0], after) if lanes else []
            ordinals = await cut_by_bytes(connection, lanes[0], found) if lanes else []
            settled = await read_settled(connection, batch_id, lanes[0], ordinals) if lanes else []
            failures = [past for past in settled if past.result.state != "completed"]
            again = [failure for failure in failures if failure.attempts < wish.max_attempts]
            worn_out += len(failures) - len(again)
            reopens = not_run is not None and bool(again or (not_run and wish.everything))
            if reopens:
                await reopen(connection, batch_id, now=now)
                requests, reopened = requests + (not_run or 0), True
            if again:
                await rerun(connection, batch_id, lanes[0], again, reopened=reopens, now=now)
                requests += len(again)
        if len(ordinals) == len(found) < _CHUNK_ROWS:
            lanes, after = lanes[1:], -1
        else:
            after = ordinals[-1]
    return Retried(requests, reopened, worn_out)


async def give_up_reruns(connection: Connection, batches: Collection[UUID], *, now: Now = None) -> None:
    """Give up the reruns of batches that are to end now: requests that were to be run again keep their outcomes."""
    cursor = await connection.execute(_SQL["list_unrun"], {"ids": list(batches), "now": now})
    for (batch_id,) in await cursor.fetchall():
        while await _give_up_page(connection, batch_id, now):
            pass


async def _give_up_page(connection: Connection, batch_id: UUID, now: Now) -> bool:
    """Give up some reruns of a batch; returns whether there may be more."""
    async with connection.transaction():
        parameters = {"id": batch_id, "limit": _CHUNK_ROWS, "now": now}
        cursor = await connection.execute(_SQL["hold_first_unrun"], parameters)
        row = await cursor.fetchone()
        if row is None:
            return False
        deferral, lane, found = row
        ordinals = await cut_by_bytes(connection, lane, found)
        past = await _read(connection, lane, ordinals)
        given_up = {"id": batch_id, "deferral": deferral, "ordinals": ordinals, **_figures(batch_id, past)}
        await connection.execute(_SQL["give_up_unrun"], given_up)
        await put_back(connection, batch_id, lane, ordinals)
    return True


class Held(NamedTuple):
    """A batch that this transaction has locked, and what decides whether anything of it can run again."""

    state: BatchState
    has_inputs: bool
    has_results: bool
    limited: bool
    """Its lanes let so many requests run at a time."""
    not_run: int
    """Requests that the batch ended without."""
    late: bool
    growing: bool

    @property
    def ended(self) -> bool:
        return self.state in _ENDED

    @property
    def cut_short(self) -> bool:
        """It has ended without some of its inputs, or before all of them were read."""
        return self.ended and (self.not_run > 0 or self.growing)

    def refusal(self, what: str) -> tuple[str, str | None] | None:
        """Why nothing of it can run again, and what to do; `what` is the word for it."""
        if self.state not in _RUNNING + _ENDED:
            return f"Cannot retry a {what} with status '{self.state}'.", None
        if self.late and self.state in _RUNNING:
            return f"Cannot retry a {what} that is about to expire.", "Retry it when it has expired."
        if not self.has_inputs:
            return f"Cannot retry a {what} whose input file was deleted.", None
        if not self.has_results:
            return f"Cannot retry a {what} whose output or error file was deleted.", None
        return None


async def hold(connection: Connection, batch_id: UUID, owner: str | None, *, now: Now = None) -> Held | None:
    """Lock a batch: until the commit no other transaction ends it, steers it or deletes it. None if there is none."""
    row = await fetch_one(connection, _SQL["hold_if_known"], {"id": batch_id, "owner": owner, "now": now})
    return None if row is None else Held(BatchState(row[0]), *row[1:])


async def _hold(connection: Connection, wish: _Wish) -> int | None:
    """Lock the batch, or raise why it cannot be retried. If it has ended, returns how many requests were never run."""
    held = await hold(connection, wish.batch_id, wish.owner, now=wish.now)
    if held is None:
        raise NotRetryable(f"no batch {wish.batch_id}", hint="It may have been deleted.")
    if (refusal := held.refusal("batch")) is not None:
        raise NotRetryable(refusal[0], hint=refusal[1])
    if held.limited:
        raise NotRetryable("Cannot retry requests that run one after the other.")
    if held.not_run and not wish.everything:
        raise NotRetryable(
            f"Cannot retry some requests of a batch with status '{held.state}' that was not run to its end.",
            hint="Retry it as a whole.",
        )
    return held.not_run if held.ended else None


async def _list_lanes_with_failures(connection: Connection, batch_id: UUID) -> list[int]:
    """List the lanes with failures. The batch is locked: no lane or outcome comes or goes between the two reads."""
    cursor = await connection.execute(_SQL["list_lanes_of_batch"], {"id": batch_id})
    lanes = [lane for (lane,) in await cursor.fetchall()]
    cursor = await connection.execute(_SQL["list_lanes_with_failures"], {"lanes": lanes})
    return [lane for (lane,) in await cursor.fetchall()]


async def _check_named(connection: Connection, wish: _Wish, lanes: Sequence[int]) -> None:
    """Check the named requests before anything is run again: a wrong name fails the whole retry."""
    named: Sequence[str | int] = wish.lines or wish.custom_ids or ()
    if not named:
        return
    parameters = {"lanes": list(lanes), "custom_ids": list(wish.custom_ids or ()), "lines": list(wish.lines or ())}
    cursor = await connection.execute(_SQL["find_named_failures"], parameters)
    attempts = {line if wish.lines else custom_id: attempts for custom_id, line, attempts in await cursor.fetchall()}
    if unknown := [one for one in dict.fromkeys(named) if one not in attempts]:
        raise NotFailed(unknown)
    if worn_out := [one for one in dict.fromkeys(named) if attempts[one] >= wish.max_attempts]:
        raise NotRetryable(worn_out_message(len(worn_out), wish.max_attempts))


def worn_out_message(requests: int, max_attempts: int) -> str:
    have = "request has" if requests == 1 else "requests have"
    return f"{requests} failed {have} had {max_attempts} attempts or more (max_attempts_lifetime): not run again."


async def _list_failures(connection: Connection, wish: _Wish, lane: int, after: int) -> list[int]:
    """List the ordinals of the next failures of a lane."""
    parameters = {
        "lane": lane,
        "after": after,
        "custom_ids": None if wish.custom_ids is None else list(wish.custom_ids),
        "lines": None if wish.lines is None else list(wish.lines),
        "fingerprint": None if wish.fingerprint is None else stored_fingerprint(wish.fingerprint),
        "limit": _CHUNK_ROWS,
    }
    cursor = await connection.execute(_SQL["list_failures"], parameters)
    return [ordinal for (ordinal,) in await cursor.fetchall()]


class Past(NamedTuple):
    """The outcome that an input has by now."""

    ordinal: int
    generation: int
    attempts: int
    result: OutcomeRow


async def read_settled(connection: Connection, batch_id: UUID, lane: int, ordinals: Sequence[int]) -> list[Past]:
    """Read outcomes of inputs that are not being run again already. They are read after the running ones are known: an
    outcome replaced in between is read as it is now, and only this transaction can have more of them run."""
    if not ordinals:
        return []
    parameters = {"id": batch_id, "lane": lane, "ordinals": list(ordinals)}
    cursor = await connection.execute(_SQL["list_rerunning"], parameters)
    running = {ordinal for start, stop in await cursor.fetchall() for ordinal in range(start, stop)}
    return await _read(connection, lane, [ordinal for ordinal in ordinals if ordinal not in running])


async def cut_by_bytes(connection: Connection, lane: int, ordinals: Sequence[int]) -> list[int]:
    """The first of some inputs, as many as have outcomes that can be read at once."""
    if not ordinals:
        return []
    parameters = {"lane": lane, "ordinals": list(ordinals), "bytes": _CHUNK_BYTES}
    row = await fetch_one(connection, _SQL["count_within_bytes"], parameters)
    return list(ordinals[: max(1, row[0] if row else 0)])


async def _read(connection: Connection, lane: int, ordinals: Sequence[int]) -> list[Past]:
    parameters = {"lane": lane, "ordinals": list(ordinals)}
    cursor = await connection.execute(_SQL["read_outcomes"], parameters, binary=True)
    return [Past(row[0], row[1], row[2], OutcomeRow(*row[3:])) for row in await cursor.fetchall()]


async def reopen(connection: Connection, batch_id: UUID, *, now: Now = None) -> None:
    """Let an ended batch go on. It is locked by this transaction."""
    await connection.execute(_SQL["reopen_if_ended"], {"id": batch_id, "now": now})


async def rerun(
    connection: Connection,
    batch_id: UUID,
    lane: int,
    past: Sequence[Past],
    *,
    afresh: bool = True,
    reopened: bool,
    now: Now = None,
) -> None:
    """Make inputs of one lane work again. The batch is locked by this transaction, which has just `reopened` it or not.

    `afresh`, they have all their attempts again; else they go on counting where they were.
    """
    parameters = {
        "id": batch_id,
        "lane": lane,
        "ordinals": [one.ordinal for one in past],
        "generations": [one.generation + 1 for one in past],
        "attempts": [1 if afresh else one.attempts + 1 for one in past],
        "spent": [one.attempts if afresh else 0 for one in past],
        **_figures(batch_id, past),
        "reopened": reopened,
        "now": now,
    }
    await connection.execute(_SQL["rerun_if_held"], parameters)
    await take_away(connection, batch_id, lane, [one.ordinal for one in past])


def _figures(batch_id: UUID, past: Sequence[Past]) -> dict[str, int]:
    """Figures of some outcomes, as the batch counts them. The bytes of their lines in its result files are known only
    by making the lines again."""
    states = Counter(one.result.state for one in past)
    sizes: Counter[bool] = Counter()
    for one in past:
        sizes[one.result.state == "completed"] += len(openai_line(batch_id, one.result))
    counts = {state: states[state] for state in ("completed", "failed", "not_found", "skipped")}
    return {**counts, "output_bytes": sizes[True], "error_bytes": sizes[False]}

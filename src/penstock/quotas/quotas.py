"""Limits per owner: read, set, and checked where something is written, under a lock of that owner alone.

A writer with a limit locks its owner's row in a statement of its own. The next statement sees everything that was
written under that lock, so two requests at the edge cannot both pass. Owners without a limit are never locked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

import msgspec
import psycopg

from penstock.config import QuotaLimits
from penstock.db import sql
from penstock.db.pool import Connection, Now, fetch_one
from penstock.errors import PenstockError

_SQL = sql.load("penstock.quotas", "quotas.sql")

_RESERVE_BYTES = 16 * 1024 * 1024
"""Room that an upload reserves ahead of what has arrived, at most."""
_COUNTED_BATCHES = 1_000_000
_OPEN_RETRY_S = 10
_STORED_RETRY_S = 60


class OwnQuota(msgspec.Struct, frozen=True):
    """Limits that were set for one owner: None where the default holds, 0 for no limit."""

    owner: str
    max_open_batches: int | None = None
    max_stored_bytes: int | None = None
    requests_per_minute: int | None = None
    max_priority: int | None = None


class Quota(msgspec.Struct, frozen=True):
    """Limits of an owner that are in force; 0 is no limit."""

    max_open_batches: int = 0
    max_stored_bytes: int = 0
    requests_per_minute: int = 0
    max_priority: int = 0


@dataclass(frozen=True, slots=True)
class Use:
    """Use of what can be limited."""

    open_batches: int
    in_flight: int
    """Items of batches and jobs that workers hold; sessions' requests are not among them."""
    stored_bytes: int
    requests_this_minute: int


class QuotaExceeded(PenstockError):  # noqa: N818 - a verdict on the request
    """A limit of the owner is reached; nothing of the request was stored."""

    def __init__(self, limit: str, message: str, *, hint: str, retry_after_s: int, never: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.limit = limit
        """Name of the limit, as `penstock db limit` has it."""
        self.retry_after_s = retry_after_s
        self.never = never
        """The same request cannot pass, however little else the owner has."""


async def read_own_quota(connection: Connection, owner: str) -> OwnQuota:
    """Read the limits that were set for an owner."""
    row = await fetch_one(connection, _SQL["read_quota"], {"owner": owner})
    return OwnQuota(*row) if row else OwnQuota(owner)


async def list_own_quotas(connection: Connection) -> list[OwnQuota]:
    """List the owners with limits of their own."""
    cursor = await connection.execute(_SQL["list_quotas"])
    return [OwnQuota(*row) for row in await cursor.fetchall()]


async def set_own_quota(connection: Connection, quota: OwnQuota) -> None:
    """Set all limits of an owner. Servers know them within `key_cache_s`."""
    await connection.execute(_SQL["set_quota"], msgspec.structs.asdict(quota))


def quota_in_force(own: OwnQuota, default: QuotaLimits) -> Quota:
    """The limits of an owner: its own, else the configured ones."""

    def pick(mine: int | None, others: int) -> int:
        return others if mine is None else mine

    return Quota(
        pick(own.max_open_batches, default.owner_max_open_batches),
        pick(own.max_stored_bytes, default.owner_max_stored_bytes),
        pick(own.requests_per_minute, default.owner_requests_per_minute),
        pick(own.max_priority, default.owner_max_priority),
    )


async def read_use(connection: Connection, owner: str, *, now: Now = None) -> Use:
    """Read what an owner uses."""
    ((open_batches,),) = await (await connection.execute(_SQL["count_open_batches"], _count(owner))).fetchall()
    cursor = await connection.execute(_SQL["read_use"], {"owner": owner, "now": now})
    ((in_flight, stored_bytes, requests),) = await cursor.fetchall()
    return Use(open_batches, in_flight, stored_bytes, requests)


# -- open batches


async def hold_owner(connection: Connection, owner: str) -> None:
    """Lock an owner until the transaction ends: no other checks a limit of this owner meanwhile."""
    await connection.execute(_SQL["add_owner"], {"owner": owner})
    await connection.execute(_SQL["hold_owner"], {"owner": owner})


async def check_open_batches(connection: Connection, owner: str, most: int) -> None:
    """Check that an owner has fewer than `most` open batches and jobs. Whoever makes one more has locked the owner in a
    statement before; without the lock it is no guard, but spares reading a large request."""
    cursor = await connection.execute(_SQL["count_open_batches"], _count(owner, most))
    _judge_open((await cursor.fetchall())[0][0], most)


def check_open_batches_blocking(connection: psycopg.Connection, owner: str, most: int) -> None:
    """Lock an owner and check its open batches, on a blocking connection."""
    _hold_owner_blocking(connection, owner)
    _judge_open(connection.execute(_SQL["count_open_batches"], _count(owner, most)).fetchall()[0][0], most)


def _hold_owner_blocking(connection: psycopg.Connection, owner: str) -> None:
    connection.execute(_SQL["add_owner"], {"owner": owner})
    connection.execute(_SQL["hold_owner"], {"owner": owner})


def _count(owner: str, most: int = _COUNTED_BATCHES) -> dict[str, Any]:
    return {"owner": owner, "most": most}


def _judge_open(count: int, most: int) -> None:
    if count >= most:
        raise QuotaExceeded(
            "open_batches",
            f"You have {most:,} open batches and jobs, which is the limit (open_batches).",
            hint="Wait until one has ended, or cancel one.",
            retry_after_s=_OPEN_RETRY_S,
        )


# -- stored bytes


class Reservation:
    """Room for a file on its way in. It is given back when the file is given up, or sealed: then the file counts."""

    def __init__(
        self, file_id: UUID, owner: str, max_stored_bytes: int, idempotency_key: str | None, expected_bytes: int = 0
    ) -> None:
        """`expected_bytes` is how large the file is said to be; 0 if that is not known."""
        self._expected = expected_bytes
        self._about = {
            "file_id": file_id,
            "owner": owner,
            "key": idempotency_key,
            "most": max_stored_bytes,
            "now": None,
        }
        self._owner = owner
        self._most = max_stored_bytes
        self._reserved_bytes = 0

    def covers(self, need: int) -> bool:
        """Whether so many bytes of the file are reserved already; always, where there is no limit."""
        return not self._most or need <= self._reserved_bytes

    def extend(self, connection: psycopg.Connection, need: int) -> None:
        """Reserve so many bytes in all, and some ahead. Raises QuotaExceeded."""
        with connection.transaction():
            _hold_owner_blocking(connection, self._owner)
            wish = {**self._about, "need": need, "ahead": _RESERVE_BYTES, "expected": self._expected}
            row = connection.execute(_SQL["reserve_if_room"], wish).fetchone()
            if row is None:
                ((stored,),) = connection.execute(_SQL["read_stored_bytes"], self._about).fetchall()
                raise self._exceeded(stored - self._reserved_bytes, need)
        (self._reserved_bytes,) = row

    def _exceeded(self, stored: int, need: int) -> QuotaExceeded:
        if need > self._most:
            return QuotaExceeded(
                "stored_bytes",
                f"The file is larger than the {self._most:,} bytes that you may store (stored_bytes).",
                hint="Send less, or ask the operator for more.",
                retry_after_s=_STORED_RETRY_S,
                never=True,
            )
        return QuotaExceeded(
            "stored_bytes",
            f"The file does not fit: you have stored {stored:,} bytes, and {self._most:,} is the limit (stored_bytes).",
            hint="Delete files, jobs or batches that are not needed any more, or ask the operator for more.",
            retry_after_s=_STORED_RETRY_S,
        )


# -- requests per minute


async def take_requests(connection: Connection, owner: str, step: int, *, now: Now = None) -> tuple[int, float]:
    """Take `step` of the requests that an owner may make this minute. Returns how many were taken before, by all
    servers, and for how many seconds the minute lasts."""
    cursor = await connection.execute(_SQL["take_requests"], {"owner": owner, "step": step, "now": now})
    ((before, left_s),) = await cursor.fetchall()
    return before, left_s

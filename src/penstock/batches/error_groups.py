"""Errors of a batch in groups: failures that say the same but for numbers and quoted parts."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from datetime import datetime
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple
from uuid import UUID

import msgspec

from penstock.db import sql
from penstock.db.arrays import Int4Array, Int8Array
from penstock.db.pool import Connection

_SQL = sql.load("penstock.batches", "error_groups.sql")

_QUOTED = re.compile(r"""(?<!\w)'[^']*'(?!\w)|"[^"]*"|`[^`]*`|“[^”]*”|‘[^’]*’|«[^»]*»""")
_UUID = re.compile(r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")
_NUMBER = re.compile(r"\w*\d\w*(?:[.,:/+-]*\w*\d\w*)*")
_FINGERPRINT = re.compile(r"[0-7][0-9a-f]{15}")
_FOLD_LIMIT = 1_000


@lru_cache(maxsize=4096)
def fingerprint(code: str, status: int | None, message: str) -> str:
    """Fingerprint of an error: of its code, its HTTP status, and its message without numbers and quoted parts. Words
    with digits in them count as numbers: they are ids, versions and times."""
    plain = _NUMBER.sub("0", _UUID.sub("0", _QUOTED.sub("''", message)))
    told = msgspec.json.encode((code, status, " ".join(plain.split())))
    return f"{int.from_bytes(blake2b(told, digest_size=8).digest()) >> 1:016x}"


def stored_fingerprint(text: str) -> int:
    """Fingerprint as the schema has it: a number of 63 bits."""
    return int(text, 16)


def is_fingerprint(text: str) -> bool:
    return _FINGERPRINT.fullmatch(text) is not None


async def list_failures_of(connection: Connection, lane_id: int, fingerprint: str, after: int, limit: int) -> list[int]:
    """List the ordinals of a lane's failures that have a fingerprint, from the one after `after` on. Those that are
    being run again are among them: they keep their outcome until they have a new one."""
    if not is_fingerprint(fingerprint):
        return []
    parameters = {
        "lane_id": lane_id,
        "fingerprint": stored_fingerprint(fingerprint),
        "after": after,
        "limit": limit,
    }
    cursor = await connection.execute(_SQL["list_failures_of"], parameters)
    return [ordinal for (ordinal,) in await cursor.fetchall()]


class ErrorGroup(NamedTuple):
    """Failures of a batch with one fingerprint. Rows that are being run again do not count."""

    fingerprint: str
    rows: int
    first_at: datetime
    last_at: datetime
    code: str
    status_code: int | None
    line: int
    """Row that failed like this last. It may have been run again since."""
    message: str


async def list_error_groups(connection: Connection, batch_id: UUID, after: str | None, limit: int) -> list[ErrorGroup]:
    """List the next groups of a batch, in the order of their fingerprints."""
    found: list[ErrorGroup] = []
    place = -1 if after is None else stored_fingerprint(after)
    while len(found) < limit:
        cursor = await connection.execute(
            _SQL["list_error_groups"], {"batch": batch_id, "after": place, "limit": limit - len(found)}
        )
        page = await cursor.fetchall()
        asked = limit - len(found)
        found += [ErrorGroup(f"{row[0]:016x}", *row[1:]) for row in page if row[1] > 0]
        if len(page) < asked:
            break
        place = page[-1][0]
    return found


async def take_away(connection: Connection, batch_id: UUID, lane_id: int, ordinals: Sequence[int]) -> None:
    """Take failures that are to run again out of their groups, in the transaction that lets them."""
    if groups := await _group(connection, lane_id, ordinals):
        await connection.execute(_SQL["take_from_groups"], {"batch": batch_id, **_counts(groups)})


async def put_back(connection: Connection, batch_id: UUID, lane_id: int, ordinals: Sequence[int]) -> None:
    """Count failures again whose rerun is given up, in the transaction that does."""
    if groups := await _group(connection, lane_id, ordinals):
        told = {
            "batch": batch_id,
            **_counts(groups),
            "first_at": [group[2] for group in groups],
            "last_at": [group[3] for group in groups],
            "codes": [group[4] for group in groups],
            "statuses": Int4Array([group[5] for group in groups]),
            "lines": Int4Array([group[6] for group in groups]),
            "messages": [group[7] for group in groups],
        }
        await connection.execute(_SQL["put_into_groups"], told)


async def _group(connection: Connection, lane_id: int, ordinals: Sequence[int]) -> list[tuple[Any, ...]]:
    """Group some failures: (fingerprint, count, and what is known of them). Those without a fingerprint were written
    before there was one, or imported, and are counted nowhere."""
    parameters = {"lane_id": lane_id, "ordinals": Int4Array(ordinals)}
    return await (await connection.execute(_SQL["group_failures"], parameters)).fetchall()


def _counts(groups: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    return {
        "fingerprints": Int8Array([group[0] for group in groups]),
        "counts": Int4Array([group[1] for group in groups]),
    }


async def fold_error_groups(connection: Connection, batches: Collection[UUID]) -> None:
    """Sum up the deltas of some batches. So many at a time: what is left waits for the next round."""
    await connection.execute(_SQL["fold_error_groups"], {"ids": list(batches), "limit": _FOLD_LIMIT})

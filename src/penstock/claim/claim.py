"""Claims: leases on ordinals, then their bodies by range."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID

from penstock.db import sql
from penstock.db.arrays import Int4Array, Int8Array
from penstock.db.pool import Connection, Now
from penstock.model import Item, Lease, SessionRequest

_SQL = sql.load("penstock.claim", "claim.sql")

Range = tuple[int, int]


async def claim(
    connection: Connection,
    *,
    pool: str,
    wants: Mapping[str, int],
    worker_id: UUID,
    taper_floor: int = 1,
    suspect_ok: bool = True,
    now: Now = None,
) -> list[Lease]:
    """Lease up to `wants[route]` ordinals of each route; at most one suspect, and none unless `suspect_ok`."""
    cursor = await connection.execute(
        _SQL["claim_open"],
        {
            "pool": pool,
            "routes": list(wants),
            "wants": list(wants.values()),
            "worker": worker_id,
            "taper_floor": taper_floor,
            "suspect_ok": suspect_ok,
            "now": now,
        },
    )
    return [as_lease(row) for row in await cursor.fetchall()]


def as_lease(row: Sequence[Any]) -> Lease:
    lease_id, nonce, lane_id, batch_id, route, endpoint, source_id, source_lane, attempt, reclaims, *rest = row
    starts, stops, session = rest
    ranges = tuple(zip(starts, stops, strict=True))
    place = (lane_id, batch_id, route, endpoint, source_id, source_lane)
    return Lease(lease_id, nonce, *place, attempt, ranges, reclaims, session)


async def forgotten(connection: Connection, worker_id: UUID, known: Iterable[int]) -> list[Lease]:
    """Leases this worker holds in the database but never heard of: the answer to their claim was lost. `known` are
    nonces."""
    cursor = await connection.execute(_SQL["list_forgotten"], {"worker": worker_id, "known": list(known)})
    return [as_lease(row) for row in await cursor.fetchall()]


async def routes_with_work(connection: Connection, pool: str) -> list[str]:
    cursor = await connection.execute(_SQL["routes_with_work"], {"pool": pool})
    return [route for (route,) in await cursor.fetchall()]


async def reclaimed_routes(connection: Connection, pool: str, *, now: Now = None) -> list[str]:
    """The open routes of which something that lost workers held is still to be claimed."""
    cursor = await connection.execute(_SQL["reclaimed_routes"], {"pool": pool, "now": now})
    return [route for (route,) in await cursor.fetchall()]


async def read_bodies(
    connection: Connection,
    lease: Lease,
    ranges: Sequence[Range],
    *,
    max_rows: int,
    max_bytes: int,
    closed_too: bool = False,
) -> list[Item]:
    """Read the first bodies of `ranges`, as many as the bounds allow. Nothing back: the lease was lost, or the lane was
    closed and is not to be read then."""
    place = {
        "lease": lease.id,
        "nonce": lease.nonce,
        "lane_id": lease.lane_id,
        "closed_too": closed_too,
        "source_id": lease.source_id,
        "source_lane": lease.source_lane,
        "rows": max_rows,
        "bytes": max_bytes,
    }
    start, stop = ranges[0]
    if len(ranges) == 1 or stop - start >= max_rows:
        cursor = await connection.execute(
            _SQL["read_range_if_leased"], {**place, "start": start, "stop": stop}, binary=True
        )
    else:
        ordinals = first_ordinals(ranges, max_rows)
        cursor = await connection.execute(_SQL["read_some_if_leased"], {**place, "ordinals": ordinals}, binary=True)
    return [Item(lease, *row) for row in await cursor.fetchall()]


async def read_heads(
    connection: Connection, leases: Sequence[Lease], *, max_bytes: int, closed_too: bool = False
) -> list[Item]:
    """Read the one body of each of some sessions' leases, the first of them that the bound allows.

    The items come in the leases' order. A lease before the last of them that got no item was lost, or its session was
    closed and is not to be read then.
    """
    cursor = await connection.execute(
        _SQL["read_heads_if_leased"],
        {
            "leases": Int8Array([lease.id for lease in leases]),
            "nonces": Int8Array([lease.nonce for lease in leases]),
            "lanes": Int8Array([lease.lane_id for lease in leases]),
            "sources": Int8Array([lease.source_id for lease in leases]),
            "ordinals": Int4Array([lease.ranges[0][0] for lease in leases]),
            "bytes": max_bytes,
            "closed_too": closed_too,
        },
        binary=True,
    )
    return [
        Item(leases[n - 1], ordinal, line, custom_id, body, SessionRequest(*request))
        for n, ordinal, line, custom_id, body, *request in await cursor.fetchall()
    ]


async def closed_lanes(connection: Connection, lanes: Iterable[int]) -> set[int]:
    """Which of these lanes were paused, cancelled or deleted."""
    cursor = await connection.execute(_SQL["closed_lanes"], {"lanes": list(lanes)})
    return {lane_id for (lane_id,) in await cursor.fetchall()}


def first_ordinals(ranges: Iterable[Range], limit: int) -> list[int]:
    ordinals: list[int] = []
    for start, stop in ranges:
        ordinals.extend(range(start, min(stop, start + limit - len(ordinals))))
        if len(ordinals) >= limit:
            break
    return ordinals


def beyond(ranges: Sequence[Range], ordinal: int) -> list[Range]:
    """What is left of ascending ranges after everything up to `ordinal` was read."""
    return [(max(start, ordinal + 1), stop) for start, stop in ranges if stop > ordinal + 1]

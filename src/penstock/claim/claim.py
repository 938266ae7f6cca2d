"""Claims: leases on ordinals, then their bodies by range."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from penstock.db import sql
from penstock.db.arrays import Int4Array, Int8Array
from penstock.db.pool import Connection, Now
from penstock.model import Item, Lease, SessionRequest

_SQL = sql.load("penstock.claim", "claim.sql")

Range = tuple[int, int]

# Leases into which a claim is divided: enough for turns to come round soon, few enough for each to be worth a lease.
_PIECES = 8
# Lanes looked at from the head of each line. A lane farther back gets its turn by a later claim, which comes soon when
# those before have little left.
_LOOK = 32


class LinePlace(NamedTuple):
    """A place in a route's line: all lanes and deferrals before it have been served."""

    band: int
    tag: float
    alone: bool = False
    """Whether a single owner stands in line, with a single lane."""
    due: int = 0
    """Ordinals of due deferrals that stand in line."""


FRONT = LinePlace(-(2**15), -math.inf)


class Claimed(NamedTuple):
    leases: list[Lease]
    places: dict[str, list[LinePlace]]
    """Place where the line of each route begins now, in each band."""
    at: datetime
    """Time of the claim, on the database's clock."""
    next_due_at: datetime | None
    """When the next deferral that does not stand in line is due; perhaps it is already."""


async def line_up(
    connection: Connection,
    *,
    pool: str,
    routes: Iterable[str],
    places: Mapping[str, LinePlace] | None = None,
    due_from: datetime | None = None,
    limit: int = 1_000,
    now: Now = None,
) -> None:
    """Put deferrals in line that have become due since `due_from`; about `limit` ordinals of each route."""
    routes = list(routes)
    alone = [(places or {}).get(route, FRONT).alone for route in routes]
    parameters = {"pool": pool, "routes": routes, "alone": alone, "limit": limit, "now": now}
    await connection.execute(_SQL["line_up_due"], {**parameters, **_from(routes, places, due_from)})


async def claim_in_line(
    connection: Connection,
    *,
    pool: str,
    wants: Mapping[str, int],
    worker_id: UUID,
    places: Mapping[str, LinePlace] | None = None,
    due_from: datetime | None = None,
    look: int = _LOOK,
    full: Sequence[int] = (),
    taper_floor: int = 1,
    suspect_ok: bool = True,
    now: Now = None,
) -> Claimed:
    """Lease ordinals from these places in line on: of the first `look` lanes of each route, and of as many deferrals;
    not of lanes that are `full`."""
    cursor = await connection.execute(
        _SQL["claim_open"],
        {
            "pool": pool,
            "routes": list(wants),
            "wants": list(wants.values()),
            **_from(wants, places, due_from),
            "worker": worker_id,
            "full": list(full),
            "taper_floor": taper_floor,
            "pieces": _PIECES,
            "look": look,
            "suspect_ok": suspect_ok,
            "now": now,
        },
    )
    rows = await cursor.fetchall()
    at, next_due_at, routes, *columns = rows[0][:7]
    line: dict[str, list[LinePlace]] = {}
    for route, *place in zip(routes or (), *(column or () for column in columns), strict=True):
        line.setdefault(route, []).append(LinePlace(*place))
    return Claimed([as_lease(row[7:]) for row in rows if row[7] is not None], line, at, next_due_at)


def _from(routes: Iterable[str], places: Mapping[str, LinePlace] | None, due_from: datetime | None) -> dict[str, Any]:
    begin = [(places or {}).get(route, FRONT) for route in routes]
    return {
        "from_bands": [place.band for place in begin],
        "from_tags": [place.tag for place in begin],
        "due_from": due_from or "-infinity",
    }


def as_lease(row: Sequence[Any]) -> Lease:
    lease_id, nonce, lane_id, batch_id, route, endpoint, source_id, source_lane, attempt, reclaims, *rest = row
    starts, stops, session, generation, spent = rest
    ranges = tuple(zip(starts, stops, strict=True))
    place = (lane_id, batch_id, route, endpoint, source_id, source_lane)
    return Lease(lease_id, nonce, *place, attempt, ranges, reclaims, session, generation, spent)


async def list_forgotten_leases(connection: Connection, worker_id: UUID, known: Iterable[int]) -> list[Lease]:
    """List leases that this worker holds in the database and does not know: the answer to their claim was lost. `known`
    are nonces."""
    cursor = await connection.execute(_SQL["list_forgotten"], {"worker": worker_id, "known": list(known)})
    return [as_lease(row) for row in await cursor.fetchall()]


async def list_routes_with_work(connection: Connection, pool: str) -> list[str]:
    cursor = await connection.execute(_SQL["routes_with_work"], {"pool": pool})
    return [route for (route,) in await cursor.fetchall()]


async def list_reclaimed_routes(connection: Connection, pool: str, *, now: Now = None) -> list[str]:
    """List the open routes that have items reclaimed from lost workers and not claimed since."""
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
    """Read the first bodies of `ranges`, as many as the bounds allow. Empty if the lease was lost, or if the lane was
    closed and `closed_too` is off."""
    place = {
        "source_id": lease.source_id,
        "source_lane": lease.source_lane,
        "rows": max_rows,
        "bytes": max_bytes,
    }
    start, stop = ranges[0]
    if len(ranges) == 1 or stop - start >= max_rows:
        read = await connection.execute(_SQL["read_range"], {**place, "start": start, "stop": stop}, binary=True)
    else:
        ordinals = first_ordinals(ranges, max_rows)
        read = await connection.execute(_SQL["read_some"], {**place, "ordinals": ordinals}, binary=True)
    rows = await read.fetchall()
    if not rows or not await is_leased(connection, lease, closed_too=closed_too):
        return []
    return [Item(lease, *row) for row in rows]


async def is_leased(connection: Connection, lease: Lease, *, closed_too: bool = False) -> bool:
    """Whether what was read of a lease's items may be used: it was not lost, and its lane not closed unless
    `closed_too`."""
    guard = {"lease": lease.id, "nonce": lease.nonce, "lane_id": lease.lane_id, "closed_too": closed_too}
    return await (await connection.execute(_SQL["is_leased"], guard)).fetchone() == (True,)


async def read_heads(
    connection: Connection, leases: Sequence[Lease], *, max_bytes: int, closed_too: bool = False
) -> list[Item]:
    """Read the one body of each of some sessions' leases, the first of them that the bound allows.

    The items come in the leases' order. A lease without an item, before the last item's, was lost, or its session was
    closed and `closed_too` is off; if there are no items, that goes for every lease.
    """
    while leases:
        bodies, heads = await _read_heads(connection, leases, max_bytes, closed_too=closed_too)
        items = [
            Item(leases[n - 1], leases[n - 1].ranges[0][0], line, custom_id, body, SessionRequest(*heads[n]))
            for n, line, custom_id, body in bodies
            if n in heads
        ]
        if items or not bodies:
            return items
        # The bodies read were all of lost leases: go on with the leases behind them.
        leases = leases[bodies[-1][0] :]
    return []


async def _read_heads(
    connection: Connection, leases: Sequence[Lease], max_bytes: int, *, closed_too: bool
) -> tuple[list[Any], dict[int, Any]]:
    """Read (number, line, custom id, body) of the first leases; and, by number from 1, the requests still leased."""
    ordinals = Int4Array([lease.ranges[0][0] for lease in leases])
    place = {"sources": Int8Array([lease.source_id for lease in leases]), "ordinals": ordinals, "bytes": max_bytes}
    guard = {
        "leases": Int8Array([lease.id for lease in leases]),
        "nonces": Int8Array([lease.nonce for lease in leases]),
        "lanes": Int8Array([lease.lane_id for lease in leases]),
        "ordinals": ordinals,
        "closed_too": closed_too,
    }
    bodies = await (await connection.execute(_SQL["read_heads"], place, binary=True)).fetchall()
    heads = await (await connection.execute(_SQL["find_heads_if_leased"], guard, binary=True)).fetchall()
    return bodies, {n: request for n, *request in heads}


async def find_closed_lanes(connection: Connection, lanes: Iterable[int]) -> set[int]:
    """Find which of these lanes were paused, cancelled or deleted."""
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
    """Ranges left of ascending ranges after everything up to `ordinal` was read."""
    return [(max(start, ordinal + 1), stop) for start, stop in ranges if stop > ordinal + 1]

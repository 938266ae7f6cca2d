"""Images of rows: stored with the rows that use them, read for workers, deleted with the last use.

Storing and deleting take several statements of one transaction. They are written once, as steps, and run on an async
connection (servers) or a blocking one (commands).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import psycopg

from penstock.db import sql
from penstock.db.pool import Connection

_SQL = sql.load("penstock.blobs", "blobs.sql")

_T = TypeVar("_T")

Steps = Generator[tuple[str, Mapping[str, Any]], list[tuple[Any, ...]], _T]
"""Statements by name, with their parameters. Each is sent the rows of the one before."""


class Place(NamedTuple):
    """Lane of a source, in whose rows images are used."""

    source_id: int
    source_lane: int


class NewUse(NamedTuple):
    """Row that is being stored, and the image that it stands for."""

    ordinal: int
    digest: bytes
    data: bytes


class Erased(NamedTuple):
    next: int
    """Ordinal to go on from."""
    uses: int


class Images(NamedTuple):
    """Images of some rows."""

    by_ordinal: dict[int, bytes]
    stop: int | None
    """First row whose image was not read any more; None if all were."""


def store_images(owner: str, place: Place, uses: Sequence[NewUse]) -> Steps[None]:
    """Store the images of rows that the same transaction stores, each once for its owner."""
    content = {use.digest: use.data for use in uses}
    sizes = [len(data) for data in content.values()]
    held = yield "hold_blobs", {"owner": owner, "digests": list(content), "sizes": sizes}
    ids: dict[bytes, int] = {bytes(digest): blob_id for digest, blob_id in held}
    stored = {blob_id for (blob_id,) in (yield "list_stored", {"ids": list(ids.values())})}
    for digest, blob_id in ids.items():
        if blob_id not in stored:
            yield "store_bytes", {"id": blob_id, "bytes": content[digest]}
    ordinals = [use.ordinal for use in uses]
    yield "add_uses", {**place._asdict(), "ordinals": ordinals, "ids": [ids[use.digest] for use in uses]}


def erase_images(place: Place, start: int, total: int, rows: int) -> Steps[Erased]:
    """Delete the uses of the next rows below `total`, and every image that was used by no other row.

    Goes as far as the first image that another transaction has locked, and on from there the next time.
    """
    bounds = {**place._asdict(), "next": start, "total": total, "rows": rows}
    held = yield "hold_used_if_free", bounds
    [(next_, uses, unused)] = yield "erase_uses_if_held", {**bounds, "held": [blob_id for (blob_id,) in held]}
    if unused:
        yield "erase_bytes", {"ids": unused}
    return Erased(next_, uses)


async def run_steps(connection: Connection, steps: Steps[_T]) -> _T:
    """Run statements one after the other, in the connection's transaction."""
    rows: Any = None
    while True:
        try:
            name, parameters = steps.send(rows)
        except StopIteration as end:
            result: _T = end.value
            return result
        cursor = await connection.execute(_SQL[name], parameters)
        rows = [] if cursor.description is None else await cursor.fetchall()


def run_steps_blocking(connection: psycopg.Connection, steps: Steps[_T]) -> _T:
    """Run statements one after the other, as `run_steps` does, on a blocking connection."""
    rows: Any = None
    while True:
        try:
            name, parameters = steps.send(rows)
        except StopIteration as end:
            result: _T = end.value
            return result
        cursor = connection.execute(_SQL[name], parameters)
        rows = [] if cursor.description is None else cursor.fetchall()


async def read_images(connection: Connection, place: Place, ordinals: Sequence[int], max_bytes: int) -> Images:
    """Read the images of some rows, ascending: at least one, and no more than a byte budget."""
    asked = {**place._asdict(), "ordinals": list(ordinals)}
    used = await (await connection.execute(_SQL["list_used"], asked)).fetchall()
    ids: dict[int, int] = {}
    stop = None
    for ordinal, blob_id, size in used:
        if ids and size > max_bytes:
            stop = ordinal
            break
        ids[ordinal] = blob_id
        max_bytes -= size
    cursor = await connection.execute(_SQL["read_bytes"], {"ids": list(set(ids.values()))}, binary=True)
    data: dict[int, bytes] = dict(await cursor.fetchall())
    return Images({ordinal: data[blob_id] for ordinal, blob_id in ids.items() if blob_id in data}, stop)

"""Erasure reports: they outlive the erased objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from penstock.api import objects
from penstock.api.endpoint import Call, Endpoint
from penstock.api.errors import not_found
from penstock.api.files import cursor
from penstock.db.pool import borrowed
from penstock.erase import purge
from penstock.erase.purge import Erasure, Kind
from penstock.model import public_id

ID_KINDS: Mapping[Kind, str] = {
    "file": "file",
    "output": "file",
    "errors": "file",
    "batch": "batch",
    "message_batch": "msgbatch",
    "message_batch_results": "msgbatch",
    "upload": "upload",
    "session": "session",
}
"""Prefix of the erased object's public id, by kind."""


class ErasuresQuery(msgspec.Struct):
    after: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20


async def list_erasures(call: Call[ErasuresQuery, None]) -> objects.ErasureList:
    query = call.query
    async with borrowed(call.database) as connection:
        rows = await purge.list_erasures(connection, call.caller.owner, cursor("erasure", query.after), query.limit + 1)
    data = [_report(row) for row in rows[: query.limit]]
    return objects.ErasureList.of(data, has_more=len(rows) > query.limit)


async def retrieve_erasure(call: Call[None, None]) -> objects.Erasure:
    erasure_id = call.id("erasure", "erasure_id")
    async with borrowed(call.database) as connection:
        row = await purge.get_erasure(connection, erasure_id, call.caller.scope)
    if row is None:
        raise not_found("Erasure", call.path["erasure_id"])
    return _report(row)


def _report(row: Erasure) -> objects.Erasure:
    return objects.Erasure(
        id=public_id("erasure", row.id),
        kind=row.kind,
        object_id=public_id(ID_KINDS[row.kind], row.object_id),
        status="finished" if row.finished_at else "in_progress",
        requested_at=objects.seconds(row.requested_at),
        finished_at=objects.seconds_or_none(row.finished_at),
        erased=objects.Erased(
            inputs=row.templates,
            chunks=row.chunks,
            outcomes=row.outcomes,
            attempts=row.attempts,
            others=row.others,
        ),
    )


ENDPOINTS = (
    Endpoint("GET", "/v1/erasures", list_erasures, "Erasure reports, newest first."),
    Endpoint(
        "GET",
        "/v1/erasures/{erasure_id}",
        retrieve_erasure,
        "One erasure: what is gone, and since when.",
        errors=(404,),
    ),
)

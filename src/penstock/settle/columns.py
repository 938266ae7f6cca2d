"""Result columns of jobs: recorded when they are first seen, before the results that have them are written."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from uuid import UUID

import msgspec

from penstock.db import sql
from penstock.db.pool import Connection

_SQL = sql.load("penstock.settle", "settle.sql")

_REMEMBERED_JOBS = 1_000

_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class ResultColumns:
    """Result columns that this worker knows to be recorded."""

    def __init__(self) -> None:
        self._known: OrderedDict[UUID, set[str]] = OrderedDict()

    async def record(self, connection: Connection, results: Iterable[tuple[UUID, bytes]]) -> None:
        """Record the columns of some results of jobs that are not recorded yet, in the order in which they are met."""
        fresh: dict[UUID, dict[str, None]] = {}
        for batch_id, body in results:
            columns = _decoder.decode(body).keys()
            known = self._known.get(batch_id)
            if known is None or not columns <= known:
                fresh.setdefault(batch_id, {}).update(dict.fromkeys(columns))
        for batch_id, names in fresh.items():
            await connection.execute(_SQL["add_columns"], {"batch_id": batch_id, "names": list(names)})
            self._known.setdefault(batch_id, set()).update(names)
            self._known.move_to_end(batch_id)
            if len(self._known) > _REMEMBERED_JOBS:
                self._known.popitem(last=False)

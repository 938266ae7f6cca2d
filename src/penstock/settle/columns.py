"""Result columns of jobs: recorded when they are first seen, before the results that have them are written."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from uuid import UUID

import msgspec

from penstock.config import TableLimits
from penstock.db import sql
from penstock.db.pool import Connection, fetch_one

_SQL = sql.load("penstock.settle", "settle.sql")

_REMEMBERED_JOBS = 1_000
_MAX_NAME_BYTES = 2_000
"""Longer names do not fit into the index over them."""

_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class ResultColumns:
    """Result columns that this worker knows to be recorded."""

    def __init__(self, limits: TableLimits) -> None:
        self._limits = limits
        self._known: OrderedDict[UUID, set[str]] = OrderedDict()

    async def record(self, connection: Connection, results: Mapping[int, tuple[UUID, bytes]]) -> dict[int, str]:
        """Record the columns of some results of jobs that are not recorded yet, in the order in which they are met.

        Returns, by their place, why results cannot be taken: a job has so many columns and no more. Of a job that was
        deleted nothing is recorded, and its results are refused by their lease.
        """
        refused: dict[int, str] = {}
        fresh: dict[UUID, dict[int, Collection[str]]] = {}
        for place, (batch_id, body) in results.items():
            columns = _decoder.decode(body).keys()
            known = self._known.get(batch_id, set[str]())
            if columns <= known:
                continue
            if (reason := self._refusal(columns, known)) is not None:
                refused[place] = reason
            else:
                fresh.setdefault(batch_id, {})[place] = columns
        for batch_id, rows in fresh.items():
            refused |= await self._record_job(connection, batch_id, rows)
        return refused

    def _refusal(self, columns: Collection[str], known: Collection[str]) -> str | None:
        limits = self._limits
        for name in set(columns).difference(known):
            if len(name) > limits.max_column_name_chars or len(name.encode()) > _MAX_NAME_BYTES:
                most = min(limits.max_column_name_chars, _MAX_NAME_BYTES)
                return f"the name of a column has {len(name):,} characters; at most {most:,} (max_column_name_chars)"
        if len({*known, *columns}) > limits.max_result_columns:
            return f"the job's results have more than {limits.max_result_columns:,} columns (max_result_columns)"
        return None

    async def _record_job(
        self, connection: Connection, batch_id: UUID, rows: Mapping[int, Collection[str]]
    ) -> dict[int, str]:
        refused: dict[int, str] = {}
        job = {"batch_id": batch_id}
        async with connection.transaction():
            # Two statements: what is seen in the second is as of the lock.
            await connection.execute(_SQL["hold_columns"], job)
            found = await fetch_one(connection, _SQL["list_columns_if_there"], job)
            if found is None:
                return {}
            known = dict.fromkeys(found[0])
            recorded = len(known)
            for place, columns in rows.items():
                if (reason := self._refusal(columns, known)) is not None:
                    refused[place] = reason
                else:
                    known |= dict.fromkeys(columns)
            if names := list(known)[recorded:]:
                await connection.execute(_SQL["add_columns"], {**job, "names": names})
        self._known[batch_id] = set(known)
        self._known.move_to_end(batch_id)
        if len(self._known) > _REMEMBERED_JOBS:
            self._known.popitem(last=False)
        return refused

"""Statements that are asked again and again while somebody waits for the answer.

A cursor works out anew each time what it knew the last time: where the parameters go, how each is written, whether the
statement is prepared by now. Where the calls are few and far between, that is a tenth of a millisecond.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg import generators, pq
from psycopg.adapt import PyFormat, Transformer
from psycopg.rows import TupleRow

_PLACE = re.compile(rb"%\((\w+)\)([sb])|%%")
_Types = tuple[int, ...]


class Kept:
    """One statement on one connection, prepared when it is first asked."""

    def __init__(self, connection: psycopg.AsyncConnection[TupleRow], statement: bytes, number: int) -> None:
        self._connection = connection
        self._number = number
        self._names: list[str] = []
        self._formats: list[PyFormat] = []
        self._text = _PLACE.sub(self._place, statement)
        self._values = Transformer(connection)
        self._columns = Transformer(connection)
        self._tries = 0
        self._prepared: dict[_Types, bytes] = {}
        """By the types of the parameters: a large number is of another type than a small one."""

    def _place(self, found: re.Match[bytes]) -> bytes:
        if found[1] is None:
            return b"%"
        name = found[1].decode()
        if name not in self._names:
            self._names.append(name)
            self._formats.append(PyFormat.BINARY if found[2] == b"b" else PyFormat.TEXT)
        return b"$%d" % (self._names.index(name) + 1)

    async def ask(self, parameters: Mapping[str, Any]) -> TupleRow | None:
        """The first row. Raises what the statement does."""
        connection, pgconn = self._connection, self._connection.pgconn
        written = self._values.dump_sequence([parameters[name] for name in self._names], self._formats)
        types = self._values.types or ()
        async with connection.lock:
            name = self._prepared.get(types)
            if name is None:
                name = await self._prepare(types)
            pgconn.send_query_prepared(name, written, param_formats=self._values.formats)
            result = await self._result()
        self._columns.set_pgresult(result)
        row = self._columns.load_row(0, tuple) if result.ntuples else None
        self._columns.set_pgresult(None)
        return row

    async def _prepare(self, types: _Types) -> bytes:
        self._tries += 1  # one that was broken off may have left its name behind
        name = b"_kept_%d_%d" % (self._number, self._tries)
        self._connection.pgconn.send_prepare(name, self._text, param_types=types)
        await self._result()
        self._prepared[types] = name
        return name

    async def _result(self) -> pq.abc.PGresult:
        results: list[pq.abc.PGresult] = await self._connection.wait(generators.execute(self._connection.pgconn))
        result = results[-1]
        if result.status not in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK):
            raise psycopg.errors.error_from_result(result)
        return result

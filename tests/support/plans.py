"""What a statement really does: its plan as executed, with the buffers it touched.

Costs are counted in buffers, not in time: a count is the same on a busy machine, and growth shows at sizes that
take seconds to make.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Any, Self, TypeVar

import psycopg
from psycopg import sql
from psycopg.adapt import PyFormat, Transformer
from psycopg.rows import TupleRow

from penstock.db import arrays
from penstock.db.pool import Connection

_T = TypeVar("_T")
_Parameters = Mapping[str, Any]
_EXPLAIN = b"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) "
_CUSTOM_PLANS = 5  # how many the server makes of a prepared statement before it considers a generic one
_PLACEHOLDER = re.compile(rb"%\((\w+)\)[sbt]")


@dataclass(frozen=True, slots=True)
class Plan:
    """One executed statement."""

    root: dict[str, Any]
    planning_ms: float

    @property
    def buffers(self) -> int:
        """Pages looked at, in memory or not; a page looked at twice counts twice."""
        # What nothing reads from runs after the main query, and is not part of its figures.
        read = {node["CTE Name"] for node in self.nodes() if node["Node Type"] == "CTE Scan"}
        afterwards = [node for node in self.nodes() if _name(node) not in read and _name(node)]
        return sum(map(_buffers, [self.root, *afterwards]))

    @property
    def rows(self) -> int:
        """Rows answered."""
        return int(self.root["Actual Rows"])

    @property
    def rows_handled(self) -> int:
        """Rows that passed through any node, those thrown away included: what shows a loop within a loop."""
        return int(sum(_per_loop(node) * node["Actual Loops"] for node in self.nodes()))

    def scanned_whole(self) -> set[str]:
        """Tables read from end to end, by scan or through an index without a condition."""
        return {
            node["Relation Name"]
            for node in self.nodes()
            if node["Node Type"] == "Seq Scan" or (node["Node Type"].startswith("Index") and not _is_bounded(node))
        }

    def nodes(self) -> Iterator[dict[str, Any]]:
        """Every node that was executed."""
        todo = [self.root]
        while todo:
            node = todo.pop()
            if node["Actual Loops"]:
                yield node
                todo.extend(node.get("Plans", ()))

    def __str__(self) -> str:
        return "\n".join(_drawn(self.root, 0))


def _together(plans: list[Plan]) -> Plan:
    """Several statements as if they were one; the rows are those of all."""
    if len(plans) == 1:
        return plans[0]
    root: dict[str, Any] = {
        "Node Type": "Statements",
        "Plans": [plan.root for plan in plans],
        "Actual Rows": sum(plan.rows for plan in plans),
        "Actual Loops": 1,
        "Shared Hit Blocks": sum(_buffers(plan.root) for plan in plans),
        "Shared Read Blocks": 0,
    }
    return Plan(root, sum(plan.planning_ms for plan in plans))


def _name(node: dict[str, Any]) -> str:
    """Of a WITH query; empty for other nodes."""
    name = str(node.get("Subplan Name", ""))
    return name.removeprefix("CTE ") if name.startswith("CTE ") else ""


def _buffers(node: dict[str, Any]) -> int:
    return int(node["Shared Hit Blocks"] + node["Shared Read Blocks"])


def _per_loop(node: dict[str, Any]) -> float:
    kinds = ("Actual Rows", "Rows Removed by Filter", "Rows Removed by Join Filter")
    return float(sum(node.get(kind, 0) for kind in kinds))


def _is_bounded(node: dict[str, Any]) -> bool:
    return "Index Cond" in node or "Relation Name" not in node


def _drawn(node: dict[str, Any], depth: int) -> Iterator[str]:
    words = [node.get("Subplan Name", ""), node["Node Type"], node.get("Relation Name", ""), node.get("Index Name", "")]
    figures = f"rows={node['Actual Rows']:g} loops={node['Actual Loops']:g} buffers={_buffers(node)}"
    yield f"{'  ' * depth}{' '.join(filter(None, words))} {figures}"
    for child in node.get("Plans", ()):
        yield from _drawn(child, depth + 1)


class Mode(StrEnum):
    """How the server comes to a plan."""

    CUSTOM = "custom"
    """For these very values."""
    GENERIC = "generic"
    """For any values, unseen."""
    CHOSEN = "chosen"
    """The seventh time a prepared statement runs, when the server chooses between the two by itself."""


class ExplainingConnection(psycopg.AsyncConnection[TupleRow]):
    """A connection that, while asked to, runs each statement under EXPLAIN first, in a transaction rolled back."""

    plans: list[Plan] | None = None
    mode = Mode.CUSTOM

    async def execute(self, query: Any, params: Any = None, **options: Any) -> psycopg.AsyncCursor[TupleRow]:
        if self.plans is not None:
            explain = self._explain_custom if self.mode is Mode.CUSTOM else self._explain_prepared
            self.plans.append(await explain(query, params or {}))
        return await super().execute(query, params, **options)

    async def _explain_custom(self, query: bytes, parameters: _Parameters) -> Plan:
        return await self._explain_twice(_EXPLAIN + query, parameters)

    async def _explain_prepared(self, query: bytes, parameters: _Parameters) -> Plan:
        names = list(dict.fromkeys(name.decode() for name in _PLACEHOLDER.findall(query)))
        order = {name: number for number, name in enumerate(names, 1)}
        numbered = _PLACEHOLDER.sub(lambda match: b"$%d" % order[match[1].decode()], query)
        types = b", ".join(await self._types([parameters[name] for name in names]))
        values = sql.SQL(", ").join(await self._literals(names, parameters))
        run = sql.SQL("EXECUTE looked_at ({})").format(values)
        await super().execute(b"PREPARE looked_at (%b) AS " % types + numbered)
        try:
            for _ in range(_CUSTOM_PLANS if self.mode is Mode.CHOSEN else 0):
                await super().execute(sql.SQL("EXPLAIN ") + run)
            return await self._explain_twice(sql.SQL(_EXPLAIN.decode()) + run, None)
        finally:
            await super().execute("DEALLOCATE looked_at")

    async def _types(self, values: list[Any]) -> list[bytes]:
        """The types psycopg would declare the parameters with."""
        transformer = Transformer(self)
        transformer.dump_sequence(values, [PyFormat.AUTO] * len(values))
        cursor = await super().execute(
            "SELECT CASE oid WHEN 0 THEN 'unknown' ELSE oid::regtype::text END"
            " FROM unnest(%s::oid[]) WITH ORDINALITY AS t (oid, n) ORDER BY n",
            [list(transformer.types or ())],
        )
        return [name.encode() for (name,) in await cursor.fetchall()]

    async def _literals(self, names: list[str], parameters: _Parameters) -> list[sql.Literal]:
        """The parameters as text. The server converts them: some exist in its binary format only."""
        columns = ", ".join(f"%({name})s::text" for name in names)
        row = await (await super().execute(f"SELECT {columns}".encode(), parameters)).fetchone()
        return [sql.Literal(value) for value in row or ()]

    async def _explain_twice(self, statement: Any, parameters: _Parameters | None) -> Plan:
        """The first run fills the session's catalogue caches, whose misses would count as well."""
        await self._rolled_back(statement, parameters)
        return await self._rolled_back(statement, parameters)

    async def _rolled_back(self, statement: Any, parameters: _Parameters | None) -> Plan:
        async with self.transaction(force_rollback=True):
            row = await (await super().execute(statement, parameters)).fetchone()
        if row is None:
            raise AssertionError("EXPLAIN always answers one row")
        (explained,) = row[0]
        return Plan(explained["Plan"], explained["Planning Time"])


class Session:
    """A database session driven from plain tests."""

    def __init__(self, conninfo: str) -> None:
        self.conninfo = conninfo
        self._runner = asyncio.Runner()
        self.connection = self._runner.run(ExplainingConnection.connect(conninfo, autocommit=True))
        arrays.register(self.connection)
        self.execute("SET synchronous_commit = off")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.run(self.connection.close())
        self._runner.close()

    def run(self, operation: Callable[[Connection], Awaitable[_T]]) -> _T:
        async def call() -> _T:
            return await operation(self.connection)

        return self._runner.run(call())

    def execute(self, query: str, parameters: _Parameters | None = None) -> list[tuple[Any, ...]]:
        async def call(connection: Connection) -> list[tuple[Any, ...]]:
            cursor = await connection.execute(query.encode(), parameters)
            return await cursor.fetchall() if cursor.description else []

        return self.run(call)

    def explain(self, operation: Callable[[Connection], Awaitable[object]], mode: Mode = Mode.CUSTOM) -> Plan:
        """The plan of the operation's statements; nothing it does is kept."""

        plans: list[Plan] = []

        async def call() -> None:
            self.connection.mode = mode
            async with self.connection.transaction(force_rollback=True):
                self.connection.plans = plans
                try:
                    await operation(self.connection)
                finally:
                    self.connection.plans = None

        self.execute(f"SET plan_cache_mode = {'force_generic_plan' if mode is Mode.GENERIC else 'auto'}")
        self._runner.run(call())
        return _together(plans)

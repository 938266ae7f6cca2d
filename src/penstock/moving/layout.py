"""The eager layout: its tables and columns, and what they are called in a database at hand.

Statements of `source.sql` name the tables `old_files` and so on, with the layout's own columns. Each is sent with a
prelude of common table expressions by these names; PostgreSQL puts the tables in their place, so indexes are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from psycopg import Connection, sql

from penstock.errors import PenstockError, UsageError

# Table -> column -> type. A column in NEEDED must be there; the others may be mapped to nothing and read as NULL.
COLUMNS: Mapping[str, Mapping[str, str]] = {
    "files": {
        "id": "uuid",
        "name": "text",
        "purpose": "text",
        "size_bytes": "int8",
        "status": "text",
        "uploaded_by": "text",
        "created_at": "timestamptz",
        "expires_at": "timestamptz",
        "deleted_at": "timestamptz",
    },
    "request_templates": {
        "id": "uuid",
        "file_id": "uuid",
        "line_number": "int4",
        "custom_id": "text",
        "endpoint": "text",
        "method": "text",
        "path": "text",
        "body": "text",
        "model": "text",
        "api_key": "text",
    },
    "batches": {
        "id": "uuid",
        "file_id": "uuid",
        "endpoint": "text",
        "completion_window": "text",
        "metadata": "jsonb",
        "created_by": "text",
        "created_at": "timestamptz",
        "expires_at": "timestamptz",
        "cancelling_at": "timestamptz",
        "completed_at": "timestamptz",
        "failed_at": "timestamptz",
        "cancelled_at": "timestamptz",
        "deleted_at": "timestamptz",
        "output_file_id": "uuid",
        "error_file_id": "uuid",
        "total_requests": "int8",
    },
    "requests": {
        "id": "uuid",
        "batch_id": "uuid",
        "template_id": "uuid",
        "state": "text",
        "retry_attempt": "int4",
        "not_before": "timestamptz",
        "custom_id": "text",
        "model": "text",
        "response_status": "int4",
        "response_body": "text",
        "error": "text",
        "claimed_at": "timestamptz",
        "started_at": "timestamptz",
        "completed_at": "timestamptz",
        "failed_at": "timestamptz",
        "canceled_at": "timestamptz",
    },
}
NEEDED: Mapping[str, frozenset[str]] = {
    "files": frozenset({"id", "created_at"}),
    "request_templates": frozenset({"id", "file_id", "line_number", "path", "body", "model"}),
    "batches": frozenset({"id", "file_id", "created_at", "completed_at", "cancelled_at"}),
    "requests": frozenset({"id", "batch_id", "template_id", "state", "response_status", "response_body", "error"}),
}

_MAP_HINT = (
    "Write --map TABLE=ITS_NAME or --map TABLE.COLUMN=ITS_NAME; --map TABLE.COLUMN= for a column that is not there."
)


@dataclass(frozen=True, slots=True)
class Layout:
    """Names of the layout's tables and columns in one schema."""

    schema: str
    tables: Mapping[str, str] = field(default_factory=dict)
    """Names of tables that have another one."""
    columns: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """Names of columns that have another one; empty if there is no such column."""

    @classmethod
    def parse(cls, schema: str, maps: Iterable[str]) -> Layout:
        """Parse the options `--map NAME=NAME`."""
        tables: dict[str, str] = {}
        columns: dict[tuple[str, str], str] = {}
        for text in maps:
            known, equals, name = text.partition("=")
            table, dot, column = known.strip().partition(".")
            name = name.strip()
            if not equals or table not in COLUMNS or (dot and column not in COLUMNS[table]) or not (dot or name):
                raise UsageError(f"--map {text}: the layout has no such name", hint=_MAP_HINT)
            if not dot:
                tables[table] = name
            elif not name and column in NEEDED[table]:
                raise UsageError(f"--map {text}: nothing can be imported without this column", hint=_MAP_HINT)
            else:
                columns[table, column] = name
        return cls(schema, tables, columns)

    def table(self, name: str) -> str:
        return self.tables.get(name, name)

    def column(self, table: str, name: str) -> str:
        return self.columns.get((table, name), name)

    def name(self, table: str) -> sql.Composable:
        """The table, as statements that write to it name it."""
        return sql.Identifier(self.schema, self.table(table))

    def prelude(self) -> sql.Composed:
        """The common table expressions of all tables. Those that a statement does not name cost nothing."""
        return sql.SQL("WITH ") + sql.SQL(", ").join(self._expression(table) for table in COLUMNS)

    def _expression(self, table: str) -> sql.Composed:
        parts: list[sql.Composable] = []
        for column, kind in COLUMNS[table].items():
            found = self.column(table, column)
            value = sql.Identifier(found) if found else sql.SQL("NULL")
            parts.append(sql.SQL("{}::{} AS {}").format(value, sql.SQL(kind), sql.Identifier(column)))
        return sql.SQL("{} AS NOT MATERIALIZED (SELECT {} FROM {})").format(
            sql.Identifier(f"old_{table}"), sql.SQL(", ").join(parts), self.name(table)
        )

    def check(self, connection: Connection) -> None:
        """Raise unless every table and column is there and may be read."""
        rows = connection.execute(_LIST_COLUMNS, {"schema": self.schema}).fetchall()
        if not rows:
            raise PenstockError(
                f"the database has no schema '{self.schema}' with tables in it",
                hint="Name the schema of the old system with --schema.",
            )
        found: dict[str, set[str]] = {}
        readable: dict[str, bool] = {}
        for table, column, may_read in rows:
            found.setdefault(table, set()).add(column)
            readable[table] = may_read
        missing = [*self._missing(found)]
        if missing:
            raise PenstockError(
                f"schema '{self.schema}' is not of the eager layout: it has no " + ", ".join(missing), hint=_MAP_HINT
            )
        if refused := [name for table in COLUMNS if not readable[name := self.table(table)]]:
            raise PenstockError(
                f"the role may not read {', '.join(refused)} in schema '{self.schema}'",
                hint="Grant it SELECT on the tables and USAGE on the schema; nothing is written to the source.",
            )

    def _missing(self, found: Mapping[str, set[str]]) -> Iterable[str]:
        for table, columns in COLUMNS.items():
            name = self.table(table)
            if name not in found:
                yield f"table {name}"
                continue
            for column in columns:
                mapped = self.column(table, column)
                if mapped and mapped not in found[name]:
                    yield f"column {name}.{mapped}"


# From the catalogue, not information_schema, which hides what a role has no rights to: that is another error.
_LIST_COLUMNS = b"""
SELECT c.relname, a.attname,
       has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT')
  FROM pg_catalog.pg_class c
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
 WHERE n.nspname = %(schema)s AND c.relkind IN ('r', 'p', 'v', 'm', 'f')
"""

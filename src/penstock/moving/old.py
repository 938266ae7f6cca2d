"""The old system's database as it is written on the way back, in whatever names it has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, LiteralString
from uuid import UUID

import psycopg
from psycopg import Connection, sql

from penstock.errors import PenstockError
from penstock.moving.layout import COLUMNS, Layout
from penstock.moving.rows import LineOrder
from penstock.moving.source import connect, explain_source_errors

_PAGE = 2_000

# What a batch's requests are to be, line by line.
_ROWS = {
    "template_id": "uuid",
    "custom_id": "text",
    "model": "text",
    "ours": "boolean",
    "state": "text",
    "retries": "int4",
    "status": "int4",
    "response": "text",
    "error": "text",
    "finished_at": "timestamptz",
}
_ASSIGNED: Mapping[str, LiteralString] = {
    "state": "n.state",
    "retry_attempt": "coalesce(n.retries, {retry_attempt}, 0)",
    "not_before": "NULL",
    "response_status": "n.status",
    "response_body": "n.response",
    "error": "n.error",
    "claimed_at": "CASE WHEN n.state <> 'pending' THEN coalesce({claimed_at}, n.finished_at) END",
    "started_at": "CASE WHEN n.state IN ('completed', 'failed') THEN coalesce({started_at}, n.finished_at) END",
    "completed_at": "CASE WHEN n.state = 'completed' THEN n.finished_at END",
    "failed_at": "CASE WHEN n.state = 'failed' THEN n.finished_at END",
    "canceled_at": "CASE WHEN n.state = 'canceled' THEN n.finished_at END",
}
# The old system's own answers stay as they are. Only those that Penstock gave, or gave anew, take their place.
_CHANGES: LiteralString = (
    "(n.ours AND n.state IN ('completed', 'failed'))"
    " OR (n.state = 'pending' AND {state} IN ('claimed', 'processing'))"
    " OR (n.state = 'canceled' AND {state} IN ('pending', 'claimed', 'processing'))"
)


class OldDatabase:
    """A database of the eager layout that is written to."""

    def __init__(self, connection: Connection, layout: Layout) -> None:
        self.connection = connection
        self._layout = layout
        self._prelude = layout.prelude().as_bytes(connection).replace(b"%", b"%%") + b" "

    def ended(self) -> dict[UUID, bool]:
        """Every batch that is there, and whether it has ended."""
        ended = b"num_nonnulls(completed_at, failed_at, cancelled_at, deleted_at) > 0"
        return dict(self._read(b"SELECT id, " + ended + b" FROM old_batches"))

    def has_file(self, file_id: UUID) -> bool:
        return bool(self._read(b"SELECT 1 FROM old_files WHERE id = %(file)s", file=file_id))

    def states(self, batch_id: UUID) -> dict[str, int]:
        """The old system's own count of a batch's requests."""
        counted = b"SELECT state, count(*) FROM old_requests WHERE batch_id = %(batch)s GROUP BY state ORDER BY state"
        return dict(self._read(counted, batch=batch_id))

    def lines(self, file_id: UUID) -> Iterator[tuple[int, UUID]]:
        """(line, template id) of a file, in order, with the numbers that Penstock has given them."""
        order = LineOrder()
        query = b"SELECT id, coalesce(line_number, 0) FROM old_request_templates WHERE file_id = %(file)s"
        with self.connection.cursor("penstock_lines", binary=True) as cursor:
            cursor.itersize = _PAGE
            cursor.execute(self._prelude + query + b" ORDER BY line_number, id", {"file": file_id})
            for key, number in cursor:
                yield order.next(number), key

    def insert(self, table: str, row: Mapping[str, Any]) -> None:
        """Insert a row, unless it is there."""
        values = {column: value for column, value in row.items() if self._layout.column(table, column)}
        self._write(
            sql.SQL("INSERT INTO {} ({}) VALUES ({}) ON CONFLICT DO NOTHING").format(
                self._layout.name(table),
                self._names(table, list(values)),
                sql.SQL(", ").join(sql.Placeholder(column) for column in values),
            ),
            values,
        )

    def end_batch(self, batch_id: UUID, moments: Mapping[str, Any]) -> None:
        """Set when a batch was cancelled or ended."""
        there = {name: at for name, at in moments.items() if self._layout.column("batches", name)}
        self._write(
            sql.SQL("UPDATE {} SET {} WHERE {} = %(batch)s").format(
                self._layout.name("batches"),
                sql.SQL(", ").join(
                    sql.SQL("{} = {}").format(self._column("batches", name), sql.Placeholder(name)) for name in there
                ),
                self._column("batches", "id"),
            ),
            {**there, "batch": batch_id},
        )

    def add_templates(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add the lines of a new file."""
        table = "request_templates"
        columns = [column for column in COLUMNS[table] if self._layout.column(table, column)]
        statement = sql.SQL("COPY {} ({}) FROM STDIN").format(self._layout.name(table), self._names(table, columns))
        with explain_old_errors(), self.connection.cursor() as cursor, cursor.copy(statement) as copy:
            for row in rows:
                copy.write_row([row[column] for column in columns])

    def begin_requests(self) -> None:
        """Make room for what the requests of a batch are to be, until the transaction ends."""
        shape = ", ".join(f"{name} {kind}" for name, kind in _ROWS.items())
        with explain_old_errors():
            self.connection.execute(b"DROP TABLE IF EXISTS pg_temp.penstock_rows")
            self.connection.execute(f"CREATE TEMP TABLE penstock_rows ({shape}) ON COMMIT DROP".encode())

    def add_requests(self, rows: Iterable[Sequence[Any]]) -> None:
        """Add some of them; `apply` makes them so."""
        with (
            explain_old_errors(),
            self.connection.cursor() as cursor,
            cursor.copy(b"COPY pg_temp.penstock_rows FROM STDIN") as copy,
        ):
            for row in rows:
                copy.write_row(row)

    def apply(self, batch_id: UUID) -> None:
        """Change the requests of a batch that are there, and make those that are not."""
        there = [column for column in _ASSIGNED if self._layout.column("requests", column)]
        old = {column: sql.SQL("r.{}").format(self._column("requests", column)) for column in there}
        known = {**{column: sql.SQL("NULL") for column in _ASSIGNED}, **old}
        assignments = [
            sql.SQL("{} = {}").format(self._column("requests", column), sql.SQL(_ASSIGNED[column]).format(**known))
            for column in there
        ]
        mine = sql.SQL("r.{} = {} AND r.{} = n.template_id").format(
            self._column("requests", "batch_id"), sql.Literal(batch_id), self._column("requests", "template_id")
        )
        self._write(
            sql.SQL("UPDATE {} r SET {} FROM pg_temp.penstock_rows n WHERE {} AND ({})").format(
                self._layout.name("requests"),
                sql.SQL(", ").join(assignments),
                mine,
                sql.SQL(_CHANGES).format(**known),
            )
        )
        fresh = {column: sql.SQL("NULL") for column in _ASSIGNED}
        values = [sql.SQL(_ASSIGNED[column]).format(**fresh) for column in there]
        named = [name for name in ("custom_id", "model") if self._layout.column("requests", name)]
        values += [sql.SQL("n.{}").format(sql.Identifier(name)) for name in named]
        self._write(
            sql.SQL(
                "INSERT INTO {requests} ({id}, {batch}, {template}, {columns})"
                " SELECT md5({key} || n.template_id)::uuid, {key}::uuid, n.template_id, {values}"
                " FROM pg_temp.penstock_rows n WHERE NOT EXISTS (SELECT FROM {requests} r WHERE {mine})"
            ).format(
                requests=self._layout.name("requests"),
                id=self._column("requests", "id"),
                batch=self._column("requests", "batch_id"),
                template=self._column("requests", "template_id"),
                columns=self._names("requests", [*there, *named]),
                key=sql.Literal(str(batch_id)),
                values=sql.SQL(", ").join(values),
                mine=mine,
            )
        )

    def _names(self, table: str, columns: Sequence[str]) -> sql.Composed:
        return sql.SQL(", ").join(self._column(table, column) for column in columns)

    def _column(self, table: str, name: str) -> sql.Identifier:
        return sql.Identifier(self._layout.column(table, name))

    def _write(self, statement: sql.Composed, parameters: Mapping[str, Any] | None = None) -> None:
        with explain_old_errors():
            self.connection.execute(statement, parameters)

    def _read(self, query: bytes, **parameters: Any) -> list[Any]:
        with explain_old_errors():
            return self.connection.execute(self._prelude + query, parameters).fetchall()


@contextmanager
def open_old_database(conninfo: str, layout: Layout) -> Iterator[OldDatabase]:
    """Connect to the old system's database and check its layout."""
    with explain_source_errors("old system's database"):
        connection = connect(conninfo)
    with closing(connection):
        with explain_source_errors("old system's database"):
            connection.execute("SET TimeZone = 'UTC'")
            layout.check(connection)
        yield OldDatabase(connection, layout)


@contextmanager
def explain_old_errors() -> Iterator[None]:
    """Turn errors of what is written into ones for a person."""
    try:
        yield
    except psycopg.Error as error:
        said = str(error).strip().splitlines()
        raise PenstockError(
            f"the old system's database refused what was to be written: {said[0] if said else type(error).__name__}",
            hint="Nothing of this batch was written. The role needs SELECT, INSERT and UPDATE on the four tables, and"
            " may make temporary ones; the same command goes on.",
        ) from error

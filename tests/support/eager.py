"""A database of the eager layout (one row per request), with everything in it that such a database may hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
from psycopg.conninfo import make_conninfo

KINDS = (
    *("completed", "halfway", "scattered", "cancelled", "cancelling"),
    *("failed", "shared", "without_file", "deleted", "untouched"),
)
"""What the batches are like, in turn."""

_FILL = (Path(__file__).parent / "eager_rows.sql").read_text("utf-8")


@dataclass(frozen=True, slots=True)
class Eager:
    """The old system's database."""

    conninfo: str

    def rows(self, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.conninfo, autocommit=True) as connection:
            return connection.execute(query.encode(), parameters or None).fetchall()

    def run(self, *statements: str) -> None:
        with psycopg.connect(self.conninfo, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def batches(self, kind: str) -> list[UUID]:
        query = "SELECT id FROM batches WHERE metadata ->> 'kind' = %s ORDER BY created_at, id"
        return [batch_id for (batch_id,) in self.rows(query, kind)]

    def digest(self) -> str:
        """Of every row."""
        return digest_of(self.conninfo, "public", ("files", "request_templates", "batches", "requests"))

    def pending(self) -> dict[UUID, int]:
        """The old system's own question: what is there to do for each batch?"""
        query = (
            "SELECT r.batch_id, count(*) FROM requests r JOIN batches b ON b.id = r.batch_id"
            " WHERE r.state = 'pending' AND b.cancelling_at IS NULL AND b.deleted_at IS NULL GROUP BY 1"
        )
        return dict(self.rows(query))

    def unanswered(self) -> int:
        """Requests of running batches that are to be run, in flight or not."""
        query = (
            "SELECT count(*) FROM requests r JOIN batches b ON b.id = r.batch_id WHERE b.cancelling_at IS NULL"
            " AND b.deleted_at IS NULL AND r.state IN ('pending', 'claimed', 'processing')"
        )
        return int(self.rows(query)[0][0])

    def states(self, batch_id: UUID) -> dict[str, int]:
        """And the other: how far is this batch?"""
        return dict(self.rows("SELECT state, count(*) FROM requests WHERE batch_id = %s GROUP BY 1", batch_id))


def digest_of(conninfo: str, schema: str, tables: tuple[str, ...] | None = None) -> str:
    """Of every row of some tables, or of all in a schema."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        if tables is None:
            found = connection.execute(
                "SELECT relname FROM pg_class WHERE relnamespace = %s::regnamespace AND relkind = 'r' ORDER BY 1",
                (schema,),
            ).fetchall()
            tables = tuple(name for (name,) in found)
        parts = []
        for table in tables:
            query = f"SELECT md5(string_agg(md5(t::text), '' ORDER BY md5(t::text))) FROM {schema}.{table} t"
            parts.append(str(connection.execute(query.encode()).fetchall()[0][0]))
    return " ".join(parts)


@contextmanager
def eager_database(server: str, batches: int = 10, lines: int = 40, padding: int = 0) -> Iterator[Eager]:
    """A database of its own on a server, filled: so many batches, of so many lines each."""
    name = f"eager_{uuid4().hex[:10]}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
        try:
            eager = Eager(make_conninfo(server, dbname=name))
            fill(eager, batches, lines, padding)
            yield eager
        finally:
            connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)".encode())


def fill(eager: Eager, batches: int, lines: int, padding: int) -> None:
    with psycopg.connect(eager.conninfo, autocommit=True) as connection:
        sizes = {"batches": batches, "lines": lines, "padding": padding}
        for name, value in sizes.items():
            connection.execute("SELECT set_config(%s, %s, false)", (f"eager.{name}", str(value)))
        connection.execute(_FILL.encode())


# -- what the old rows say, told without Penstock's code

_LINE_ENDS = {"\u2028": "\\u2028", "\u2029": "\\u2029", "\x85": "\\u0085"}


def expected_results(eager: Eager, batch_id: UUID) -> tuple[bytes, bytes]:
    """Output and error lines of the answered requests of a batch, as the old rows have them, in line order."""
    query = """
        SELECT t.line_number, coalesce(r.custom_id, t.custom_id), r.state, r.response_status, r.response_body, r.error,
               r.template_id
          FROM requests r LEFT JOIN request_templates t ON t.id = r.template_id
         WHERE r.batch_id = %s
         ORDER BY t.line_number, r.id"""
    first = eager.rows(
        "SELECT min(t.line_number) FROM requests r JOIN request_templates t ON t.id = r.template_id"
        " WHERE r.batch_id = %s",
        batch_id,
    )[0][0]
    shift = max(0, 1 - (first or 0)) if first is not None else 0
    good, bad, line = bytearray(), bytearray(), 0
    for number, custom_id, state, status, body, error, _ in eager.rows(query, batch_id):
        line = max(line + 1, (number or 0) + shift)
        if state not in ("completed", "failed"):
            continue
        told = _line(f"batch_req_{batch_id.hex}_{line}", custom_id or f"line-{line}", state, status, body, error)
        (good if state == "completed" else bad).extend(told.encode())
    return bytes(good), bytes(bad)


def _line(request: str, custom_id: str, state: str, status: int | None, body: str | None, error: str | None) -> str:
    name = _text(custom_id)
    failure = f'{{"code":"failed","message":{_text(error or "failed")}}}'
    if body is None and state == "failed":
        return f'{{"id":"{request}","custom_id":{name},"response":null,"error":{failure}}}\n'
    said = "null" if state == "completed" or (status or 200) >= 300 else failure
    answer = f'{{"status_code":{status or 200},"request_id":"{request}","body":{_json(body)}}}'
    return f'{{"id":"{request}","custom_id":{name},"response":{answer},"error":{said}}}\n'


def _json(body: str | None) -> str:
    if body is None:
        return "null"
    try:
        json.loads(body)
    except ValueError:
        body = json.dumps(body, ensure_ascii=False)
    for raw, escaped in _LINE_ENDS.items():
        body = body.replace(raw, escaped)
    return body.replace("\n", " ").replace("\r", " ")


def _text(text: str) -> str:
    said = json.dumps(text, ensure_ascii=False)
    for raw, escaped in _LINE_ENDS.items():
        said = said.replace(raw, escaped)
    return said

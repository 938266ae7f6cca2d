"""Rows out of a database by binary COPY, as fast as the connection gives them.

psycopg's own reader goes through its event loop for each row, which takes longer than everything else that is done with
one. Here all rows that have arrived are taken before the socket is asked for more.
"""

from __future__ import annotations

import select
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import psycopg
from psycopg import ClientCursor, Connection
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGconn, PGresult

_SIGNATURE = b"PGCOPY\n\xff\r\n\0"
_HEADER_BYTES = len(_SIGNATURE) + 8
_TRAILER_BYTES = 2
_BLOCK_ROWS = 100
"""Rows that are handed on together at most: libpq holds what has arrived anyway."""


def copy_out(connection: Connection, query: bytes, parameters: Mapping[str, Any]) -> Iterator[list[bytes]]:
    """The rows of a query in the format of COPY: a count of fields, then each as length and bytes. As many at a time as
    have arrived, and few enough to be held."""
    statement = b"COPY (" + query + b") TO STDOUT (FORMAT BINARY)"
    pgconn = connection.pgconn
    pgconn.send_query(ClientCursor(connection).mogrify(statement, parameters).encode())
    whole = False
    try:
        while pgconn.flush():
            _wait(pgconn, select.POLLOUT | select.POLLIN)
            pgconn.consume_input()
        result = _next_result(pgconn)
        if result is None or result.status != ExecStatus.COPY_OUT:
            raise _failure(result)
        for rows in _blocks(pgconn):
            if rows[0].startswith(_SIGNATURE):  # the header comes with the first row
                rows[0] = rows[0][_HEADER_BYTES:]
            while rows and len(rows[-1]) <= _TRAILER_BYTES:
                rows.pop()
            yield rows
        while (result := _next_result(pgconn)) is not None:
            if result.status != ExecStatus.COMMAND_OK:
                raise _failure(result)
        whole = True
    finally:
        if not whole:
            _give_up(pgconn)


def _blocks(pgconn: PGconn) -> Iterator[list[bytes]]:
    """What COPY sends, message by message; never an empty block."""
    get, size = pgconn.get_copy_data, 0
    while size >= 0:
        block: list[bytes] = []
        while len(block) < _BLOCK_ROWS:
            size, data = get(1)
            if size <= 0:
                break
            block.append(bytes(data))
        if block:
            yield block
        if size == 0:
            _wait(pgconn, select.POLLIN)
            pgconn.consume_input()


def _next_result(pgconn: PGconn) -> PGresult | None:
    while pgconn.is_busy():
        _wait(pgconn, select.POLLIN)
        pgconn.consume_input()
    return pgconn.get_result()


def _wait(pgconn: PGconn, events: int) -> None:
    ready = select.poll()
    ready.register(pgconn.socket, events)
    ready.poll()


def _give_up(pgconn: PGconn) -> None:
    """End a COPY that nobody reads to its end, so that the connection can be used again."""
    with suppress(psycopg.Error):
        pgconn.get_cancel().cancel()
        for _ in _blocks(pgconn):
            pass
        while _next_result(pgconn) is not None:
            pass


def _failure(result: PGresult | None) -> psycopg.Error:
    return psycopg.OperationalError("the connection was lost") if result is None else error_from_result(result)

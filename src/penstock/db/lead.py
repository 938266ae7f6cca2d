"""Lead: work that one process does at a time, for longer than a statement.

The lead is an advisory lock on a connection of its own, so it is free at once when its process dies. A process that
stands still or is cut off loses it after `grace_s`, by the server's own clock. The lock belongs to a transaction, which
a pooler leaves on one server connection; between statements it holds no snapshot. A lead is no fence: what must happen
once is decided by a key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

import psycopg

from penstock.db.pool import KEEPALIVE
from penstock.tasks import cancel_and_wait

_T = TypeVar("_T")
_TAKE = """
    SELECT set_config('idle_in_transaction_session_timeout', %(grace)s, true),
           pg_try_advisory_xact_lock(hashtextextended(%(name)s, 0))
"""


async def lead(conninfo: str, name: str, grace_s: float, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T | None:
    """Do the work while this process has the lead; None, at once, if another has it. Losing it cancels the work and
    raises the database's error."""
    # Parameters that are sent apart would leave a portal open, with its snapshot.
    connection = await psycopg.AsyncConnection.connect(
        conninfo, cursor_factory=psycopg.AsyncClientCursor, application_name=name, connect_timeout=10, **KEEPALIVE
    )
    try:
        await connection.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
        parameters = {"name": name, "grace": f"{int(grace_s * 1000)}ms"}
        taken = await (await connection.execute(_TAKE, parameters)).fetchone()
        return await _work(connection, name, grace_s / 3, work) if taken and taken[1] else None
    finally:
        # Closing alone frees the lock too, some time later.
        with suppress(psycopg.Error):
            await connection.rollback()
        await connection.close()


async def _work(
    connection: psycopg.AsyncConnection[Any], name: str, every_s: float, work: Callable[[], Coroutine[Any, Any, _T]]
) -> _T:
    working = asyncio.create_task(work(), name=name)
    beating = asyncio.create_task(_beat(connection, every_s), name=f"{name}: lead")
    try:
        await asyncio.wait({working, beating}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_and_wait([working, beating])
    return beating.result() if working.cancelled() else working.result()


async def _beat(connection: psycopg.AsyncConnection[Any], every_s: float) -> NoReturn:
    while True:
        await asyncio.sleep(every_s)
        await connection.execute("SELECT 1")

"""Periodic duties that one process does for all: the first process that asks once a duty is due takes the turn.

There is no leader, and a turn is no lock: a process that dies or freezes in its turn holds nothing, and another takes
the next turn when it is due. A duty must be right if two processes do it at once (ADR 15).
"""

from __future__ import annotations

from penstock.db import sql
from penstock.db.pool import Connection, Now

_SQL = sql.load("penstock.db", "duties.sql")

# Processes ask at about the same time: one that asks a little early takes the turn.
_EARLY = 0.75


async def take_turn(connection: Connection, duty: str, every_s: float, *, now: Now = None) -> bool:
    """Take the turn at a duty, unless a process has had it within the last `every_s`, or nearly."""
    parameters = {"name": duty, "every_s": every_s * _EARLY, "now": now}
    return await (await connection.execute(_SQL["take_turn_if_due"], parameters)).fetchone() is not None

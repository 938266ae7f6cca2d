"""The audit trail: newest first, and forgotten in time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import uuid4

from penstock.batches.audit import forget_old, list_changes, record_change
from penstock.db.pool import Connection
from tests.support.db import with_connection

START = datetime(2024, 5, 1, tzinfo=UTC)


def test_old_changes_are_forgotten(database: str) -> None:
    async def body(connection: Connection) -> None:
        job, other = uuid4(), uuid4()
        for day, (object_id, action) in enumerate(
            ((job, "create"), (other, "create"), (job, "pause"), (job, "delete"))
        ):
            await record_change(
                connection,
                action,
                object_id,
                owner="ann",
                actor="key_1",
                client="10.0.0.7",
                details={"day": day},
                now=START + timedelta(days=day),
            )
        changes = await list_changes(connection, object_id=job, limit=10)
        assert [(change.action, change.details["day"]) for change in changes] == [
            ("delete", 3),
            ("pause", 2),
            ("create", 0),
        ]
        assert await list_changes(connection, object_id=job, below=changes[0].id, limit=1) == changes[1:2]
        now = START + timedelta(days=4)
        assert await forget_old(connection, timedelta(days=3).total_seconds(), now=now) == 2
        assert await forget_old(connection, timedelta(days=3).total_seconds(), now=now) == 0
        assert [change.action for change in await list_changes(connection, limit=10)] == ["delete", "pause"]

    with_connection(database, body)

"""Batches asked for as a client does, and outcomes for them without a worker."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any
from uuid import UUID, uuid4

from penstock.batches.validate import request_batch, validate_batch
from penstock.claim import claim as claims
from penstock.db.embedded import postgres
from penstock.db.pool import Connection, Now
from penstock.model import Again, Lease, Outcome, OutcomeState
from penstock.settle.write import Changes, Settled, settle
from tests.support.engine import claim_due, make_file

POOL = "serve:test"
ROUTES = ("model-0", "model-1", "model-2")
ENDPOINT = "/v1/chat/completions"
WORKER = uuid4()


async def ask_for(
    connection: Connection, file_id: UUID, *, validated: bool = True, dialect: str = "openai", **more: Any
) -> UUID:
    """A batch over a file, validated unless told otherwise."""
    wish: dict[str, Any] = {
        "owner": "local",
        "dialect": dialect,
        "file_id": file_id,
        "endpoint": ENDPOINT,
        "completion_window": "24h",
        "window_s": 86_400.0,
    }
    if dialect == "anthropic":
        await connection.execute("UPDATE penstock.files SET purpose = 'message_batch' WHERE id = %s", [file_id])
    requested = await request_batch(connection, **(wish | more))
    assert requested is not None
    if validated:
        await validate_batch(connection, requested.batch.id, lambda _: POOL, now=more.get("now"))
    return requested.batch.id


async def make_wish(connection: Connection, totals: Sequence[int], **more: Any) -> UUID:
    """The same over a file of its own."""
    return await ask_for(connection, await make_file(connection, totals), **more)


async def take(connection: Connection, want: int = 1_000, *, worker: UUID = WORKER, now: Now = None) -> list[Lease]:
    wants = dict.fromkeys(ROUTES, want)
    return await claim_due(connection, pool=POOL, wants=wants, worker_id=worker, taper_floor=1_000, now=now)


async def answer(
    connection: Connection,
    leases: Sequence[Lease],
    state: OutcomeState = OutcomeState.COMPLETED,
    *,
    body: bytes = b'"answer"',
    message: str = "no",
    worker: UUID = WORKER,
    now: Now = None,
) -> Settled:
    """Settle everything on some leases."""
    changes = Changes()
    for lease in leases:
        for ordinal in claims.first_ordinals(lease.ranges, 100_000):
            outcome = (
                Outcome(state, body, 200)
                if state is OutcomeState.COMPLETED
                else Outcome(state, error_code="bad", error_message=message)
            )
            # As the files of `make_file` are laid out if they have one lane.
            changes.outcomes.append((lease, ordinal, ordinal + 1, f"{lease.source_lane}-{ordinal}", outcome))
    return await settle(connection, worker, changes, now=now)


async def defer(
    connection: Connection, leases: Sequence[Lease], *, message: str = "later", delay_s: float = 60.0, now: Now = None
) -> None:
    changes = Changes()
    for lease in leases:
        for ordinal in claims.first_ordinals(lease.ranges, 100_000):
            changes.agains.append((lease, ordinal, Again("busy", message, delay_s, True)))
    await settle(connection, WORKER, changes, now=now)


def traces(conninfo: str, canary: bytes) -> int:
    """How often some bytes occur in a backup of the database, as text or in a column of bytes."""
    command = [str(postgres.bundled_bin_dir() / "pg_dump"), "--dbname", conninfo, "--data-only"]
    backup = subprocess.run(command, capture_output=True, check=True, timeout=120).stdout
    return backup.count(canary) + backup.count(canary.hex().encode())

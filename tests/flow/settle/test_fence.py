"""Only the holder of a live lease can settle: every way of not being it, one by one."""

from __future__ import annotations

from uuid import UUID, uuid4

from penstock.batches.read import read_status
from penstock.claim import claim as claims
from penstock.claim import liveness
from penstock.config import LivenessLimits
from penstock.db.pool import Connection
from penstock.model import Again, Item, Lease, Outcome, OutcomeState
from penstock.settle.write import Changes, Settled, count_applied, settle
from tests.support.db import one, with_connection
from tests.support.engine import claim_due, make_batch

DONE = Outcome(OutcomeState.COMPLETED, b"1", 200)


async def leased(connection: Connection, worker: UUID, want: int = 4) -> Lease:
    (lease,) = await claim_due(connection, pool="test", wants={"model-0": want}, worker_id=worker, taper_floor=want)
    return lease


async def complete(connection: Connection, worker: UUID, lease: Lease, *ordinals: int, body: bytes = b"1") -> Settled:
    outcome = Outcome(OutcomeState.COMPLETED, body, 200)
    changes = Changes(outcomes=[(lease, ordinal, ordinal + 1, "c", outcome) for ordinal in ordinals])
    return await settle(connection, worker, changes)


def test_another_worker_cannot_settle(database: str) -> None:
    async def body(connection: Connection) -> None:
        await make_batch(connection, [4])
        lease = await leased(connection, uuid4())
        assert await complete(connection, uuid4(), lease, 0, 1) == Settled(0, 0, 0, 2)
        assert await one(connection, "SELECT count(*) FROM penstock.outcomes") == (0,)
        assert await one(connection, "SELECT ordinals::text FROM penstock.leases") == ("{[0,4)}",)

    with_connection(database, body)


def test_an_ordinal_the_lease_no_longer_holds_is_refused(database: str) -> None:
    """It was given back and is being run by somebody else: the first holder's answer comes too late."""

    async def body(connection: Connection) -> None:
        await make_batch(connection, [4])
        first, second = uuid4(), uuid4()
        early = await leased(connection, first)
        back = Changes()
        back.give_back(early, [(1, 3)])
        await settle(connection, first, back)
        late = await leased(connection, second)
        assert (await complete(connection, first, early, 0, 1, 2, body=b'"stale"')).fenced == 2
        assert (await complete(connection, second, late, 1, 2, body=b'"fresh"')).outcomes == 2
        rows = await (await connection.execute("SELECT ordinal, response FROM penstock.outcomes ORDER BY 1")).fetchall()
        assert rows == [(0, b'"stale"'), (1, b'"fresh"'), (2, b'"fresh"')]

    with_connection(database, body)


def test_a_zombie_changes_nothing_even_before_its_work_is_claimed_again(database: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await make_batch(connection, [4])
        zombie = uuid4()
        lease = await leased(connection, zombie)
        await liveness.reclaim(connection, uuid4(), LivenessLimits(), stuck_s=1e6)
        assert (await complete(connection, zombie, lease, 0, 1, 2, 3)).fenced == 4
        retry = Changes(agains=[(lease, 0, Again("code", "message", 1.0, True))])
        assert (await settle(connection, zombie, retry)).fenced == 1
        back = Changes()
        back.give_back(lease, [(0, 4)])
        assert (await settle(connection, zombie, back)).fenced == 4
        assert await one(connection, "SELECT sum(size) FROM penstock.deferrals") == (4,)
        for table in ("outcomes", "attempts", "progress", "leases"):
            assert await one(connection, f"SELECT count(*) FROM penstock.{table}") == (0,)
        assert (await read_status(connection, batch_id)).counts.pending == 4

    with_connection(database, body)


def test_its_own_stale_task_is_fenced_too(database: str) -> None:
    """The same worker lost the item and claimed it again: its first call's answer is not the second's."""

    async def body(connection: Connection) -> None:
        await make_batch(connection, [1])
        worker = uuid4()
        stale = await leased(connection, worker)
        await liveness.reclaim(connection, uuid4(), LivenessLimits(), stuck_s=1e6)
        fresh = await leased(connection, worker)
        assert fresh.id > stale.id
        assert (await complete(connection, worker, stale, 0, body=b'"stale"')).fenced == 1
        assert (await complete(connection, worker, fresh, 0, body=b'"fresh"')).outcomes == 1
        assert await one(connection, "SELECT response, lease_id FROM penstock.outcomes") == (b'"fresh"', fresh.id)

    with_connection(database, body)


def test_settling_the_same_twice_counts_once(database: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await make_batch(connection, [4])
        worker = uuid4()
        lease = await leased(connection, worker)
        assert (await complete(connection, worker, lease, 0, 1)).outcomes == 2
        assert (await complete(connection, worker, lease, 0, 1)).fenced == 2
        counts = (await read_status(connection, batch_id)).counts
        assert (counts.completed, counts.in_flight, counts.pending) == (2, 2, 0)

    with_connection(database, body)


def test_a_lane_of_width_one_waits_for_its_head(database: str) -> None:
    async def body(connection: Connection) -> None:
        await make_batch(connection, [3], width=1)
        worker = uuid4()
        head = await leased(connection, worker)
        assert head.ranges == ((0, 1),)
        ask = claim_due(connection, pool="test", wants={"model-0": 4}, worker_id=worker)
        assert await ask == []
        retry = Changes(agains=[(head, 0, Again("code", "message", 60.0, True))])
        await settle(connection, worker, retry)
        ask = claim_due(connection, pool="test", wants={"model-0": 4}, worker_id=worker)
        assert await ask == [], "a retry that waits its turn still blocks the lane"
        await connection.execute("UPDATE penstock.deferrals SET due_at = now()")
        again = await leased(connection, worker)
        assert (again.ranges, again.attempt) == (((0, 1),), 2)
        await complete(connection, worker, again, 0)
        assert (await leased(connection, worker)).ranges == ((1, 2),)

    with_connection(database, body)


async def repeat_id(connection: Connection, lease: Lease) -> None:
    """What a restore does: the lease is gone, and its id is the next that is given out."""
    await connection.execute("DELETE FROM penstock.leases")
    await connection.execute("UPDATE penstock.lanes SET next = 0, busy = 0")
    await connection.execute(f"ALTER TABLE penstock.leases ALTER COLUMN id RESTART WITH {lease.id}".encode())


def test_a_lease_from_before_a_restore_settles_nothing(database: str) -> None:
    """The same worker, the same id: neither its outcomes nor its retries nor what it gives back count."""

    async def body(connection: Connection) -> None:
        await make_batch(connection, [4])
        worker = uuid4()
        await liveness.register(connection, worker, "test")
        old = await leased(connection, worker)
        await repeat_id(connection, old)
        new = await leased(connection, worker)
        assert (new.id, new.ranges) == (old.id, old.ranges)
        assert await complete(connection, worker, old, 0, body=b'"old"') == Settled(0, 0, 0, 1)
        retry = Changes(agains=[(old, 1, Again("code", "message", 1.0, True))])
        retry.give_back(old, [(2, 4)])
        assert await settle(connection, worker, retry) == Settled(0, 0, 0, 3)
        assert await liveness.report_progress(connection, worker, [old, new]) == {old.nonce}
        assert await claims.read_bodies(connection, old, old.ranges, max_rows=9, max_bytes=1_000) == []
        # Both at once, as a buffer may hold them.
        both = Changes(outcomes=[(lease, o, o + 1, "c", DONE) for lease in (old, new) for o in range(4)])
        assert await settle(connection, worker, both) == Settled(4, 0, 0, 4)
        assert await one(connection, "SELECT count(*), count(DISTINCT lease_nonce) FROM penstock.outcomes") == (4, 1)

    with_connection(database, body)


def test_what_was_applied_is_known_by_more_than_an_id(database: str) -> None:
    async def body(connection: Connection) -> None:
        await make_batch(connection, [4])
        worker = uuid4()
        old = await leased(connection, worker)
        await repeat_id(connection, old)
        new = await leased(connection, worker)
        await complete(connection, worker, new, 0, 1, 2, 3)
        items = {lease: [Item(lease, ordinal, ordinal + 1, "c", b"") for ordinal in range(4)] for lease in (old, new)}
        assert [await count_applied(connection, items[lease]) for lease in (old, new)] == [0, 4]

    with_connection(database, body)

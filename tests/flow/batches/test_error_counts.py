"""Errors in groups: what they count is what the job's figures count, also while rows are run again."""

from __future__ import annotations

import random
from uuid import UUID

import pytest

from penstock.batches import error_groups
from penstock.batches.error_groups import (
    fingerprint,
    fold_error_groups,
    list_error_groups,
    list_failures_of,
)
from penstock.batches.finish import finish_batch
from penstock.batches.read import read_status
from penstock.batches.run_again import retry_batch
from penstock.batches.steer import cancel_batch, pause_batch, resume_batch
from penstock.batches.upkeep import fold_progress
from penstock.db.pool import Connection
from penstock.model import Again, Outcome, OutcomeState
from tests.support.db import one, with_connection
from tests.support.engine import make_batch
from tests.support.row_jobs import claim_rows, make_job, make_worker, settle_rows
from tests.support.thorough import thorough

DONE = Outcome(OutcomeState.COMPLETED, b'{"price": 1}')
SOLD_OUT = fingerprint("sold_out", None, "article 1 is sold out")
MISSING = fingerprint("not_found", 404, "no such article")
TIMEOUT = fingerprint("request_timeout", None, "no result")


def verdict(ordinal: int) -> Outcome:
    """A fifth is sold out, a tenth not found, the rest done."""
    match ordinal % 10:
        case 0 | 5:
            message = f"article {ordinal} is sold out"
            return Outcome(OutcomeState.FAILED, error_code="sold_out", error_message=message)
        case 3:
            return Outcome(
                OutcomeState.NOT_FOUND, status_code=404, error_code="not_found", error_message="no such article"
            )
        case 7:
            return Outcome(OutcomeState.SKIPPED)
    return DONE


async def counts(connection: Connection, batch_id: UUID) -> dict[str, int]:
    """Counts by fingerprint, page by page; they add up to what the job's figures say."""
    found: dict[str, int] = {}
    after: str | None = None
    while page := await list_error_groups(connection, batch_id, after, 1):
        (group,) = page
        assert group.fingerprint not in found
        found[group.fingerprint] = group.rows
        after = group.fingerprint
    figures = (await read_status(connection, batch_id)).counts
    assert sum(found.values()) == figures.failed + figures.not_found
    return found


def test_groups_of_a_job(database: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id, lane = await make_job(connection, 100)
        worker = await make_worker(connection)
        for _ in range(10):
            await settle_rows(connection, worker, await claim_rows(connection, worker, 10), verdict)
        assert await counts(connection, batch_id) == {SOLD_OUT: 20, MISSING: 10}
        groups = {group.fingerprint: group for group in await list_error_groups(connection, batch_id, None, 100)}
        sold_out = groups[SOLD_OUT]
        assert (sold_out.code, sold_out.status_code) == ("sold_out", None)
        assert (sold_out.line, sold_out.message) == (96, "article 95 is sold out")
        first, last = await one(
            connection, "SELECT min(finished_at), max(finished_at) FROM penstock.outcomes WHERE error_code = 'sold_out'"
        )
        assert (sold_out.first_at, sold_out.last_at) == (first, last)

        await fold_error_groups(connection, [batch_id])
        assert await one(connection, "SELECT count(*), bool_and(folded) FROM penstock.job_errors") == (2, True)
        assert {
            group.fingerprint: group for group in await list_error_groups(connection, batch_id, None, 100)
        } == groups

        assert await list_failures_of(connection, lane, SOLD_OUT, -1, 5) == [0, 5, 10, 15, 20]
        assert await list_failures_of(connection, lane, SOLD_OUT, 85, 5) == [90, 95]
        assert await list_failures_of(connection, lane, MISSING, 90, 5) == [93]
        assert await list_failures_of(connection, lane, TIMEOUT, -1, 5) == []
        assert await list_failures_of(connection, lane, "no fingerprint", -1, 5) == []

    with_connection(database, body)


def test_counts_are_exact_while_rows_run_again(database: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id, lane = await make_job(connection, 30)
        worker = await make_worker(connection)
        await settle_rows(connection, worker, await claim_rows(connection, worker, 30), verdict)
        assert await finish_batch(connection, batch_id)
        assert await counts(connection, batch_id) == {SOLD_OUT: 6, MISSING: 3}

        await retry_batch(connection, batch_id, "ann")
        assert await counts(connection, batch_id) == {}
        # Their outcomes are there until they have new ones.
        assert len(await list_failures_of(connection, lane, SOLD_OUT, -1, 100)) == 6

        leases = await claim_rows(connection, worker, 30)
        again = Outcome(OutcomeState.FAILED, error_code="request_timeout", error_message="no result")
        await settle_rows(
            connection, worker, leases, lambda o: again if o < 6 else Again("x", "y", 0, True) if o > 24 else verdict(o)
        )
        assert await counts(connection, batch_id) == {SOLD_OUT: 3, MISSING: 2, TIMEOUT: 3}
        await fold_error_groups(connection, [batch_id])
        assert await counts(connection, batch_id) == {SOLD_OUT: 3, MISSING: 2, TIMEOUT: 3}
        assert await list_failures_of(connection, lane, TIMEOUT, -1, 100) == [0, 3, 5]

        # What is left to run again is given up, and counts as before.
        assert await cancel_batch(connection, batch_id)
        assert await finish_batch(connection, batch_id)
        assert await counts(connection, batch_id) == {SOLD_OUT: 4, MISSING: 2, TIMEOUT: 3}

    with_connection(database, body)


def test_a_group_of_which_nothing_is_left_is_gone(database: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id, _ = await make_job(connection, 10)
        worker = await make_worker(connection)
        await settle_rows(connection, worker, await claim_rows(connection, worker, 10), verdict)
        await retry_batch(connection, batch_id, "ann")
        await settle_rows(connection, worker, await claim_rows(connection, worker, 10), lambda _: DONE)
        assert await counts(connection, batch_id) == {}
        await fold_progress(connection, [batch_id])  # as maintenance does
        assert await one(connection, "SELECT count(*) FROM penstock.job_errors") == (0,)

    with_connection(database, body)


def test_reruns_that_are_given_up_after_a_fold_are_told_in_full(database: str) -> None:
    """The fold left nothing of the groups, as nothing counted in them."""

    async def body(connection: Connection) -> None:
        batch_id, _ = await make_job(connection, 30)
        worker = await make_worker(connection)
        await settle_rows(connection, worker, await claim_rows(connection, worker, 30), verdict)
        before = await list_error_groups(connection, batch_id, None, 10)
        await pause_batch(connection, batch_id)
        await retry_batch(connection, batch_id, "ann")
        await fold_error_groups(connection, [batch_id])
        assert await one(connection, "SELECT count(*) FROM penstock.job_errors") == (0,)
        assert await cancel_batch(connection, batch_id)
        assert await finish_batch(connection, batch_id)
        assert await counts(connection, batch_id) == {SOLD_OUT: 6, MISSING: 3}
        assert await list_error_groups(connection, batch_id, None, 10) == before

    with_connection(database, body)


class _Walk:
    """A job that is settled, run again, given up and folded at random."""

    def __init__(self, connection: Connection, batch_id: UUID, worker: UUID, chance: random.Random) -> None:
        self.connection, self.batch_id, self.worker, self.chance = connection, batch_id, worker, chance

    async def settle(self) -> None:
        leases = await claim_rows(self.connection, self.worker, self.chance.randint(1, 12))
        shift = self.chance.randrange(10)
        await settle_rows(
            self.connection,
            self.worker,
            leases,
            lambda ordinal: Again("x", "y", 0, True) if self.chance.random() < 0.2 else verdict(ordinal + shift),
        )

    async def run_again(self) -> None:
        await retry_batch(self.connection, self.batch_id, "ann")

    async def pause(self) -> None:
        await pause_batch(self.connection, self.batch_id)

    async def resume(self) -> None:
        await resume_batch(self.connection, self.batch_id)

    async def give_up(self) -> None:
        await cancel_batch(self.connection, self.batch_id)
        await finish_batch(self.connection, self.batch_id)

    async def fold(self) -> None:
        await fold_error_groups(self.connection, [self.batch_id])


_RUNNING_AGAIN = (
    "SELECT range_agg(r) FROM (SELECT unnest(ordinals) AS r FROM penstock.deferrals"
    " WHERE batch_id = %(batch)s AND generation > 0) AS d"
)


@pytest.mark.parametrize("fold_limit", [2, 1_000])
def test_counts_are_the_jobs_figures_whatever_happens(
    database_18: str, monkeypatch: pytest.MonkeyPatch, fold_limit: int
) -> None:
    monkeypatch.setattr(error_groups, "_FOLD_LIMIT", fold_limit)

    async def body(connection: Connection) -> None:
        worker = await make_worker(connection)
        for seed in range(5 if thorough() else 2):
            chance = random.Random(seed)
            batch_id, lane = await make_job(connection, 40)
            walk = _Walk(connection, batch_id, worker, chance)
            steps = [walk.settle] * 4 + [walk.run_again, walk.run_again, walk.pause, walk.resume, walk.give_up]
            for _ in range(30):
                await chance.choice([*steps, walk.fold, walk.fold])()
                known = {"batch": batch_id, "lane": lane}
                cursor = await connection.execute(
                    "SELECT fingerprint, count(*) FROM penstock.outcomes WHERE lane_id = %(lane)s"
                    f" AND fingerprint IS NOT NULL AND NOT coalesce(({_RUNNING_AGAIN}) @> ordinal, false) GROUP BY 1",
                    known,
                )
                told = {f"{group:016x}": count for group, count in await cursor.fetchall()}
                assert await counts(connection, batch_id) == told
                for group in await list_error_groups(connection, batch_id, None, 10):
                    assert (group.code, group.status_code) in {("sold_out", None), ("not_found", 404)}
                    assert None not in (group.first_at, group.last_at, group.line, group.message)
            await cancel_batch(connection, batch_id)

    with_connection(database_18, body)


def test_groups_of_another_batch(database: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await make_batch(connection, [10], pool="rows")
        await connection.execute("UPDATE penstock.lanes SET route = 'price'")
        worker = await make_worker(connection)
        await settle_rows(connection, worker, await claim_rows(connection, worker, 10), verdict)
        assert await counts(connection, batch_id) == {SOLD_OUT: 2, MISSING: 1}
        again = await retry_batch(connection, batch_id, None, fingerprint=SOLD_OUT)
        assert again.requests == 2
        assert await counts(connection, batch_id) == {MISSING: 1}

    with_connection(database, body)

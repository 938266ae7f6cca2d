"""A page of pending rows costs its size, however many rows are pending and however many jobs stand beside."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from uuid import UUID

import pytest

from penstock.batches import work
from penstock.batches.audit import forget_old, list_changes
from penstock.batches.error_groups import (
    fold_error_groups,
    list_error_groups,
    list_failures_of,
    put_back,
    take_away,
)
from penstock.batches.jobs import read_jobs
from penstock.db.pool import Connection
from penstock.erase.leftovers import LeftoverWalk
from penstock.export.grid import find_grid, find_ordinals, list_live, read_grid, stretches
from penstock.export.pending import PendingQuery, Position, list_pending, read_pending, read_summaries
from tests.plan.crowd import fresh_database, inform
from tests.support.pending_crowd import ERRORS, OWNERS, Crowd, fill_crowd
from tests.support.plans import Mode, Plan, Session

_PAGE = 100


@dataclass(frozen=True, slots=True)
class Filled:
    session: Session
    crowd: Crowd


Operation = Callable[[Crowd, Connection], Awaitable[None]]


@pytest.fixture(scope="module")
def built(any_server: str) -> Iterator[tuple[Filled, Filled]]:
    with ExitStack() as stack:
        made = []
        for jobs, rows in ((300, 30_000), (1_000, 1_000_000)):
            session = stack.enter_context(fresh_database(any_server))
            for table in ("jobs", "job_errors", "audit"):
                session.execute(f"ALTER TABLE penstock.{table} SET (autovacuum_enabled = false)")
            session.execute("ANALYZE")
            made.append(Filled(session, fill_crowd(session, jobs, rows)))
        small, large = made
        yield small, large


@pytest.fixture(scope="module", params=["analysed-empty", "analysed"])
def sizes(request: pytest.FixtureRequest, built: tuple[Filled, Filled]) -> tuple[Filled, Filled]:
    for at in built:
        inform(at.session, request.param)
    return built


async def _page(connection: Connection, query: PendingQuery, after: Position | None = None) -> None:
    page = await list_pending(connection, query, after, _PAGE)
    assert len(page.rows) == _PAGE
    assert page.next is not None
    assert None not in await read_summaries(connection, page.rows)


async def first_of_job(crowd: Crowd, connection: Connection) -> None:
    await _page(connection, PendingQuery(batch_id=crowd.batch))


async def deep_of_job(crowd: Crowd, connection: Connection) -> None:
    await _page(connection, PendingQuery(batch_id=crowd.batch), crowd.deep)


async def first_of_all(_: Crowd, connection: Connection) -> None:
    await _page(connection, PendingQuery())


async def deep_of_all(crowd: Crowd, connection: Connection) -> None:
    """Behind the large lane: each of the small jobs has a few rows."""
    await _page(connection, PendingQuery(), crowd.behind)


async def first_of_owner(_: Crowd, connection: Connection) -> None:
    await _page(connection, PendingQuery(owner=OWNERS[1]))


async def in_flight(_: Crowd, connection: Connection) -> None:
    await _page(connection, PendingQuery(statuses=["PROCESSING"]))


async def to_be_tried_again(crowd: Crowd, connection: Connection) -> None:
    await _page(connection, PendingQuery(statuses=["PENDING"], since=crowd.deferred_at))


async def items_by_time(crowd: Crowd, connection: Connection) -> None:
    grid = await find_grid(connection, crowd.batch)
    assert grid is not None
    page = await list_pending(connection, PendingQuery(batch_id=crowd.batch), crowd.deep, _PAGE)
    rows, _ = await read_pending(connection, grid, page)
    assert len(rows) == _PAGE


async def _items(crowd: Crowd, connection: Connection, statuses: set[str], start: int) -> None:
    grid = await find_grid(connection, crowd.batch)
    assert grid is not None
    live = await list_live(connection, crowd.batch)
    ordinals = await find_ordinals(connection, grid, live, statuses, start, _PAGE + 1)
    assert await read_grid(connection, grid, live, stretches(ordinals[:_PAGE]))


async def items_by_status(crowd: Crowd, connection: Connection) -> None:
    await _items(crowd, connection, {"PENDING", "PROCESSING"}, crowd.deep.ordinal)


async def items_that_failed(crowd: Crowd, connection: Connection) -> None:
    await _items(crowd, connection, {"ERROR"}, 0)


async def items_by_row(crowd: Crowd, connection: Connection) -> None:
    grid = await find_grid(connection, crowd.batch)
    assert grid is not None
    start = crowd.deep.ordinal
    live = await list_live(connection, crowd.batch, start, start + _PAGE)
    assert len(await read_grid(connection, grid, live, [(start, start + _PAGE)])) == _PAGE


async def last_page(crowd: Crowd, connection: Connection) -> None:
    grid = await find_grid(connection, crowd.batch)
    assert grid is not None
    live = await list_live(connection, crowd.batch, grid.total - _PAGE, grid.total)
    assert len(await read_grid(connection, grid, live, [(grid.total - _PAGE, grid.total)])) == _PAGE


async def error_groups(crowd: Crowd, connection: Connection) -> None:
    assert len(await list_error_groups(connection, crowd.batch, None, 10)) == 10


async def error_groups_further_on(crowd: Crowd, connection: Connection) -> None:
    assert len(await list_error_groups(connection, crowd.batch, crowd.fingerprint, 10)) == 10


async def failures_of_a_group(crowd: Crowd, connection: Connection) -> None:
    found = await list_failures_of(connection, crowd.lane, crowd.fingerprint, ERRORS // 2, 10)
    assert len(found) == 10


async def nothing_to_fold(crowd: Crowd, connection: Connection) -> None:
    await fold_error_groups(connection, [crowd.batch])


async def failures_run_again(crowd: Crowd, connection: Connection) -> None:
    await take_away(connection, crowd.batch, crowd.lane, range(_PAGE))


async def reruns_given_up(crowd: Crowd, connection: Connection) -> None:
    await put_back(connection, crowd.batch, crowd.lane, range(_PAGE))


async def a_list_of_jobs(crowd: Crowd, connection: Connection) -> None:
    assert len(await read_jobs(connection, crowd.newest)) == len(crowd.newest)


async def audit_of_a_job(crowd: Crowd, connection: Connection) -> None:
    assert len(await list_changes(connection, object_id=crowd.batch, limit=10)) == 10


async def audit_of_all(_: Crowd, connection: Connection) -> None:
    assert len(await list_changes(connection, limit=10)) == 10


async def no_old_audit(_: Crowd, connection: Connection) -> None:
    assert await forget_old(connection, 3_600) == 0


async def no_leftovers(_: Crowd, connection: Connection) -> None:
    assert await LeftoverWalk().step(connection, 100) == 0


async def _work(connection: Connection, owner: str | None, states: tuple[str, ...], text: str | None = None) -> None:
    behind, newest = work.states_behind(states), UUID(int=2**128 - 1)
    met = await work.find_work(
        connection, owner=owner, dialects=work.DIALECTS, states=behind, below=newest, look=26, text=text
    )
    found = await work.read_work(connection, [id_ for id_, _ in met], owner)
    await work.read_paces(connection, found)


async def work_of_all(_: Crowd, connection: Connection) -> None:
    await _work(connection, None, work.STATES)


async def work_of_owner(_: Crowd, connection: Connection) -> None:
    await _work(connection, OWNERS[1], work.STATES)


async def work_that_is_paused(_: Crowd, connection: Connection) -> None:
    """There is none: it is not looked for among all."""
    await _work(connection, None, ("PAUSED",))


async def work_with_a_text(_: Crowd, connection: Connection) -> None:
    await _work(connection, None, work.STATES, "nothing has this")


async def a_page_of_one(crowd: Crowd, connection: Connection) -> None:
    (one,) = await work.read_work(connection, [crowd.batch], None)
    await work.read_paces(connection, [one])
    await work.read_latency(connection, crowd.batch)
    await work.read_limit(connection, one)
    await work.explain_idle(connection, replace(one, pool="run:1"), 30.0)


_OPERATIONS: list[Operation] = [
    *(work_of_all, work_of_owner, work_that_is_paused, work_with_a_text, a_page_of_one),
    *(first_of_job, deep_of_job, first_of_all, deep_of_all, first_of_owner, in_flight, to_be_tried_again),
    *(items_by_time, items_by_status, items_that_failed, items_by_row, last_page),
    *(error_groups, error_groups_further_on, failures_of_a_group, nothing_to_fold, a_list_of_jobs),
    *(failures_run_again, reruns_given_up, no_leftovers),
    *(audit_of_a_job, audit_of_all, no_old_audit),
]


@pytest.mark.parametrize("mode", [Mode.CUSTOM, Mode.GENERIC], ids=str)
@pytest.mark.parametrize("operation", _OPERATIONS, ids=lambda operation: operation.__name__)
def test_a_page_costs_its_size(sizes: tuple[Filled, Filled], operation: Operation, mode: Mode) -> None:
    small, large = (_explain(at, operation, mode) for at in sizes)
    assert large.buffers <= 2 * small.buffers + 20, f"{small.buffers} buffers became {large.buffers}:\n{large}"
    assert large.rows_handled <= 2 * small.rows_handled + 20, f"{large}"
    assert not large.scanned_whole() & {
        "lanes",
        "leases",
        "deferrals",
        "jobs",
        "outcomes",
        "templates",
        "job_errors",
    }, large


def _explain(at: Filled, operation: Operation, mode: Mode) -> Plan:
    return at.session.explain(lambda connection: operation(at.crowd, connection), mode)


def test_claims_stay_heap_only(any_server: str) -> None:
    """The index over pending lanes is touched when a lane has nothing left to claim, not with every claim."""
    with fresh_database(any_server) as session:
        crowd = fill_crowd(session, 1, 1_000)
        session.execute("UPDATE penstock.lanes SET next = next + 1 WHERE id = %(lane)s", {"lane": crowd.lane})
        session.execute("SELECT pg_stat_force_next_flush()")
        ((before,),) = session.execute(_HOT)
        for _ in range(20):
            session.execute("UPDATE penstock.lanes SET next = next + 1 WHERE id = %(lane)s", {"lane": crowd.lane})
        session.execute("SELECT pg_stat_force_next_flush()")
        ((after,),) = session.execute(_HOT)
        assert after - before == 20


_HOT = "SELECT n_tup_hot_upd FROM pg_stat_user_tables WHERE schemaname = 'penstock' AND relname = 'lanes'"

"""What a statement costs follows the rows it answers, not the rows that exist."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from penstock.batches import create, read, reprocess, unserved, upkeep
from penstock.batches.create import find_batch_by_key
from penstock.batches.read import find_batch_of_result, list_batches
from penstock.batches.steer import cancel_batch, pause_batch, resume_batch
from penstock.batches.unserved import move_lanes
from penstock.claim import claim as claims
from penstock.claim.claim_job import claim_job, read_work
from penstock.db import sql
from penstock.db.pool import Connection
from penstock.model import Again, Item, Outcome, OutcomeState
from penstock.observe.queue_figures import read_figures
from penstock.settle import write as settle_write
from penstock.settle.write import Changes, settle
from tests.plan.crowd import DEFERRED_ROUTE, LEASED, LINED_UP_ROUTE, POOL, ROUTE, World, Worlds, check_in, claim
from tests.support.engine import count_leased
from tests.support.plans import Mode, Plan

Operation = Callable[[World, Connection], Awaitable[object]]

# Tables that are small whatever the load: one row per route, per process, per receiver.
_CONTROL_TABLES = {"lanes", "leases", "deferrals", "workers", "gates", "limits"}
_SMALL_TABLES = {"gates", "owners", "workers", "webhook_endpoints"}

_UPKEEP = sql.load("penstock.batches", "upkeep.sql")
_RUN_AGAIN = sql.load("penstock.batches", "run_again.sql")
_REPROCESS = sql.load("penstock.batches", "reprocess.sql")
_GROWTH = sql.load("penstock.batches", "growth.sql")
_FINISH = sql.load("penstock.batches", "finish.sql")
_EXPORT = sql.load("penstock.export", "export.sql")
_INTAKE = sql.load("penstock.intake", "intake.sql")

_PAGE = 100
_BUDGET_BYTES = 1 << 20
_NO_FIGURES = dict.fromkeys(("completed", "failed", "not_found", "skipped", "output_bytes", "error_bytes"), 0)


async def claim_lane(world: World, connection: Connection) -> None:
    (lease,) = await claim(connection, world.subject, _PAGE)
    assert count_leased([lease]) == _PAGE


async def claim_nothing_due(world: World, connection: Connection) -> None:
    wants = {DEFERRED_ROUTE: _PAGE}
    claimed = await claims.claim_in_line(connection, pool=POOL, wants=wants, worker_id=world.subject.worker)
    assert not claimed.leases
    assert claimed.next_due_at


async def claim_due(world: World, connection: Connection) -> None:
    claimed = await claims.claim_in_line(
        connection, pool=POOL, wants={LINED_UP_ROUTE: 10}, worker_id=world.subject.worker
    )
    assert count_leased(claimed.leases) > 0


async def line_up_nothing(_: World, connection: Connection) -> None:
    await claims.line_up(connection, pool=POOL, routes=[DEFERRED_ROUTE])


async def line_up_due(_: World, connection: Connection) -> None:
    tomorrow = datetime.now(UTC) + timedelta(days=2)
    await claims.line_up(connection, pool=POOL, routes=[DEFERRED_ROUTE], limit=10, now=tomorrow)


async def refresh_places(_: World, connection: Connection) -> None:
    await connection.execute(_UPKEEP["line_up_lanes"], {"limit": _PAGE, "now": None})


async def weigh_near(_: World, connection: Connection) -> None:
    await connection.execute(_UPKEEP["weigh_near"], {"limit": _PAGE, "now": None})


async def routes_with_work(_: World, connection: Connection) -> None:
    assert set(await claims.list_routes_with_work(connection, POOL)) == {ROUTE, DEFERRED_ROUTE, LINED_UP_ROUTE}


async def reclaimed_routes(_: World, connection: Connection) -> None:
    assert not await claims.list_reclaimed_routes(connection, POOL)


async def closed_lanes(world: World, connection: Connection) -> None:
    assert await claims.find_closed_lanes(connection, [world.subject.lane]) == set()


async def read_range(world: World, connection: Connection) -> None:
    lease = world.lease
    items = await claims.read_bodies(connection, lease, lease.ranges, max_rows=_PAGE, max_bytes=_BUDGET_BYTES)
    assert len(items) == _PAGE


async def read_some(world: World, connection: Connection) -> None:
    start, stop = world.lease.ranges[0]
    ranges = [(ordinal, ordinal + 1) for ordinal in range(start, stop, 2)]
    items = await claims.read_bodies(connection, world.lease, ranges, max_rows=_PAGE, max_bytes=_BUDGET_BYTES)
    assert [item.ordinal for item in items] == [ordinal for ordinal, _ in ranges]


async def settle_all(world: World, connection: Connection) -> None:
    changes = Changes()
    for item in _items(world):
        changes.decide(item, Outcome(OutcomeState.COMPLETED, b'"answer"', 200))
    settled = await settle(connection, world.subject.worker, changes)
    assert settled.outcomes == LEASED


async def settle_some_of_each(world: World, connection: Connection) -> None:
    changes = Changes()
    for item in _items(world)[: LEASED // 2]:
        verdict: Outcome | Again = Again("busy", "try later", 1.0, True)
        if item.ordinal % 2:
            verdict = Outcome(OutcomeState.FAILED, error_code="bad", error_message="no")
        changes.decide(item, verdict)
    changes.give_back(world.lease, [(world.lease.ranges[0][1] - 10, world.lease.ranges[0][1])])
    settled = await settle(connection, world.subject.worker, changes)
    assert (settled.outcomes + settled.retries, settled.given_back) == (LEASED // 2, 10)


async def settle_fenced(world: World, connection: Connection) -> None:
    changes = Changes()
    changes.decide(_items(world)[0], Outcome(OutcomeState.COMPLETED, b'"answer"', 200))
    settled = await settle(connection, world.paused, changes)
    assert settled.fenced == 1


async def create_batch(world: World, connection: Connection) -> None:
    await create.create_batch(connection, file_id=world.subject.file, owner="local", pool=POOL, key="key")


async def find_by_key(_: World, connection: Connection) -> None:
    assert await find_batch_by_key(connection, "local", "no such key") is None


async def read_status(world: World, connection: Connection) -> None:
    status = await read.read_status(connection, world.subject.batch)
    assert status.counts.in_flight == LEASED


async def pause(world: World, connection: Connection) -> None:
    assert await pause_batch(connection, world.subject.batch)


async def resume(world: World, connection: Connection) -> None:
    assert await resume_batch(connection, world.paused)


async def cancel(world: World, connection: Connection) -> None:
    assert await cancel_batch(connection, world.subject.batch)


async def finish_settled(world: World, connection: Connection) -> None:
    cursor = await connection.execute(_FINISH["finish_if_over"], {"ids": [world.settled], "now": None})
    assert await cursor.fetchone() is not None


async def finish_drained(world: World, connection: Connection) -> None:
    cursor = await connection.execute(_FINISH["finish_if_over"], {"ids": [world.drained], "now": None})
    assert await cursor.fetchone() is not None


async def finish_nothing(world: World, connection: Connection) -> None:
    cursor = await connection.execute(_FINISH["finish_if_over"], {"ids": [world.subject.batch], "now": None})
    assert await cursor.fetchone() is None


async def close_if_past_deadline(world: World, connection: Connection) -> None:
    await connection.execute(_FINISH["close_if_past_deadline"], {"ids": [world.subject.batch], "now": None})


async def hold_strays(world: World, connection: Connection) -> None:
    await connection.execute(_UPKEEP["hold_strays"], {"ids": [world.subject.batch]})


async def list_changed(_: World, connection: Connection) -> None:
    await upkeep.list_changed(connection, limit=5)


async def list_closing(world: World, connection: Connection) -> None:
    assert await upkeep.list_closing(connection, limit=5) == [world.drained]


async def list_steered(_: World, connection: Connection) -> None:
    await upkeep.list_steered(connection, 120.0, limit=5)


async def list_unfinished(_: World, connection: Connection) -> None:
    assert len(await upkeep.list_unfinished(connection, limit=5)) == 5


async def fold_progress(world: World, connection: Connection) -> None:
    await connection.execute(_UPKEEP["fold_progress"], {"ids": [world.subject.batch], "limit": 1_000})


async def list_newest(_: World, connection: Connection) -> None:
    assert len(await list_batches(connection, owner="local", dialect="run", limit=20)) == 20


async def list_paused(world: World, connection: Connection) -> None:
    (batch,) = await list_batches(connection, owner="local", dialect="run", limit=20, states=["paused"])
    assert batch.id == world.paused


async def list_backwards(_: World, connection: Connection) -> None:
    """From the middle of the ids there are: of some fifty, ten are sure to follow."""
    before = UUID(int=1 << 127)
    assert len(await list_batches(connection, owner="local", dialect="run", limit=10, before=before)) == 10


async def list_by_metadata(_: World, connection: Connection) -> None:
    found = await list_batches(connection, owner="local", dialect="run", limit=20, metadata={"no": "such"})
    assert found == []


async def result_of_nothing(_: World, connection: Connection) -> None:
    assert await find_batch_of_result(connection, uuid4(), None) is None


async def list_failures(world: World, connection: Connection) -> None:
    chosen = dict.fromkeys(("custom_ids", "lines", "fingerprint"))
    where = {"lane": world.subject.lane, "after": -1, "limit": 10, **chosen}
    assert len(await (await connection.execute(_RUN_AGAIN["list_failures"], where)).fetchall()) == 10


def _failures(world: World) -> dict[str, Any]:
    ordinals = [50 * number for number in range(10)]
    return {"id": world.subject.batch, "lane": world.subject.lane, "ordinals": ordinals}


async def list_rerunning(world: World, connection: Connection) -> None:
    assert await (await connection.execute(_RUN_AGAIN["list_rerunning"], _failures(world))).fetchall() == []


async def read_failures(world: World, connection: Connection) -> None:
    assert len(await (await connection.execute(_RUN_AGAIN["read_outcomes"], _failures(world))).fetchall()) == 10


async def count_within_bytes(world: World, connection: Connection) -> None:
    where = {**_failures(world), "bytes": 1_000}
    assert await (await connection.execute(_RUN_AGAIN["count_within_bytes"], where)).fetchone() == (10,)


async def read_states(world: World, connection: Connection) -> None:
    assert len(await (await connection.execute(_REPROCESS["read_states"], _failures(world))).fetchall()) == 10


async def rerun_failures(world: World, connection: Connection) -> None:
    numbers = {"generations": [1] * 10, "attempts": [1] * 10, "spent": [1] * 10, "reopened": False, "now": None}
    await connection.execute(_RUN_AGAIN["rerun_if_held"], {**_failures(world), **numbers, **_NO_FIGURES})


async def list_unrun(world: World, connection: Connection) -> None:
    cursor = await connection.execute(
        _RUN_AGAIN["list_unrun"], {"ids": [world.drained, world.subject.batch], "now": None}
    )
    assert await cursor.fetchall() == []


async def hold_first_unrun(world: World, connection: Connection) -> None:
    await connection.execute(_RUN_AGAIN["hold_first_unrun"], {"id": world.drained, "limit": 10, "now": None})


async def give_up_unrun(world: World, connection: Connection) -> None:
    await connection.execute(
        _RUN_AGAIN["give_up_unrun"], {"id": world.drained, "deferral": 0, "ordinals": [0], **_NO_FIGURES}
    )


async def list_outcomes_of_states(world: World, connection: Connection) -> None:
    where = {"lane": world.subject.lane, "after": -1, "states": ["completed", "failed"], "limit": 10}
    assert len(await (await connection.execute(_REPROCESS["list_outcomes_of_states"], where)).fetchall()) == 10


async def list_live(world: World, connection: Connection) -> None:
    where = {"batch_id": world.subject.batch, "lane": world.subject.lane, "ordinals": [0, 50]}
    await connection.execute(_REPROCESS["list_live"], where)


async def hold_room(world: World, connection: Connection) -> None:
    assert await (await connection.execute(_REPROCESS["hold_room"], {"lane": world.subject.lane})).fetchall() == []


async def find_lane(world: World, connection: Connection) -> None:
    cursor = await connection.execute(_REPROCESS["find_lane"], {"batch_id": world.subject.batch})
    assert await cursor.fetchone() is not None


async def list_operations(world: World, connection: Connection) -> None:
    where = {"batch_id": world.subject.batch, "below": UUID(int=2**128 - 1), "from": UUID(int=0), "limit": 10}
    await connection.execute(_REPROCESS["list_operations"], where)


async def take_operation(world: World, connection: Connection) -> None:
    assert await reprocess.take(connection, world.subject.worker, 30, besides=[uuid4()]) is None


async def hold_if_growing(world: World, connection: Connection) -> None:
    where = {"id": world.subject.batch, "file_id": world.subject.batch, "sealed_too": True, "now": None}
    await connection.execute(_GROWTH["hold_if_growing"], where)


async def find_row_keys(world: World, connection: Connection) -> None:
    where = {"source_id": world.subject.source, "keys": [str(number) for number in range(10)]}
    await connection.execute(_GROWTH["find_row_keys"], where)


async def find_held(world: World, connection: Connection) -> None:
    items = [(world.lease, ordinal) for ordinal in claims.first_ordinals(world.lease.ranges, 10)]
    held = await settle_write.find_held(connection, world.subject.worker, [world.lease.id], items)
    assert len(held) == 10


async def claim_one_job(world: World, connection: Connection) -> None:
    leases = await claim_job(connection, world.subject.batch, pool=POOL, want=_PAGE, worker_id=world.subject.worker)
    assert count_leased(leases) > 1


async def read_work_of_job(world: World, connection: Connection) -> None:
    assert await read_work(connection, world.subject.batch) is not None


async def hold_file_of_batch(world: World, connection: Connection) -> None:
    cursor = await connection.execute(_GROWTH["hold_file_of_batch"], {"id": world.subject.batch})
    assert await cursor.fetchone() is not None


async def list_file_lanes(world: World, connection: Connection) -> None:
    cursor = await connection.execute(_GROWTH["list_file_lanes"], {"source_id": world.subject.source})
    assert await cursor.fetchone() is not None


async def grow(world: World, connection: Connection) -> None:
    added = {"lanes": [0, 1], "routes": ["a", "b"], "endpoints": ["/v1/a", "/v1/a"], "counts": [1, 1], "bytes": 2}
    where = {"id": world.subject.batch, "source_id": world.subject.source, "width": None, "now": None}
    await connection.execute(_GROWTH["grow_if_held"], {**where, **added})


async def heartbeat(world: World, connection: Connection) -> None:
    assert await check_in(connection, world.subject.worker)


async def list_lanes(world: World, connection: Connection) -> None:
    await connection.execute(_EXPORT["list_lanes"], {"batch": world.subject.batch})


async def list_decided(world: World, connection: Connection) -> None:
    """Where the outcomes end."""
    start = world.subject.lines // 2 - _PAGE // 2
    cursor = await connection.execute(
        _EXPORT["list_decided"], {"lanes": [world.subject.lane], "starts": [start], "rows": _PAGE}
    )
    assert len(await cursor.fetchall()) == 1


async def read_inputs_at(world: World, connection: Connection) -> None:
    start = world.subject.lines // 2
    where = {"sources": [world.subject.source] * _PAGE, "source_lanes": [0] * _PAGE}
    ordinals = {"ordinals": list(range(start, start + _PAGE))}
    cursor = await connection.execute(_EXPORT["read_inputs_at"], where | ordinals)
    assert len(await cursor.fetchall()) == _PAGE


async def purge_templates(world: World, connection: Connection) -> None:
    subject = world.subject
    where = {"source_id": subject.source, "source_lane": 0, "ordinal": subject.lines // 2, "rows": _PAGE}
    cursor = await connection.execute(_INTAKE["purge_templates_after"], where)
    assert await cursor.fetchone() is not None


async def list_unserved(_: World, connection: Connection) -> None:
    assert await unserved.list_unserved(connection, [], 1) == {}


async def move_unserved(_: World, connection: Connection) -> None:
    assert await move_lanes(connection, POOL, DEFERRED_ROUTE, "serve:new", 0, limit=1) == 1


_HOT: list[Operation] = [
    *(
        claim_lane,
        claim_nothing_due,
        claim_due,
        line_up_nothing,
        line_up_due,
        refresh_places,
        weigh_near,
        routes_with_work,
        reclaimed_routes,
        closed_lanes,
        read_range,
        read_some,
    ),
    *(settle_all, settle_some_of_each, settle_fenced, heartbeat, fold_progress),
    *(list_decided, read_inputs_at),
]
_OTHERS: list[Operation] = [
    *(create_batch, find_by_key, read_status, pause, resume, cancel),
    *(finish_settled, finish_drained, finish_nothing, close_if_past_deadline, hold_strays, list_lanes, purge_templates),
    *(list_changed, list_closing, list_steered, list_unfinished),
    *(list_newest, list_paused, list_backwards, list_by_metadata, result_of_nothing),
    *(list_failures, list_rerunning, count_within_bytes, read_failures, rerun_failures),
    *(list_unrun, hold_first_unrun, give_up_unrun),
    *(list_outcomes_of_states, list_live, hold_room, find_lane, list_operations, take_operation, read_states),
    *(claim_one_job, read_work_of_job, find_row_keys, find_held),
    *(hold_if_growing, hold_file_of_batch, list_file_lanes, grow, list_unserved),
]


def _items(world: World) -> list[Item]:
    ordinals = claims.first_ordinals(world.lease.ranges, LEASED)
    return [Item(world.lease, ordinal, ordinal + 1, str(ordinal), b"{}") for ordinal in ordinals]


def _explain(world: World, operation: Operation, mode: Mode) -> Plan:
    return world.session.explain(lambda connection: operation(world, connection), mode)


@pytest.mark.parametrize("mode", [Mode.CUSTOM, Mode.CHOSEN], ids=str)
@pytest.mark.parametrize("operation", [*_HOT, *_OTHERS], ids=lambda operation: operation.__name__)
def test_cost_follows_the_rows_answered(worlds: Worlds, operation: Operation, mode: Mode) -> None:
    if (operation, mode, worlds.statistics) == (list_outcomes_of_states, Mode.CUSTOM, "analysed-empty"):
        # Believing the table empty, the planner sorts all outcomes of the lane: the first five times, until it is
        # prepared, or until the table is analysed.
        plan = _explain(worlds.large, operation, mode)
        assert plan.buffers <= worlds.large.subject.lines // 20, f"{plan}"
        assert plan.scanned_whole() <= _SMALL_TABLES, f"{plan}"
        return
    _check(worlds, operation, mode)


@pytest.mark.parametrize("operation", _HOT, ids=lambda operation: operation.__name__)
def test_hot_statements_need_not_know_their_values(worlds: Worlds, operation: Operation) -> None:
    _check(worlds, operation, Mode.GENERIC)


def test_moving_work_costs_what_is_moved(worlds: Worlds) -> None:
    """Where there are no sessions their table is empty, and read whole for nothing: only the cost counts."""
    small, large = (_explain(world, move_unserved, Mode.CUSTOM) for world in (worlds.small, worlds.large))
    assert large.buffers <= 2 * small.buffers + 200, f"{small.buffers} buffers became {large.buffers}:\n{large}"
    assert "deferrals" not in large.scanned_whole(), f"{large}"


def test_the_figures_of_the_queue_are_read_from_control_tables(worlds: Worlds) -> None:
    """What a scrape asks follows lanes, leases and deferrals: no payload is read, no lane that ended."""
    plan = worlds.large.session.explain(lambda connection: read_figures(connection, grace_s=30), Mode.CUSTOM)
    read = {node["Relation Name"] for node in plan.nodes() if "Relation Name" in node}
    assert read <= _CONTROL_TABLES
    if worlds.statistics == "analysed":
        lanes = {node.get("Index Name") for node in plan.nodes() if node.get("Relation Name") == "lanes"}
        assert None not in lanes, f"{plan}"


def _check(worlds: Worlds, operation: Operation, mode: Mode) -> None:
    small, large = (_explain(world, operation, mode) for world in (worlds.small, worlds.large))
    # A hundred times the rows make every index one or two levels deeper, and no more.
    assert large.buffers <= 2 * small.buffers + 20, f"{small.buffers} buffers became {large.buffers}:\n{large}"
    assert large.scanned_whole() <= _SMALL_TABLES, f"{large}"

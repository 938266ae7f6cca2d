"""Two and three moves on one session at once, in every order of their statements and commits."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations, combinations_with_replacement
from typing import Any
from uuid import UUID, uuid4

import pytest

from penstock.claim import claim as claims
from penstock.claim import liveness
from penstock.config import LivenessLimits
from penstock.db import sql
from penstock.db.pool import Connection
from penstock.erase import erase
from penstock.model import Again, ClaimPermit, Item, Lease, Outcome, OutcomeState
from penstock.sessions.accept import Accepted, Existing, accept_many
from penstock.sessions.sessions import cancel_request, get_session, put_session, resume_session
from penstock.settle.write import Changes, pass_over, settle
from tests.support.db import connected, one
from tests.support.engine import claim_due
from tests.support.interleave import Interleaver, Order, Play, interleaver, named, orders, orders_of_twins
from tests.support.sessions import DEAD, DONE, OWNER, end, send, wish

_SQL = sql.load("penstock.sessions", "sessions.sql")

LIMITS = LivenessLimits(max_reclaims=99)
SKIPPED = Outcome(OutcomeState.SKIPPED, error_code="cancelled", error_message="m")
ROUTES = ("model-0", "model-1")


@dataclass
class Scene:
    """One session, and who holds what of it."""

    key: str
    pool: str
    holder: UUID = field(default_factory=uuid4)
    claimer: UUID = field(default_factory=uuid4)
    items: list[Item] = field(default_factory=list)
    queued: UUID | None = None
    """The last request that was accepted before the play."""


# -- the moves


async def accept(connection: Connection, scene: Scene) -> object:
    """Two requests, the first of another kind than what is queued."""
    wishes = [wish(scene.key, pool=scene.pool, route=route) for route in ("model-1", "model-0")]
    first, second = await accept_many(connection, wishes)
    assert isinstance(first, Accepted)
    assert isinstance(second, Accepted)
    assert second.ordinal == first.ordinal + 1
    return first.ordinal


async def hand_in(connection: Connection, scene: Scene) -> object:
    """The same, begun at once if nothing is before them."""
    wishes = [wish(scene.key, pool=scene.pool, route=route) for route in ("model-1", "model-0")]
    first, second = await accept_many(connection, wishes, permits={scene.pool: ClaimPermit(scene.claimer, 9)})
    assert isinstance(first, Accepted)
    assert isinstance(second, Accepted)
    assert second.lease is None
    return first.ordinal


async def accept_keyed(connection: Connection, scene: Scene) -> object:
    """Whoever comes second gets what the first has made."""
    asked = wish(scene.key, pool=scene.pool, route="model-1", idempotency_key="key")
    (answer,) = await accept_many(connection, [asked])
    assert isinstance(answer, Accepted | Existing)
    return answer.request_id if isinstance(answer, Accepted) else answer.request.id


async def take(connection: Connection, scene: Scene, worker: UUID) -> list[Lease]:
    wants = dict.fromkeys(ROUTES, 9)
    return await claim_due(connection, pool=scene.pool, wants=wants, worker_id=worker)


async def claim(connection: Connection, scene: Scene) -> object:
    return len(await take(connection, scene, scene.claimer))


async def complete(connection: Connection, scene: Scene) -> object:
    return (await end(connection, scene.holder, scene.items)).outcomes


async def fail(connection: Connection, scene: Scene) -> object:
    return (await end(connection, scene.holder, scene.items, DEAD)).outcomes


async def retry(connection: Connection, scene: Scene) -> object:
    return (await end(connection, scene.holder, scene.items, Again("busy", "m", 0.0, True))).retries


async def give_back(connection: Connection, scene: Scene) -> object:
    changes = Changes()
    for item in scene.items:
        changes.give_back(item.lease, item.lease.ranges)
    return (await settle(connection, scene.holder, changes)).given_back


async def reclaim(connection: Connection, scene: Scene) -> object:
    return (await liveness.reclaim(connection, scene.claimer, LIMITS, stuck_s=1e6, gone=[scene.holder])).leases


async def cancel(connection: Connection, scene: Scene) -> object:
    if scene.queued is None:
        return False
    return await cancel_request(connection, OWNER, scene.key, scene.queued)


async def pass_on(connection: Connection, scene: Scene) -> object:
    session = await get_session(connection, OWNER, scene.key)
    return session is not None and await pass_over(connection, [session.id])


async def resume(connection: Connection, scene: Scene) -> object:
    return await resume_session(connection, OWNER, scene.key, retry_head=True)


async def go_on(connection: Connection, scene: Scene) -> object:
    return await resume_session(connection, OWNER, scene.key)


async def put(connection: Connection, scene: Scene) -> object:
    return (await put_session(connection, OWNER, scene.key, on_dead_head="block", priority=1)).priority


async def delete(connection: Connection, scene: Scene) -> object:
    return await erase.delete_session(connection, OWNER, scene.key)


Move = Callable[[Connection, Scene], Awaitable[object]]
ACCEPTS: tuple[Move, ...] = (accept, accept_keyed, hand_in)
SETTLES: tuple[Move, ...] = (complete, fail, retry, give_back, reclaim)
STEERING: tuple[Move, ...] = (cancel, pass_on, resume, go_on, put)
EVERY: tuple[Move, ...] = (*ACCEPTS, claim, *SETTLES, *STEERING)
# A late answer and a reclaim are about the same lease; two of these cannot both be the holder's.
ALONE: set[Move] = {complete, fail, retry, give_back}


# -- the scenes


async def _hold(connection: Connection, scene: Scene) -> None:
    leases = await take(connection, scene, scene.holder)
    scene.items = await claims.read_heads(connection, leases, max_bytes=1 << 20)


async def unknown(_: Connection, __: Scene) -> None:
    """Nobody has sent anything to it."""


async def idle(connection: Connection, scene: Scene) -> None:
    """Everything is answered."""
    await send(connection, scene.key, pool=scene.pool)
    await _hold(connection, scene)
    await complete(connection, scene)
    scene.items = []


async def waiting(connection: Connection, scene: Scene) -> None:
    """One request, which nobody has begun."""
    (answer,) = await send(connection, scene.key, pool=scene.pool)
    scene.queued = answer.request_id


async def alone(connection: Connection, scene: Scene) -> None:
    """One request is being worked on, and none is queued."""
    await waiting(connection, scene)
    await _hold(connection, scene)


async def busy(connection: Connection, scene: Scene) -> None:
    """One is being worked on, two are queued, one of each kind; a failure would block it."""
    await put_session(connection, OWNER, scene.key, on_dead_head="block")
    await send(connection, scene.key, pool=scene.pool)
    await send(connection, scene.key, pool=scene.pool, route="model-1")
    (answer,) = await send(connection, scene.key, pool=scene.pool)
    scene.queued = answer.request_id
    await _hold(connection, scene)


async def deferred(connection: Connection, scene: Scene) -> None:
    """The head waits for another try, which is due."""
    await alone(connection, scene)
    await send(connection, scene.key, pool=scene.pool, route="model-1")
    await retry(connection, scene)
    scene.items = []


async def cancelled(connection: Connection, scene: Scene) -> None:
    """The next was cancelled, and what follows it is of another kind."""
    await waiting(connection, scene)
    await cancel(connection, scene)
    (answer,) = await send(connection, scene.key, pool=scene.pool, route="model-1")
    scene.queued = answer.request_id


async def put_off(connection: Connection, scene: Scene) -> None:
    """The head waited for another try, and was cancelled."""
    await deferred(connection, scene)
    await cancel(connection, scene)


async def blocked(connection: Connection, scene: Scene) -> None:
    """Its head has failed for good."""
    await busy(connection, scene)
    await fail(connection, scene)
    scene.items = []


Setting = Callable[[Connection, Scene], Awaitable[None]]
COMING: tuple[Move, ...] = (*ACCEPTS, claim, put)
# What can make a difference there.
SCENES: dict[Setting, tuple[Move, ...]] = {
    unknown: COMING,
    idle: COMING,
    waiting: (*COMING, cancel),
    deferred: (*COMING, cancel, pass_on),
    cancelled: (*COMING, cancel, pass_on),
    put_off: (*COMING, cancel, pass_on),
    alone: (*ACCEPTS, claim, *SETTLES, cancel),
    busy: EVERY,
    blocked: (*COMING, cancel, resume, go_on),
}

PLACES = """
SELECT l.id, l.next, l.total, l.busy, l.open, s.deleted_at IS NOT NULL AS deleted,
       l.busy > 0 OR l.next = l.total OR (l.pool, l.route, l.endpoint) = (
         SELECT r.pool, r.route, r.endpoint FROM penstock.session_requests r
          WHERE r.lane_id = l.id AND r.ordinal = l.next) AS right_head,
       ARRAY(SELECT generate_series(lower(r), upper(r) - 1) FROM penstock.leases x, unnest(x.ordinals) r
              WHERE x.lane_id = l.id) AS leased,
       ARRAY(SELECT generate_series(lower(r), upper(r) - 1) FROM penstock.deferrals x, unnest(x.ordinals) r
              WHERE x.lane_id = l.id) AS deferred,
       ARRAY(SELECT ordinal FROM penstock.outcomes x WHERE x.lane_id = l.id) AS settled,
       ARRAY(SELECT ordinal FROM penstock.session_requests x WHERE x.lane_id = l.id ORDER BY 1) AS requests,
       ARRAY(SELECT ordinal FROM penstock.templates x WHERE x.source_id = l.source_id ORDER BY 1) AS templates
  FROM penstock.lanes l
  JOIN penstock.sessions s ON s.lane_id = l.id
 WHERE s.key = %s
"""


class Stage:
    def __init__(self, turns: Interleaver) -> None:
        self._turns = turns
        self.db = turns.observer
        self.plays = 0
        self.blocked: Counter[str] = Counter()

    async def perform(self, setting: Setting, moves: Sequence[Move], order: Order) -> tuple[Scene, Play]:
        await self.db.execute("DELETE FROM penstock.leases")
        scene = Scene(f"key-{self.plays}", f"play-{self.plays}")
        self.plays += 1
        names = [move.__name__ for move in moves]
        try:
            await setting(self.db, scene)
            play = await self._turns.play(order, [_bound(move, scene) for move in moves])
            for number, name in enumerate(names):
                if play.was_blocked(number):
                    assert name != "claim", "a claim waits for nobody"
                    self.blocked[name] += 1
            await self.check(scene)
            await self.work_off(scene)
        except BaseException as error:
            error.add_note(f"{setting.__name__}: {named(order, names)}")
            raise
        return scene, play

    async def check(self, scene: Scene) -> list[dict[str, Any]]:
        cursor = await self.db.execute(PLACES, [scene.key])
        assert cursor.description is not None
        names = [column.name for column in cursor.description]
        places = [dict(zip(names, row, strict=True)) for row in await cursor.fetchall()]
        assert sum(not place["deleted"] for place in places) <= 1
        for place in places:
            everything = list(range(place["total"]))
            assert place["requests"] == place["templates"] == everything, place
            assert place["right_head"], place
            if place["deleted"]:
                assert not place["leased"], place
                assert not place["open"], place
                continue
            ordinals = place["leased"] + place["deferred"] + place["settled"]
            assert sorted(ordinals + everything[place["next"] :]) == everything, place
            assert place["busy"] == len(place["leased"]) + len(place["deferred"]) <= 1, place
            started = place["leased"] + place["deferred"]
            assert place["settled"] == [] or not started or max(place["settled"]) < min(started), place
        return places

    async def work_off(self, scene: Scene) -> None:
        """Whatever happened, everything that was accepted is answered in the end, one after the other."""
        worker = uuid4()
        await go_on(self.db, scene)
        await liveness.reclaim(self.db, worker, LIMITS, stuck_s=1e6, gone=[scene.holder, scene.claimer])
        for _ in range(12):
            leases = await take(self.db, scene, worker)
            if not leases:
                break
            (item,) = await claims.read_heads(self.db, leases, max_bytes=1 << 20)
            await end(self.db, worker, [item], SKIPPED if item.cancelled else DONE)
        for place in await self.check(scene):
            assert place["deleted"] or len(place["settled"]) == place["total"], place


def _bound(move: Move, scene: Scene) -> Callable[[Connection], Awaitable[object]]:
    return lambda connection: move(connection, scene)


def on_stage(conninfo: str, connections: int, body: Callable[[Stage], Awaitable[None]]) -> None:
    async def run() -> None:
        async with interleaver(conninfo, connections) as turns:
            await body(Stage(turns))

    asyncio.run(run())


def _sensible(moves: Sequence[Move]) -> bool:
    return sum(move in ALONE for move in moves) <= 1


@pytest.mark.parametrize("setting", SCENES, ids=lambda setting: setting.__name__)
def test_every_two_moves_in_every_order(database: str, setting: Setting) -> None:
    async def body(stage: Stage) -> None:
        for moves in combinations_with_replacement(SCENES[setting], 2):
            if _sensible(moves):
                for order in orders_of_twins() if moves[0] is moves[1] else orders(2, scenes=True):
                    await stage.perform(setting, moves, order)
        assert stage.blocked["accept"], "somebody must have waited for the session"

    on_stage(database, 2, body)


@pytest.mark.slow
@pytest.mark.parametrize("setting", [alone, busy, deferred], ids=lambda setting: setting.__name__)
def test_accepting_beside_two_others(database_18: str, setting: Setting) -> None:
    async def body(stage: Stage) -> None:
        for moves in combinations((accept, claim, complete, retry, reclaim, cancel), 3):
            if _sensible(moves) and accept in moves:
                for order in orders(3):
                    await stage.perform(setting, moves, order)

    on_stage(database_18, 3, body)


@pytest.mark.parametrize("setting", SCENES, ids=lambda setting: setting.__name__)
def test_deleting_beside_every_other_move(database: str, setting: Setting) -> None:
    """A request that is accepted beside a deletion is deleted with the session, or is the first of a new one."""

    async def body(stage: Stage) -> None:
        for move in SCENES[setting]:
            for order in orders(2, scenes=True):
                await stage.perform(setting, (delete, move), order)

    on_stage(database, 2, body)


@pytest.mark.parametrize("setting", [unknown, idle, alone], ids=lambda setting: setting.__name__)
def test_a_key_makes_one_request_whoever_comes_first(database: str, setting: Setting) -> None:
    async def body(stage: Stage) -> None:
        for order in orders_of_twins():
            _, play = await stage.perform(setting, (accept_keyed, accept_keyed), order)
            assert play.answers[0] == play.answers[1]
        for order in orders(3):
            _, play = await stage.perform(setting, (accept_keyed, accept, accept_keyed), order)
            assert play.answers[0] == play.answers[2]

    on_stage(database, 3, body)


def test_the_order_of_commit_is_the_order_of_the_session(database: str) -> None:
    async def body(stage: Stage) -> None:
        for setting in (unknown, idle, waiting, busy):
            for order in orders(2):
                _, play = await stage.perform(setting, (accept, hand_in), order)
                first = 0 if play.at("commit", 0) < play.at("commit", 1) else 1
                assert play.answers[first] < play.answers[1 - first]

    on_stage(database, 2, body)


def test_many_sessions_accepted_from_two_sides_do_not_deadlock(database: str) -> None:
    """Each names the sessions in an order of its own."""

    async def side(conninfo: str, backwards: bool) -> None:
        async with interleaver(conninfo, 1) as turns:
            for number in range(25):
                keys = [f"{number}-{name}" for name in range(40)] + [f"old-{name}" for name in range(40)]
                keys = keys[::-1] if backwards else keys
                await accept_many(turns.observer, [wish(key, idempotency_key=f"{number}") for key in keys])

    async def run() -> None:
        async with asyncio.timeout(60):
            await asyncio.gather(side(database, False), side(database, True), side(database, True))
        async with interleaver(database, 1) as turns:
            cursor = await turns.observer.execute(
                "SELECT count(*), sum(total), (SELECT count(*) FROM penstock.session_requests) FROM penstock.lanes"
            )
            assert await cursor.fetchone() == (25 * 40 + 40, 2 * 25 * 40, 2 * 25 * 40)

    asyncio.run(run())


def test_accepting_goes_on_after_a_deadlock(database: str) -> None:
    """One that holds its lanes makes new sessions after that, any other before: whoever gives way tries again."""

    async def run() -> None:
        async with connected(database) as holds, connected(database) as other, connected(database) as observer:
            await send(observer, "old")
            # The other finds out, and gives way. It looks once, after this time: by then the deadlock must be there.
            await holds.execute("SET deadlock_timeout = '30s'")
            await other.execute("SET deadlock_timeout = '3s'")
            async with holds.transaction():
                await holds.execute(_SQL["hold_lanes"], {"owners": [OWNER], "keys": ["old"]})
                accepting = asyncio.create_task(send(other, "new", "old"))
                pid = other.info.backend_pid
                while not (await one(observer, "SELECT cardinality(pg_blocking_pids(%s)) > 0", [pid]))[0]:
                    await asyncio.sleep(0.001)
                await send(holds, "new")
            assert [accepted.ordinal for accepted in await accepting] == [1, 1]

    asyncio.run(run())

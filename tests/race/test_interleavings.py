"""Two and three of the engine's moves at once, in every order of their statements and commits."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, count
from typing import Any
from uuid import UUID, uuid4

import pytest

from penstock.batches.create import create_batch
from penstock.batches.finish import finish_batch
from penstock.batches.read import Batch, read_status
from penstock.batches.run_again import NotRetryable, retry_batch
from penstock.batches.steer import cancel_batch, pause_batch, resume_batch
from penstock.claim import claim as claims
from penstock.claim import liveness
from penstock.config import LivenessLimits
from penstock.db import sql
from penstock.db.pool import Connection
from penstock.model import Again, BatchState, Lease, Outcome, OutcomeState
from penstock.settle.write import Changes, Settled, settle
from tests.support.db import connected
from tests.support.engine import claim_due, make_batch, make_file, tidy
from tests.support.interleave import Interleaver, Order, Play, Statement, interleaver, named, orders, orders_of_twins
from tests.support.thorough import some

CLAIM_SQL = sql.load("penstock.claim", "claim.sql")
UPKEEP_SQL = sql.load("penstock.batches", "upkeep.sql")
FINISH_SQL = sql.load("penstock.batches", "finish.sql")
LIMITS = LivenessLimits(max_reclaims=99)
DONE = Outcome(OutcomeState.COMPLETED, b"1", 200)
NO = Outcome(OutcomeState.FAILED, None, 400, error_code="bad", error_message="no")
ROUTES = ("model-0", "model-1")


@dataclass
class Scene:
    """A batch with work in every place, and who holds what of it."""

    pool: str
    batch: UUID
    holder: UUID = field(default_factory=uuid4)
    claimer: UUID = field(default_factory=uuid4)
    leases: list[Lease] = field(default_factory=list)

    def held(self) -> list[tuple[Lease, int]]:
        return [(lease, ordinal) for lease in self.leases for ordinal in claims.first_ordinals(lease.ranges, 99)]


# -- the moves: each one statement, as the engine sends it


async def take(connection: Connection, scene: Scene, worker: UUID, want: int = 99) -> list[Lease]:
    wants = dict.fromkeys(ROUTES, want)
    return await claim_due(connection, pool=scene.pool, wants=wants, worker_id=worker, taper_floor=99)


async def claim(connection: Connection, scene: Scene) -> int:
    return len(await take(connection, scene, scene.claimer))


async def complete(connection: Connection, scene: Scene, outcome: Outcome = DONE) -> object:
    rows = [(lease, ordinal, ordinal + 1, "c", outcome) for lease, ordinal in scene.held()]
    return await settle(connection, scene.holder, Changes(outcomes=rows))


async def retry(connection: Connection, scene: Scene) -> object:
    rows = [(lease, ordinal, Again("code", "message", 0.0, True)) for lease, ordinal in scene.held()]
    return await settle(connection, scene.holder, Changes(agains=rows))


async def give_back(connection: Connection, scene: Scene) -> object:
    changes = Changes()
    for lease in scene.leases:
        changes.give_back(lease, lease.ranges)
    return await settle(connection, scene.holder, changes)


async def reclaim(connection: Connection, scene: Scene) -> object:
    return await liveness.reclaim(connection, scene.claimer, LIMITS, stuck_s=1e6, gone=[scene.holder])


async def vouch(connection: Connection, scene: Scene) -> object:
    return await liveness.report_progress(connection, scene.holder, scene.leases)


async def cancel(connection: Connection, scene: Scene) -> object:
    return await cancel_batch(connection, scene.batch)


async def pause(connection: Connection, scene: Scene) -> object:
    return await pause_batch(connection, scene.batch)


async def resume(connection: Connection, scene: Scene) -> object:
    return await resume_batch(connection, scene.batch)


async def rerun(connection: Connection, scene: Scene) -> object:
    try:
        return (await retry_batch(connection, scene.batch, None)).requests
    except NotRetryable:
        return 0


async def finish(connection: Connection, scene: Scene) -> object:
    return await finish_batch(connection, scene.batch)


async def end(connection: Connection, scene: Scene) -> object:
    """The statement alone, without closing what is past its deadline."""
    cursor = await connection.execute(FINISH_SQL["finish_if_over"], {"ids": [scene.batch], "now": None})
    return cursor.rowcount > 0


async def fold(connection: Connection, scene: Scene) -> object:
    cursor = await connection.execute(UPKEEP_SQL["fold_progress"], {"ids": [scene.batch], "limit": 100})
    return cursor.rowcount > 0


async def hold_strays(connection: Connection, scene: Scene) -> object:
    cursor = await connection.execute(UPKEEP_SQL["hold_strays"], {"ids": [scene.batch]})
    return cursor.rowcount > 0


Move = Callable[[Connection, Scene], Awaitable[object]]
SETTLES: tuple[Move, ...] = (complete, retry, give_back)
STEERING: tuple[Move, ...] = (pause, resume, cancel, rerun)
HOUSEKEEPING: tuple[Move, ...] = (reclaim, vouch, end, fold, hold_strays)
EVERY: tuple[Move, ...] = (claim, *SETTLES, *STEERING, *HOUSEKEEPING)
CLOSING = (pause, cancel)


# -- the scenes


async def running(connection: Connection, scene: Scene) -> None:
    """Something leased, something deferred and due, something never claimed."""
    scene.leases = await take(connection, scene, scene.holder, 2)
    (extra,) = await take(connection, scene, scene.holder, 1)
    back = Changes()
    back.give_back(extra, extra.ranges)
    await settle(connection, scene.holder, back)


async def last_item(connection: Connection, scene: Scene) -> None:
    """All but what is leased has its outcome."""
    scene.leases = await take(connection, scene, scene.holder, 3)
    await complete(connection, scene)
    scene.leases = await take(connection, scene, scene.holder)


async def some_failed(connection: Connection, scene: Scene) -> None:
    """Two have failed, the others are leased."""
    scene.leases = await take(connection, scene, scene.holder, 2)
    await complete(connection, scene, NO)
    scene.leases = await take(connection, scene, scene.holder)


async def over(connection: Connection, scene: Scene) -> None:
    """All is settled, part of it failed, and nobody has ended it yet."""
    await some_failed(connection, scene)
    await complete(connection, scene)


async def paused(connection: Connection, scene: Scene) -> None:
    """With one deferral that the pause held, and one written after it."""
    await running(connection, scene)
    await pause_batch(connection, scene.batch)
    (lease,) = scene.leases
    stray = Changes(agains=[(lease, 0, Again("code", "message", 0.0, True))])
    await settle(connection, scene.holder, stray)


async def cancelling(connection: Connection, scene: Scene) -> None:
    await running(connection, scene)
    await cancel_batch(connection, scene.batch)


async def one_at_a_time(connection: Connection, scene: Scene) -> None:
    """Lanes of width 1: settling frees their room, so it needs their rows, as steering does."""
    await connection.execute("UPDATE penstock.lanes SET width = 1 WHERE batch_id = %s", [scene.batch])
    scene.leases = await take(connection, scene, scene.holder)


Setting = Callable[[Connection, Scene], Awaitable[None]]


class Stage:
    """Sets a scene, plays an order in it, and looks at what is left. Batches share their file: only work differs."""

    def __init__(self, turns: Interleaver) -> None:
        self._turns = turns
        self.db = turns.observer
        self._files: dict[tuple[int, ...], UUID] = {}
        self.plays = 0
        self.blocked: Counter[str] = Counter()

    async def perform(self, setting: Setting, moves: Sequence[Move], order: Order) -> tuple[Scene, Play]:
        scene = await self.scene(setting)
        names = [move.__name__ for move in moves]
        try:
            play = await self._turns.play(order, [_bound(move, scene) for move in moves])
            self._note(names, play)
            self._nothing_is_claimed_of_the_closed(setting, moves, play)
            await tidy(self.db, scene.batch)
            await self.check(scene, tidied=True)
        except BaseException as error:
            error.add_note(f"{setting.__name__}: {named(order, names)}")
            raise
        return scene, play

    async def scene(self, setting: Setting) -> Scene:
        # Reclaiming looks at every lease there is: those of earlier plays must be gone.
        await self.db.execute("DELETE FROM penstock.leases")
        totals = (2, 2) if setting is one_at_a_time else (4,)
        if totals not in self._files:
            self._files[totals] = await make_file(self.db, totals)
        pool = f"play-{self.plays}"
        self.plays += 1
        batch = await create_batch(self.db, file_id=self._files[totals], owner="local", pool=pool)
        scene = Scene(pool, batch)
        await setting(self.db, scene)
        return scene

    async def freely(self, moves: Sequence[Move], scene: Scene) -> None:
        """Some moves one after the other, each its own transaction, beside whatever else goes on."""
        async with self._turns.spare() as connection:
            for move in moves:
                await move(connection, scene)

    def _note(self, names: Sequence[str], play: Play) -> None:
        for number, name in enumerate(names):
            if play.was_blocked(number):
                assert name != "claim", "a claim waits for nobody"
                self.blocked[name] += 1

    def _nothing_is_claimed_of_the_closed(self, setting: Setting, moves: Sequence[Move], play: Play) -> None:
        opened = [n for n, move in enumerate(moves) if move is resume and play.answers[n]]
        for number, move in enumerate(moves):
            if move is not claim or not play.answers[number] or opened:
                continue
            assert setting not in (paused, cancelling)
            for other, closing in enumerate(moves):
                if closing in CLOSING and play.answers[other]:
                    assert play.at("commit", other) > play.at("start", number), "claimed after the close had committed"

    async def check(self, scene: Scene, *, tidied: bool = False) -> BatchState:
        """What holds after every order of everything."""
        status = await read_status(self.db, scene.batch)
        places = await self._places(scene)
        _each_ordinal_in_one_place(places)
        _figures_are_exact(status, places)
        _lanes_follow_the_batch(places, status.state)
        if tidied and not status.state.terminal:
            wrong = [place["misheld"] for place in places]
            assert not any(wrong), f"deferrals that no claim will find, or should not: {wrong}"
        return status.state

    async def _places(self, scene: Scene) -> list[dict[str, Any]]:
        cursor = await self.db.execute(PLACES, [scene.batch])
        assert cursor.description is not None
        names = [column.name for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in await cursor.fetchall()]

    async def work_off(self, scene: Scene) -> BatchState:
        """The rest of the batch's life, by a worker that lives: whatever happened, it comes to an end."""
        worker = uuid4()
        await resume_batch(self.db, scene.batch)
        for _ in range(4):
            gone = [scene.holder, scene.claimer]
            await liveness.reclaim(self.db, worker, LIMITS, stuck_s=1e6, gone=gone)
            await tidy(self.db, scene.batch)
            mine = Scene(scene.pool, scene.batch, worker, leases=await take(self.db, scene, worker))
            # The others are not registered, so what this worker claims must be settled before the next reclaim.
            await complete(self.db, mine)
            await finish_batch(self.db, scene.batch)
            state = await self.check(scene, tidied=True)
            if state.terminal:
                return state
        raise AssertionError("this batch never ends")


PLACES = """
SELECT l.next, l.total, l.width, l.busy, l.open,
       ARRAY(SELECT generate_series(lower(r), upper(r) - 1) FROM penstock.leases x, unnest(x.ordinals) r
              WHERE x.lane_id = l.id) AS leased,
       ARRAY(SELECT generate_series(lower(r), upper(r) - 1) FROM penstock.deferrals x, unnest(x.ordinals) r
              WHERE x.lane_id = l.id) AS deferred,
       -- What is being run again keeps the outcome of an earlier generation.
       ARRAY(SELECT ordinal FROM penstock.outcomes x
              WHERE x.lane_id = l.id AND NOT EXISTS (
                SELECT FROM penstock.leases y
                 WHERE y.lane_id = l.id AND y.ordinals @> x.ordinal AND y.generation > x.generation
                UNION ALL
                SELECT FROM penstock.deferrals y
                 WHERE y.lane_id = l.id AND y.ordinals @> x.ordinal AND y.generation > x.generation)) AS settled,
       (SELECT count(*) FROM penstock.deferrals x WHERE x.lane_id = l.id AND x.held = l.open) AS misheld,
       (SELECT count(*) FROM penstock.deferrals x WHERE x.lane_id = l.id AND NOT x.held) AS unheld,
       (SELECT count(*) FROM penstock.outcomes x WHERE x.lane_id = l.id AND x.state = 'completed') AS completed,
       (SELECT count(*) FROM penstock.attempts x WHERE x.lane_id = l.id AND x.not_before IS NOT NULL) AS retried
  FROM penstock.lanes l
 WHERE l.batch_id = %s
"""


def _bound(move: Move, scene: Scene) -> Statement:
    return lambda connection: move(connection, scene)


def _each_ordinal_in_one_place(places: list[dict[str, Any]]) -> None:
    for place in places:
        everywhere = place["leased"] + place["deferred"] + place["settled"]
        everywhere += range(place["next"], place["total"])
        assert len(everywhere) == len(set(everywhere)), place
        assert len(everywhere) == place["total"], place
        if place["width"] is not None:
            assert place["busy"] == len(place["leased"]) + len(place["deferred"]) <= place["width"], place


def _figures_are_exact(status: Batch, places: list[dict[str, Any]]) -> None:
    counts = status.counts
    assert counts.settled == sum(len(place["settled"]) for place in places)
    assert counts.completed == sum(place["completed"] for place in places)
    assert counts.in_flight == sum(len(place["leased"]) for place in places)
    assert counts.retried == sum(place["retried"] for place in places)
    assert counts.settled + counts.in_flight + counts.pending + counts.cancelled == counts.total
    assert min(counts.pending, counts.cancelled) == 0
    if status.state is BatchState.COMPLETED:
        assert counts.settled == counts.total
    if status.state is BatchState.CANCELLED:
        assert counts.in_flight == 0
        assert not any(place["unheld"] for place in places)


def _lanes_follow_the_batch(places: list[dict[str, Any]], state: BatchState) -> None:
    opened = {place["open"] for place in places}
    if state is BatchState.IN_PROGRESS:
        assert opened == {True}
    if state in (BatchState.PAUSED, BatchState.CANCELLING, BatchState.CANCELLED):
        assert opened == {False}


def on_stage(conninfo: str, sessions: int, body: Callable[[Stage], Awaitable[None]]) -> None:
    async def run() -> None:
        async with interleaver(conninfo, sessions) as turns:
            await body(Stage(turns))

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("setting", [running, last_item, some_failed, over, paused, cancelling, one_at_a_time])
def test_any_two_moves_in_any_order(database_18: str, setting: Setting) -> None:
    async def body(stage: Stage) -> None:
        for first, second in combinations(EVERY, 2):
            for order in orders(2, scenes=True):
                await stage.perform(setting, (first, second), order)
        for move in EVERY:
            for order in orders_of_twins():
                await stage.perform(setting, (move, move), order)
        assert stage.blocked, "some of these wait for one another, or nothing was tested"

    on_stage(database_18, 2, body)


def _id(value: Setting | Sequence[Move]) -> str:
    return "+".join(move.__name__ for move in value) if isinstance(value, tuple) else value.__name__  # type: ignore[union-attr]


TRIPLES: list[tuple[Setting, tuple[Move, Move, Move]]] = [
    (running, (claim, cancel, complete)),
    (cancelling, (reclaim, complete, end)),
    (last_item, (complete, fold, end)),
    (paused, (retry, resume, hold_strays)),
    (paused, (resume, cancel, claim)),
    (running, (pause, resume, claim)),
    (running, (reclaim, retry, cancel)),
    (over, (rerun, end, fold)),
    (over, (rerun, rerun, end)),
    (over, (rerun, cancel, end)),
    (some_failed, (rerun, complete, claim)),
    (one_at_a_time, (complete, pause, claim)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "moves"), TRIPLES, ids=_id)
def test_three_moves_in_any_order_and_the_batch_still_ends(
    database_18: str, setting: Setting, moves: tuple[Move, Move, Move]
) -> None:
    async def body(stage: Stage) -> None:
        for order in orders(3):
            scene, play = await stage.perform(setting, moves, order)
            cancelled = setting is cancelling or any(
                answer for move, answer in zip(moves, play.answers, strict=True) if move is cancel
            )
            state = await stage.work_off(scene)
            counts = (await read_status(stage.db, scene.batch)).counts
            assert state is (BatchState.CANCELLED if cancelled and counts.cancelled else BatchState.COMPLETED)

    on_stage(database_18, 3, body)


class TestCancelAgainstTheEnd:
    """Completion wins if every input has its outcome by then; otherwise the batch is cancelled."""

    async def ends_as(self, stage: Stage, scene: Scene) -> BatchState:
        await finish_batch(stage.db, scene.batch)
        state = await stage.check(scene)
        before = await read_status(stage.db, scene.batch)
        assert not await cancel_batch(stage.db, scene.batch)
        assert not await finish_batch(stage.db, scene.batch)
        assert await read_status(stage.db, scene.batch) == before
        return state

    def test_in_every_order_of_cancel_completion_and_finish(self, database: str) -> None:
        async def body(stage: Stage) -> None:
            for order in orders(3):
                scene, _ = await stage.perform(last_item, (complete, cancel, end), order)
                assert await self.ends_as(stage, scene) is BatchState.COMPLETED
            for order in orders(2):
                scene, _ = await stage.perform(last_item, (give_back, cancel), order)
                assert await self.ends_as(stage, scene) is BatchState.CANCELLED
                scene, _ = await stage.perform(running, (complete, cancel), order)
                assert await self.ends_as(stage, scene) is BatchState.CANCELLED
                assert (await read_status(stage.db, scene.batch)).counts.completed == 2

        on_stage(database, 3, body)

    def test_truly_at_once(self, database: str) -> None:
        async def body(stage: Stage) -> None:
            for number in range(40):
                whole = number % 2 == 1
                scene = await stage.scene(last_item if whole else running)
                await asyncio.gather(*(stage.freely(mover, scene) for mover in ([complete, finish], [cancel, finish])))
                assert await self.ends_as(stage, scene) is (BatchState.COMPLETED if whole else BatchState.CANCELLED)

        on_stage(database, 2, body)


@dataclass
class Sessions:
    """Some workers over lanes of width 1, and what they did, in the order in which it happened."""

    conninfo: str
    kept: UUID
    cancelled: UUID
    dice: random.Random
    events: list[tuple[int, str, int, int]] = field(default_factory=list)
    """(moment, 'dispatch' | 'end', lane, ordinal); an end is that of an accepted attempt."""
    moments: Iterator[int] = field(default_factory=count)
    deck: list[str] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)

    async def work(self) -> None:
        """One worker: claim, call, settle, until both batches have ended."""
        async with connected(self.conninfo) as connection:
            worker = await self._register(connection)
            while not await self._ended(connection):
                leases = await claim_due(connection, pool="test", wants=self._wants(), worker_id=worker)
                for lease in leases:
                    self._dispatch(lease)
                alive = True
                for lease in leases:
                    alive = await self._end(connection, worker, lease, alive)
                if not alive:
                    worker = await self._register(connection)
                if len(self.events) > 60 and await cancel_batch(connection, self.cancelled):
                    self.seen["cancelled"] += 1

    async def _register(self, connection: Connection) -> UUID:
        worker = uuid4()
        await liveness.register(connection, worker, "test")
        return worker

    def _wants(self) -> dict[str, int]:
        return {f"model-{number}": self.dice.randint(1, 3) for number in self.dice.sample(range(10), 3)}

    async def _ended(self, connection: Connection) -> bool:
        for batch in (self.kept, self.cancelled):
            await finish_batch(connection, batch)
        states = [(await read_status(connection, batch)).state for batch in (self.kept, self.cancelled)]
        return all(state.terminal for state in states)

    def _dispatch(self, lease: Lease) -> None:
        ((ordinal, stop),) = lease.ranges
        assert stop == ordinal + 1, "one at a time"
        self.events.append((next(self.moments), "dispatch", lease.lane_id, ordinal))

    def _fate(self) -> str:
        """From a deck, so that no run goes without any of them."""
        if not self.deck:
            self.deck = ["completed"] * 14 + ["retried"] * 2 + ["given back"] * 2 + ["lost"] * 2
            self.dice.shuffle(self.deck)
        fate = self.deck.pop()
        self.seen[fate] += 1
        return fate

    async def _end(self, connection: Connection, worker: UUID, lease: Lease, alive: bool) -> bool:
        """One call is over; whether the worker still lives then."""
        fate = self._fate()
        if fate == "lost":
            # Everything it held may be somebody else's at once. Its answers come all the same.
            await liveness.reclaim(connection, uuid4(), LIMITS, stuck_s=1e6, gone=[worker])
            alive, fate = False, self.dice.choice(["completed", "retried", "given back"])
        settled = await self._settle(connection, worker, lease, fate)
        assert (settled.fenced == 0) == alive
        return alive

    async def _settle(self, connection: Connection, worker: UUID, lease: Lease, fate: str) -> Settled:
        ordinal = lease.ranges[0][0]
        changes = Changes()
        if fate == "completed":
            changes.outcomes.append((lease, ordinal, ordinal + 1, "c", DONE))
        elif fate == "retried":
            changes.agains.append((lease, ordinal, Again("code", "message", 0.0, True)))
        else:
            changes.give_back(lease, lease.ranges)
        ended = next(self.moments)
        settled = await settle(connection, worker, changes)
        if settled.outcomes:
            self.events.append((ended, "end", lease.lane_id, ordinal))
        return settled

    def check(self) -> None:
        ended: dict[int, int] = {}
        for _, what, lane, ordinal in sorted(self.events):
            if what == "end":
                assert ordinal == ended.get(lane, 0), "an earlier item had no outcome yet, or this one had one"
                ended[lane] = ordinal + 1
            else:
                assert ordinal == ended.get(lane, 0), "called before the one ahead of it had ended, or again after"


@pytest.mark.slow
@pytest.mark.parametrize("seed", some(range(6), 3))
def test_lanes_of_width_one_stay_in_order(database_18: str, seed: int) -> None:
    """Whatever becomes of the calls: retries, give-backs, lost workers and their late answers, a cancel."""

    async def run() -> None:
        async with connected(database_18) as connection:
            kept, cancelled = [await make_batch(connection, [4] * 10, width=1) for _ in range(2)]
            # Two leases on one lane, at any moment, would fail the claim.
            await connection.execute("CREATE UNIQUE INDEX one_lease_a_lane ON penstock.leases (lane_id)")
            sessions = Sessions(database_18, kept, cancelled, random.Random(seed))
            async with asyncio.timeout(60), asyncio.TaskGroup() as group:
                for _ in range(2 + seed % 3):
                    group.create_task(sessions.work())
            sessions.check()
            status = await read_status(connection, kept)
            assert (status.state, status.counts.completed) == (BatchState.COMPLETED, 40)
            other = await read_status(connection, cancelled)
            assert other.counts.completed + other.counts.cancelled == 40
            ends = sum(what == "end" for _, what, _, _ in sessions.events)
            assert ends == 40 + other.counts.completed
            assert all(sessions.seen[fate] for fate in ("completed", "retried", "given back", "lost", "cancelled"))

    asyncio.run(run())

"""What a chaos run does and when, from its seed alone.

The schedule deals kinds of faults; a kind that has variants takes them in turn. What would cut a stall short waits
until the stall is over, because a stall that is not left alone takes no lease away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from enum import StrEnum
from hashlib import blake2b

from tests.support.schedule import Event, Fault, Rhythm, make_schedule


class Act(StrEnum):
    """Named in the history as they are here."""

    KILL_WORKER = "kill_worker"
    FREEZE_WORKER = "freeze_worker"
    STALL_SETTLE = "stall_settle"
    CUT_DATABASE = "cut_database"
    CUT_CLAIM = "cut_claim"
    SWALLOW_SETTLE = "swallow_settle"
    CRASH_DATABASE = "crash_database"
    CUT_UPSTREAM = "cut_upstream"
    HEAL = "heal"
    # What only happens to servers and their callers.
    KILL_REPLICA = "kill_replica"
    KILL_SERVER = "kill_server"
    FREEZE_REPLICA = "freeze_replica"
    SWALLOW_ACCEPT = "swallow_accept"
    CUT_CALLERS = "cut_callers"


@dataclass(frozen=True, slots=True)
class Script:
    """What kinds of faults there are, and what each means."""

    deck: Sequence[Fault]
    """Dealt all before any comes again."""
    variants: Mapping[Fault, tuple[Act, ...]]
    spoils_stalls: frozenset[Act]

    @property
    def acts(self) -> tuple[Act, ...]:
        return tuple(act for act in Act if any(act in variants for variants in self.variants.values()))


_VARIANTS: dict[Fault, tuple[Act, ...]] = {
    Fault.KILL_WORKER: (Act.KILL_WORKER,),
    Fault.FREEZE_WORKER: (Act.STALL_SETTLE, Act.FREEZE_WORKER),
    Fault.CUT_DATABASE: (Act.CUT_DATABASE, Act.CUT_CLAIM),
    Fault.SWALLOW_SETTLE: (Act.SWALLOW_SETTLE,),
    Fault.CRASH_DATABASE: (Act.CRASH_DATABASE,),
    Fault.CUT_UPSTREAM: (Act.CUT_UPSTREAM,),
    Fault.HEAL: (Act.HEAL,),
}
# PostgreSQL needs a second or two to come back, in which nothing else can go wrong: it crashes less often.
_DECK = (
    *(Fault.KILL_WORKER, Fault.FREEZE_WORKER, Fault.CUT_DATABASE, Fault.SWALLOW_SETTLE) * 2,
    Fault.CUT_UPSTREAM,
    Fault.CRASH_DATABASE,
)
_SPOILS_STALLS = frozenset({Act.KILL_WORKER, Act.FREEZE_WORKER, Act.CUT_DATABASE, Act.CRASH_DATABASE})
BATCHES = Script(_DECK, _VARIANTS, _SPOILS_STALLS)
"""Workers over files."""
SESSIONS = Script(
    deck=(
        *(Fault.KILL_WORKER, Fault.FREEZE_WORKER, Fault.CUT_DATABASE, Fault.SWALLOW_SETTLE) * 2,
        *(Fault.KILL_WORKER, Fault.CUT_UPSTREAM, Fault.CUT_UPSTREAM, Fault.CRASH_DATABASE),
    ),
    variants={
        Fault.KILL_WORKER: (Act.KILL_REPLICA, Act.KILL_WORKER, Act.KILL_SERVER),
        Fault.FREEZE_WORKER: (Act.FREEZE_REPLICA, Act.STALL_SETTLE),
        Fault.CUT_DATABASE: (Act.CUT_DATABASE, Act.CUT_CLAIM),
        Fault.SWALLOW_SETTLE: (Act.SWALLOW_ACCEPT, Act.SWALLOW_SETTLE),
        Fault.CUT_UPSTREAM: (Act.CUT_CALLERS, Act.CUT_UPSTREAM),
        Fault.CRASH_DATABASE: (Act.CRASH_DATABASE,),
        Fault.HEAL: (Act.HEAL,),
    },
    spoils_stalls=_SPOILS_STALLS | {Act.KILL_REPLICA, Act.KILL_SERVER, Act.FREEZE_REPLICA},
)
"""Servers with their workers, and callers who wait."""
_APART_MS = 300


@dataclass(frozen=True, slots=True)
class Action:
    at_ms: int
    act: Act
    worker: int
    for_ms: int


@dataclass(frozen=True, slots=True)
class Plan:
    seed: int
    seconds: int
    actions: Sequence[Action]

    @property
    def digest(self) -> str:
        """Equal for equal plans."""
        rows = [f"{at} {act} {worker} {lasts}" for at, act, worker, lasts in map(astuple, self.actions)]
        return blake2b("\n".join(rows).encode(), digest_size=8).hexdigest()

    @property
    def last_heal_s(self) -> float:
        return max(action.at_ms for action in self.actions if action.act is Act.HEAL) / 1_000


def make_plan(seed: int, seconds: int, workers: int, rhythm: Rhythm, script: Script = BATCHES) -> Plan:
    schedule = make_schedule(seed, seconds, workers, script.deck, rhythm)
    return Plan(seed, seconds, _undisturbed(_acts(schedule, script), script))


def _acts(schedule: Iterable[Event], script: Script) -> list[Action]:
    turns: Counter[Fault] = Counter()
    actions: list[Action] = []
    for event in schedule:
        variants = script.variants[event.fault]
        act = variants[turns[event.fault] % len(variants)]
        turns[event.fault] += 1
        actions.append(Action(event.at_ms, act, event.worker or 0, event.for_ms))
    return actions


def _undisturbed(actions: Sequence[Action], script: Script) -> list[Action]:
    """The same, with what spoils a stall moved behind it, one after the other, but not past the end of its storm."""
    heals = [action.at_ms for action in actions if action.act is Act.HEAL]
    free_at = 0
    moved: list[Action] = []
    for action in actions:
        at = action.at_ms
        if action.act in script.spoils_stalls and at < free_at:
            at = min(free_at, next(heal for heal in heals if heal >= at))
            free_at += _APART_MS
        elif action.act is Act.STALL_SETTLE:
            free_at = max(free_at, at + action.for_ms)
        moved.append(replace(action, at_ms=at))
    # At equal times a heal comes last.
    return sorted(moved, key=lambda action: (action.at_ms, action.act is Act.HEAL))

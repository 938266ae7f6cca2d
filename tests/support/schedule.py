"""Schedules of faults: when what happens to whom, from a seed alone.

Storms and calms take turns. A storm deals faults; at its end everything is healed, and in the calm that follows work
must get done. The same seed gives the same schedule on every machine and version of Python.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from time import monotonic


class Fault(StrEnum):
    KILL_WORKER = "kill_worker"
    FREEZE_WORKER = "freeze_worker"
    """Stopped for a while, then continued."""
    CUT_DATABASE = "cut_database"
    """All connections to PostgreSQL."""
    SWALLOW_SETTLE = "swallow_settle"
    """The answer to the next settle."""
    CRASH_DATABASE = "crash_database"
    """PostgreSQL itself, without a checkpoint."""
    CUT_UPSTREAM = "cut_upstream"
    HEAL = "heal"
    """Ends a storm; never one of the faults asked for."""


@dataclass(frozen=True, slots=True)
class Event:
    at_ms: int
    """Since the start of the schedule."""
    fault: Fault
    worker: int | None = None
    for_ms: int = 0
    """How long it lasts, if it ends by itself."""


@dataclass(frozen=True, slots=True)
class Rhythm:
    """Lengths and distances, all bounds inclusive."""

    storm_ms: int = 20_000
    calm_ms: int = 15_000
    gap_min_ms: int = 300
    gap_max_ms: int = 2_000
    freeze_min_ms: int = 500
    freeze_max_ms: int = 8_000


class _Dice:
    """Whole numbers from a seed. Of everything in `random`, only `random()` promises the same for ever."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def below(self, bound: int) -> int:
        return int(self._random() * bound)

    def between(self, low: int, high: int) -> int:
        return low + self.below(high - low + 1)

    def shuffled(self, faults: Sequence[Fault]) -> list[Fault]:
        deck = list(faults)
        for at in range(len(deck) - 1, 0, -1):
            other = self.below(at + 1)
            deck[at], deck[other] = deck[other], deck[at]
        return deck


def make_schedule(
    seed: int, seconds: int, workers: int, faults: Sequence[Fault] = tuple(Fault)[:-1], rhythm: Rhythm | None = None
) -> list[Event]:
    """What happens within `seconds`, which end with a calm.

    Faults are dealt like cards, all of them before any comes again; name one twice and it comes twice as often.
    """
    beat = rhythm or Rhythm()
    if Fault.HEAL in faults or not faults:
        raise ValueError("faults are some of Fault, without HEAL")
    if seconds * 1_000 < beat.gap_max_ms + beat.calm_ms:
        raise ValueError(f"{seconds} s have no room for a fault and a calm of {beat.calm_ms} ms")
    dice = _Dice(seed)
    deal = _dealt(dice, faults)
    return [
        event
        for start, end in _storms(seconds * 1_000, beat)
        for event in _storm(dice, deal, start, end, workers, beat)
    ]


def calms(schedule: Iterable[Event], seconds: int) -> list[tuple[int, int]]:
    """The healed windows of a schedule, in ms: from each heal to the next fault, or to the end."""
    windows: list[tuple[int, int]] = []
    healed: int | None = None
    for event in schedule:
        if event.fault is Fault.HEAL:
            healed = event.at_ms
        elif healed is not None:
            windows.append((healed, event.at_ms))
            healed = None
    return windows if healed is None else [*windows, (healed, seconds * 1_000)]


def _storms(total_ms: int, beat: Rhythm) -> Iterator[tuple[int, int]]:
    start = 0
    while start + beat.gap_max_ms + beat.calm_ms <= total_ms:
        end = min(start + beat.storm_ms, total_ms - beat.calm_ms)
        yield start, end
        start = end + beat.calm_ms


def _dealt(dice: _Dice, faults: Sequence[Fault]) -> Iterator[Fault]:
    while True:
        yield from dice.shuffled(faults)


def _storm(dice: _Dice, deal: Iterator[Fault], start: int, end: int, workers: int, beat: Rhythm) -> Iterator[Event]:
    at = start + dice.between(beat.gap_min_ms, beat.gap_max_ms)
    while at < end:
        fault = next(deal)
        if fault is Fault.KILL_WORKER:
            yield Event(at, fault, dice.below(workers))
        elif fault is Fault.FREEZE_WORKER:
            # Nobody may stand still any longer once the storm is over.
            lasts = min(dice.between(beat.freeze_min_ms, beat.freeze_max_ms), end - at)
            yield Event(at, fault, dice.below(workers), lasts)
        else:
            yield Event(at, fault)
        at += dice.between(beat.gap_min_ms, beat.gap_max_ms)
    yield Event(end, Fault.HEAL)


def play(
    schedule: Iterable[Event],
    act: Callable[[Event], None],
    *,
    halt: threading.Event,
    clock: Callable[[], float] = monotonic,
) -> int:
    """Do each event at its time, or at once if that has passed; how many were done before `halt` was set."""
    start = clock()
    done = 0
    for event in schedule:
        if halt.wait(max(0.0, start + event.at_ms / 1_000 - clock())):
            break
        act(event)
        done += 1
    return done

"""Concurrency of one model at one provider: how many calls at a time pay.

The controller climbs while more calls at a time bring more work done per second, and stays where they stop doing so. It
needs no refusals: an upstream that only gets slower is found out by the work that it gets done. Work is counted in
tokens where answers say how many they took, otherwise in calls.

It measures one level after the other. A level's figures count from when the calls begun before it have ended, and until
about two rounds of calls have. By Little's law the work done per second is the calls in flight divided by the time that
a unit of work takes, which varies far less than the number of calls that happen to end in a short time.

- *climbing*: each level has nearly twice the calls of the one before. Where that brings less than half of what it
  should, the knee lies between the two, and is where the time per unit of work says.
- *descending*: where the upper of two levels brings nothing at all, the knee lies below both. Each level has fewer
  calls than the one before, until work is lost.
- *steering*: levels a little above and below the limit take turns. What the upper one brings beyond the lower, compared
  with the calls it has more, moves the limit.

Upstreams are restless: the same calls bring more in one second than in the next. How much the figures scatter is
measured too. The more they do, the longer a level lasts, the farther the levels are apart, and the surer a trend must
be before it moves the limit.

Pure functions: the time is an argument, and what they remember is a value that can be stored.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from penstock.adapt.overload import Overload, judge

CLIMB = 1.8
DESCEND = 1.35
_WORTH_CLIMBING = 0.5
_UNSURE_MAX = 0.3
_NOTHING_GAINED = 0.06
_DITHER = 0.1
# More calls are worth it while 1 % of them brings more than this part of 1 % of work.
_WORTH_HAVING = 0.1
_GAIN_UP = 0.5
_GAIN_DOWN = 1.0
_STEP_MAX = 1.3
# The trend as a filter sees it: how far off it may be at first, and how much it may change from level to level.
_TREND_VARIANCE = 1.0
_TREND_DRIFT = 0.02
# Scatter of the figures of one level, as a part of them: at first, and the weight and bound of each new one.
_NOISE = 0.03
_NOISE_WEIGHT = 0.2
_NOISE_MAX = 0.5
_DITHER_MAX = 0.25
# A level lasts for one or two rounds of calls, and for as many of them as make its figures believable.
_MIN_CALLS = 16
_MIN_LEVEL_S = 0.4
_MAX_LEVEL_S = 6.0
_LEVEL_S_OF_NOISE = 20.0
# A level counts if so much of it was used. Otherwise it says nothing of the limit.
_BUSY_SHARE = 0.6
# Work that comes to so much less, or more, than the calls at a time explain: the upstream has changed.
_CHANGED = 0.2
_FORGOTTEN_S = 600.0
_ONLY_LONGER = "more calls only took longer"


class Totals(msgspec.Struct, frozen=True):
    """Running totals of a model's calls, over all processes that are alive."""

    calls: int = 0
    """Calls that ended with an answer."""
    work: float = 0.0
    """Tokens that they took, or their number."""
    busy_s: float = 0.0
    """Time that they took."""
    flight_s: float = 0.0
    """Calls in flight, summed up over time."""
    limited_s: float = 0.0
    """Slots of the processes that used all of theirs, summed up over time."""
    failed: int = 0
    """Calls that ended with an error of an upstream that has too much to do: 5xx, timeouts."""

    def since(self, before: Totals) -> Totals:
        return Totals(*(getattr(self, name) - getattr(before, name) for name in self.__struct_fields__))

    def plus(self, other: Totals) -> Totals:
        return Totals(*(getattr(self, name) + getattr(other, name) for name in self.__struct_fields__))


class Bounds(msgspec.Struct, frozen=True):
    floor: float = 1.0
    ceiling: float = 1_000.0
    spread_s: float = 1.0
    """Time until every process knows of a new limit."""


Course = Literal["up", "down", "steady"]


class Level(msgspec.Struct, frozen=True):
    """Figures of one level."""

    in_flight: float
    unit_s: float
    """Time that a unit of work takes."""

    @property
    def work_per_s(self) -> float:
        return self.in_flight / self.unit_s


class Concurrency(msgspec.Struct, frozen=True, kw_only=True):
    """Limit of a model's calls in flight, and what the controller remembers."""

    limit: float
    """Centre of the levels; `level` is the limit in force."""
    level: float
    course: Course = "up"
    since_s: float = 0.0
    """When the level began."""
    settled_s: float | None = None
    """When the calls of the level before had ended; None while they have not."""
    carried: float = 0.0
    """Calls that end before the level is settled: those in flight when it began, and those begun at once."""
    before: Totals = Totals()
    """Totals when the level began, or was settled."""
    last: Level | None = None
    """The level before this one."""
    trend: float = 0.5
    """Part of 1 % of work that 1 % of calls brings, and the variance of that estimate."""
    variance: float = _TREND_VARIANCE
    noise: float = _NOISE
    """How much the work done per second scatters at one level: the mean of its relative changes."""
    drops: int = 0
    """Levels after each other that brought much less work than was to be expected."""
    overload: Overload = Overload()


class Pressure(msgspec.Struct, frozen=True):
    """What an upstream says of itself: its own queue, and how full its cache is (`vllm:` metrics)."""

    running: float = 0.0
    waiting: float = 0.0
    cache: float = 0.0

    @property
    def queues(self) -> bool:
        return self.waiting > max(4.0, 0.05 * self.running)


def begin(start: float, now_s: float, totals: Totals, bounds: Bounds) -> Concurrency:
    start = _within(start, bounds)
    return Concurrency(limit=start, level=start, since_s=now_s, carried=start, before=totals)


def adjust(
    state: Concurrency, now_s: float, totals: Totals, bounds: Bounds, pressure: Pressure | None = None
) -> tuple[Concurrency, str | None]:
    """The state at `now_s`, and why the limit moved, if it did."""
    seen = totals.since(state.before)
    if seen.calls < 0 or seen.flight_s < 0:
        return _restart(state, now_s, totals, bounds), None  # a process has left, and its totals with it
    if now_s - state.since_s > _FORGOTTEN_S:
        return _restart(_turn(state, "up"), now_s, totals, bounds), None
    if not bounds.floor <= state.limit <= bounds.ceiling:
        return _move(state, state.limit, now_s, totals, bounds), "the limits set by the operator"
    overload, limit = judge(state.overload, totals.calls + totals.failed, totals.failed, state.limit)
    judged = msgspec.structs.replace(state, overload=overload)
    if limit != state.limit:
        why = f"errors ×{totals.failed - state.overload.failed}"
        why = why if limit < state.limit else "fewer calls brought no fewer errors"
        return _move(_turn(judged, "steady"), limit, now_s, totals, bounds), why
    state = judged
    if state.settled_s is None:
        return _settle(state, now_s, totals, seen, bounds.spread_s), None
    lasted_s = now_s - state.settled_s
    if not _is_measured(state, seen, lasted_s):
        return state, None
    if seen.work <= 0 or seen.busy_s <= 0 or seen.limited_s < _BUSY_SHARE * state.level * lasted_s:
        # Too little to do for the limit to matter, or nothing that says how it did.
        return _restart(msgspec.structs.replace(state, last=None), now_s, totals, bounds), None
    level = Level(seen.flight_s / lasted_s, seen.busy_s / seen.work)
    if pressure is not None and (pressure.queues or pressure.cache > 0.95):
        return _yield_to(state, pressure, now_s, totals, bounds)
    take = {"up": _climb, "down": _descend, "steady": _steer}[state.course]
    return take(state, level, now_s, totals, bounds)


def _settle(state: Concurrency, now_s: float, totals: Totals, seen: Totals, spread_s: float) -> Concurrency:
    """Wait for the end of the calls begun under the level before, and of the first ones under this."""
    if seen.calls + seen.failed < state.carried or now_s - state.since_s < spread_s:
        return state
    return msgspec.structs.replace(state, settled_s=now_s, before=totals)


def _is_measured(state: Concurrency, seen: Totals, lasted_s: float) -> bool:
    rounds = 1.0 if state.course == "up" else 2.0
    least_s = min(max(_MIN_LEVEL_S, _LEVEL_S_OF_NOISE * state.noise), _MAX_LEVEL_S)
    return lasted_s >= least_s and seen.calls >= max(_MIN_CALLS, rounds * state.level)


def _climb(
    state: Concurrency, level: Level, now_s: float, totals: Totals, bounds: Bounds
) -> tuple[Concurrency, str | None]:
    last = state.last
    state = msgspec.structs.replace(state, last=level)
    gained = None if last is None else _elasticity(last, level)
    unsure = 0.0 if last is None else min(_scatter(state, last, level) / 2, _UNSURE_MAX)
    if gained is None or gained >= _WORTH_CLIMBING + unsure:
        if state.limit >= bounds.ceiling:
            return _restart(_turn(state, "steady"), now_s, totals, bounds), None
        why = "trying more" if gained is None else f"{gained:.0%} of what more calls could bring"
        return _move(state, state.limit * CLIMB, now_s, totals, bounds), why
    if last is not None and gained < _NOTHING_GAINED:
        return _move(_turn(state, "down", last), last.in_flight / DESCEND, now_s, totals, bounds), _ONLY_LONGER
    knee = state.limit if last is None else _knee(last, level)
    return _move(_turn(state, "steady"), knee, now_s, totals, bounds), f"{_ONLY_LONGER} ({gained:.0%} gained)"


def _descend(
    state: Concurrency, level: Level, now_s: float, totals: Totals, bounds: Bounds
) -> tuple[Concurrency, str | None]:
    last = state.last
    lost = None if last is None else _elasticity(last, level)
    if last is None or lost is None:
        return _move(_turn(state, "steady", level), state.limit, now_s, totals, bounds), None
    if lost < max(_WORTH_HAVING, _scatter(state, last, level)) and state.limit > bounds.floor:
        # Compared with the same upper level to the end: small losses add up.
        return _move(state, state.limit / DESCEND, now_s, totals, bounds), "fewer calls bring as much"
    return _move(_turn(state, "steady"), _knee(level, last), now_s, totals, bounds), "fewer calls bring less"


def _knee(lower: Level, upper: Level) -> float:
    """Calls at which the work done stops rising: past it that is what the upper level does, and below it a unit takes
    what it takes at the lower level."""
    knee = upper.work_per_s * lower.unit_s
    return min(max(knee, lower.in_flight), upper.in_flight) * (1 + _DITHER / 2)


def _turn(state: Concurrency, course: Course, last: Level | None = None) -> Concurrency:
    return msgspec.structs.replace(state, course=course, last=last, trend=0.5, variance=_TREND_VARIANCE, drops=0)


def _steer(
    state: Concurrency, level: Level, now_s: float, totals: Totals, bounds: Bounds
) -> tuple[Concurrency, str | None]:
    last = state.last
    gained = None if last is None else _elasticity(last, level)
    if last is None or gained is None:
        return _move(msgspec.structs.replace(state, last=level), state.limit, now_s, totals, bounds), None
    change = math.log(level.work_per_s / (last.work_per_s * min(1.0, level.in_flight / last.in_flight)))
    if change < -max(_CHANGED, 3 * state.noise):
        if not state.drops:  # measured once more: it may be chance
            return _restart(msgspec.structs.replace(state, drops=1), now_s, totals, bounds), None
        fewer = max(level.work_per_s * last.unit_s * (1 + _DITHER / 2), state.limit / 2)
        moved = _move(_turn(state, "steady"), min(fewer, state.limit), now_s, totals, bounds)
        return moved, f"{1 - math.exp(change):.0%} less work done"
    state = _learn(state, last, level, gained)
    sure = math.sqrt(state.variance)
    if state.trend - sure > _WORTH_CLIMBING:
        return _move(_turn(state, "up", level), state.limit * CLIMB, now_s, totals, bounds), "all of it was used"
    if state.trend + sure < 2 * _WORTH_HAVING and gained < _NOTHING_GAINED:
        upper = max(last, level, key=lambda each: each.in_flight)
        return _move(_turn(state, "down", upper), state.limit / DESCEND, now_s, totals, bounds), _ONLY_LONGER
    # So much of the trend as cannot be chance.
    worth = state.trend - _WORTH_HAVING
    worth = math.copysign(max(0.0, abs(worth) - sure / 2), worth)
    factor = math.exp((_GAIN_UP if worth > 0 else _GAIN_DOWN) * worth)
    factor = min(max(factor, 1 / _STEP_MAX), _STEP_MAX)
    moved = _move(msgspec.structs.replace(state, last=level), state.limit * factor, now_s, totals, bounds)
    why = f"1 % more calls bring {max(0.0, state.trend):.1f} % more" if abs(factor - 1) > 0.02 else None
    return moved, why


def _learn(state: Concurrency, last: Level, level: Level, gained: float) -> Concurrency:
    """Take what a level gained over the one before into the trend, by as much as its scatter lets it be believed."""
    calls = math.log(level.in_flight / last.in_flight)
    strayed = abs(math.log(level.work_per_s / last.work_per_s) - min(max(state.trend, 0.0), 1.0) * calls)
    noise = state.noise + _NOISE_WEIGHT * (min(strayed, _NOISE_MAX) - state.noise)
    variance = state.variance + _TREND_DRIFT
    believed = variance / (variance + _scatter(state, last, level) ** 2)
    trend = state.trend + believed * (gained - state.trend)
    return msgspec.structs.replace(state, trend=trend, variance=(1 - believed) * variance, noise=noise, drops=0)


def _yield_to(
    state: Concurrency, pressure: Pressure, now_s: float, totals: Totals, bounds: Bounds
) -> tuple[Concurrency, str | None]:
    """Do with what the upstream can take: it says that calls wait in its own queue, or that its cache is full."""
    state = _turn(state, "steady")
    if pressure.cache > 0.95:
        return _move(state, state.limit * 0.8, now_s, totals, bounds), f"its cache is {pressure.cache:.0%} full"
    fewer = max(state.limit - pressure.waiting / 2, state.limit * 0.8)
    return _move(state, fewer, now_s, totals, bounds), f"{pressure.waiting:.0f} calls wait at the upstream"


def _elasticity(last: Level, level: Level) -> float | None:
    """Relative change of work by the relative change of calls; None if there were about as many calls."""
    calls = math.log(max(level.in_flight, 1e-9) / max(last.in_flight, 1e-9))
    if abs(calls) < _DITHER / 2:
        return None
    # Bounded alike on both sides of none: where the figures scatter, their mean must not lean towards more calls.
    return min(max(math.log(level.work_per_s / last.work_per_s) / calls, -1.5), 1.5)


def _scatter(state: Concurrency, last: Level, level: Level) -> float:
    """How far off an elasticity may be by chance."""
    return state.noise / max(abs(math.log(level.in_flight / last.in_flight)), _DITHER / 2)


def _move(state: Concurrency, limit: float, now_s: float, totals: Totals, bounds: Bounds) -> Concurrency:
    """Begin the next level. While steering, it is above the limit if the level before was below, and the reverse."""
    below = state.level < state.limit
    limit = _within(limit, bounds)
    level = limit
    if state.course == "steady":
        # At least one call apart, otherwise small limits would never be left.
        apart = max(limit * min(max(_DITHER, state.noise), _DITHER_MAX), 0.6)
        level = limit + apart if below or limit - apart < bounds.floor else limit - apart
        level = _within(level, bounds)
    carried = max(level, state.level, state.carried if state.settled_s is None else 0.0)
    return msgspec.structs.replace(
        state, limit=limit, level=level, since_s=now_s, settled_s=None, carried=carried, before=totals
    )


def _restart(state: Concurrency, now_s: float, totals: Totals, bounds: Bounds) -> Concurrency:
    """Begin the same level anew."""
    return msgspec.structs.replace(
        state, level=_within(state.level, bounds), since_s=now_s, settled_s=None, carried=state.level, before=totals
    )


def _within(value: float, bounds: Bounds) -> float:
    return min(max(value, bounds.floor, 1.0), max(bounds.ceiling, 1.0))

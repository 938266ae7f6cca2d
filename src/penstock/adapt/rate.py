"""Rate of one model's calls at one provider that limits it: calls a second, paced so that refusals are rare.

Without a refusal and without headers about a limit there is no rate: the concurrency alone bounds the calls. The first
refusal says what was too much: the calls admitted until then, and until the upstream takes calls again, make the first
estimate. Each further refusal corrects it in the same way. In between the rate stands still for a while, and then
rises, slowly at first; where that was too much, it stands still for longer the next time. Headers that state the
allowance spare the trial: then the rate follows them.

Few calls say little: where the first refusal comes after fewer than eight, the rate begins low and is doubled until the
next one.

Pure functions: the time is an argument, and what they remember is a value that can be stored.
"""

from __future__ import annotations

import math

import msgspec

# Part of the estimate that is used.
_CAUTION = 0.97
_STATED = 0.99
"""The same of what headers state."""
# The rate stands still for so many calls and seconds after a refusal, and for fewer after each raise.
_STILL_CALLS = 300
_STILL_S = 15.0
_RAISE_CALLS = 50
_RAISE_S = 5.0
_RAISE = 0.02
_TRUST_MAX = 8.0
_TRUST_MIN = 0.25
_CUT_MAX = 0.5
# Calls by which an estimate is believed. Without them the rate begins at so many a second, and is doubled.
_ENOUGH = 8
_BEGIN = 1.0
_DOUBLE_S = 1.0
_COUNTED_FOR_S = 120.0
_LOOK_BACK_S = 5.0
# Refusals that come together are one event: calls that were under way when the first came back.
_SAME_EVENT_S = 0.5
_LOWEST = 1 / 60
# Rounds come more often than this: in a longer pause nothing was called.
_ROUND_S = 1.0
_FORGOTTEN_S = 3_600.0
_STATED_FOR_S = 60.0


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """Calls a second that are allowed, as far as is known."""

    per_s: float | None = None
    """None while nothing limits them."""
    estimate: float | None = None
    """What refusals say is allowed; None before the first."""
    survived: float = 0.0
    """The rate before it was last raised: nothing was refused."""
    refused_s: float = 0.0
    """When calls were last refused; before that, when the first was made."""
    counted_s: float = 0.0
    """From when on calls are counted for an estimate: the first of some refusals that came after each other."""
    counted: int = 0
    """Calls admitted by then."""
    marked_s: float
    marked: int
    """A later moment, and the calls admitted by then: while nothing was refused, calls are next counted from it."""
    raised_s: float = 0.0
    raised: int = 0
    """Calls admitted when the rate last moved."""
    step: float = _RAISE
    trust: float = _TRUST_MIN
    """How much longer than at first the rate stands still: refusals came only when it was raised."""
    unsure: bool = False
    """Whether the first refusal came after too few calls to tell what is allowed."""
    seen_s: float = 0.0
    """When the state was last looked at."""
    stated: float | None = None
    stated_s: float = 0.0
    """What headers allow, and when they last said so."""


def begin(now_s: float, admitted: int) -> Rate:
    """The state before anything is known."""
    return begin_count(Rate(refused_s=now_s, marked_s=now_s, marked=admitted), now_s, admitted)


def begin_count(state: Rate, now_s: float, admitted: int) -> Rate:
    """The state with calls counted from here on."""
    return msgspec.structs.replace(
        *(state,),
        counted_s=now_s,
        counted=admitted,
        marked_s=now_s,
        marked=admitted,
        raised_s=now_s,
        raised=admitted,
    )


def pass_time(state: Rate, now_s: float) -> Rate:
    """The state at `now_s`. Time in which no process was there to call does not count for an estimate: the calls that
    were not made then would be taken for calls that are not allowed."""
    absent_s = max(0.0, now_s - state.seen_s - _ROUND_S) if state.seen_s else 0.0
    counted_s, marked_s = (min(since_s + absent_s, now_s) for since_s in (state.counted_s, state.marked_s))
    return msgspec.structs.replace(state, seen_s=now_s, counted_s=counted_s, marked_s=marked_s)


def refuse(state: Rate, now_s: float, admitted: int, open_at_s: float) -> tuple[Rate, str | None]:
    """Calls were refused: `admitted` were let in by now, and the upstream takes calls again at `open_at_s`."""
    if state.per_s is not None and now_s - state.refused_s < _SAME_EVENT_S:
        return state, None
    open_at_s = max(open_at_s, now_s)
    calls, passed_s = admitted - state.counted, max(open_at_s - state.counted_s, 1e-3)
    trust, counted_s, counted, unsure = _TRUST_MIN, state.counted_s, state.counted, False
    if state.per_s is None or state.estimate is None:
        estimate, counted_s, counted = calls / passed_s, now_s, admitted
        if calls < _ENOUGH and state.per_s is not None:
            estimate = state.per_s * _CUT_MAX
        elif calls < _ENOUGH:
            estimate, unsure = max(estimate, _BEGIN), True
    elif state.per_s > state.estimate:
        # It was raised too far. The estimate itself has stood the test, and so has the rate before the last raise.
        estimate, trust = max(state.estimate, state.survived), min(2 * state.trust, _TRUST_MAX)
        counted_s, counted = now_s, admitted
    else:
        enough = calls >= _ENOUGH and now_s - state.counted_s < _COUNTED_FOR_S
        estimate = calls / passed_s if enough else state.per_s * _CUT_MAX
        if now_s - state.counted_s >= _COUNTED_FOR_S:
            estimate, counted_s, counted = state.per_s * _CAUTION, now_s, admitted
    limit = state.estimate if state.per_s is not None and state.estimate is not None else estimate
    estimate = max(min(estimate, limit) if trust == _TRUST_MIN else estimate, _LOWEST)
    moved = msgspec.structs.replace(
        *(state,),
        per_s=max(estimate * _CAUTION, _LOWEST),
        estimate=estimate,
        refused_s=now_s,
        counted_s=counted_s,
        counted=counted,
        # The wait itself is not counted as time without a refusal.
        raised_s=open_at_s,
        raised=admitted,
        step=1.0 if unsure else _RAISE,
        trust=trust,
        unsure=unsure,
    )
    return moved, f"refused: about {estimate:.3g} calls/s are allowed"


def state_allowance(state: Rate, now_s: float, per_s: float) -> Rate:
    """Note that headers say so many calls a second are allowed."""
    return msgspec.structs.replace(state, stated=max(per_s * _STATED, _LOWEST), stated_s=now_s)


def adjust(state: Rate, now_s: float, admitted: int, *, used: bool) -> tuple[Rate, str | None]:
    """Keep to what headers allow, and raise the rate if it was used to the full for a while and nothing was refused."""
    if state.estimate is None and now_s - state.marked_s > _LOOK_BACK_S:
        # The first refusal is judged by the calls just before it.
        since = {"counted_s": state.marked_s, "counted": state.marked}
        state = msgspec.structs.replace(state, marked_s=now_s, marked=admitted, **since)
    most = state.stated if now_s - state.stated_s < _STATED_FOR_S else None
    # A limit may count other calls too: what was refused not long ago is believed before what headers say.
    trusted = state.estimate is None or now_s - state.refused_s > _STATED_FOR_S
    if most is not None and (state.per_s is None or most < state.per_s or (trusted and most > state.per_s)):
        moved = msgspec.structs.replace(state, per_s=most, raised_s=now_s, raised=admitted, step=_RAISE)
        changed = state.per_s is None or abs(most - state.per_s) > 0.02 * state.per_s
        return moved, f"its headers allow {most:.3g} calls/s" if changed else None
    if state.per_s is None or (most is not None and state.per_s >= most):
        return state, None
    if now_s - max(state.refused_s, state.raised_s) > _FORGOTTEN_S:
        return begin(now_s, admitted), "no refusal for an hour"
    if not used:
        # A rate that is not used to the full says nothing: the time does not count.
        return msgspec.structs.replace(state, raised_s=max(now_s, state.raised_s), raised=admitted), None
    still = state.step == _RAISE
    calls, seconds = (_STILL_CALLS * state.trust, _STILL_S * state.trust) if still else (_RAISE_CALLS, _RAISE_S)
    if state.unsure:
        calls, seconds = _ENOUGH, _DOUBLE_S
    passed = admitted - state.raised
    if passed < calls or now_s - state.raised_s < seconds:
        return state, None
    moved = msgspec.structs.replace(
        *(state,),
        per_s=min(state.per_s * (1 + state.step), most or math.inf),
        survived=state.per_s,
        step=min(2 * state.step, 1.0),
        raised_s=now_s,
        raised=admitted,
    )
    return moved, f"nothing refused of {passed} calls"

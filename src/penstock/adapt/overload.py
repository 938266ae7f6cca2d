"""Errors of an upstream: whether the load brings them, so that fewer calls at a time would help.

Some upstreams fail a part of all calls whatever the load. Cutting the limit for those would only lose work. So a part
of the calls may always fail. A larger part is taken for overload, and the limit is cut; where several cuts bring no
fewer errors, the load is not their cause: the cuts are taken back, and so many errors count as usual from then on.
Where most calls fail, more of them would bring nothing: then the limit stays low.

Pure functions, like `concurrency`, which uses them.
"""

from __future__ import annotations

import math

import msgspec

# Part of the calls that may fail without a question; and how far that may rise without a trial by cuts.
_USUAL = 0.1
_USUAL_MAX = 0.2
_USUAL_WEIGHT = 0.2
# Calls are judged by so many at a time, or by so many errors where nearly all fail.
_WINDOW = 40
_WINDOW_FAILED = 8
# Errors beyond those that are usual, in standard deviations: fewer may be chance.
_DEVIATIONS = 3.0
_CUT = 0.7
_CUTS = 4
_HOPELESS = 0.5


class Overload(msgspec.Struct, frozen=True):
    """Errors of a model's calls, as far as they were judged. Calls and errors are running totals."""

    usual: float = _USUAL
    """Part of the calls that fails whatever the limit."""
    calls: int = 0
    """Calls that had ended when the window began."""
    failed: int = 0
    """Those of them that had failed."""
    skipped: int = 0
    """Calls ended when those begun before the last cut have; the window begins then."""
    cuts: int = 0
    """Cuts that are on trial."""
    full: float = 0.0
    """The limit before the first of them."""


def judge(state: Overload, calls: int, failed: int, limit: float) -> tuple[Overload, float]:
    """The state and the limit after so many calls have ended, `failed` of them with an error."""
    rebased = msgspec.structs.replace(state, calls=calls, failed=failed)
    seen, errors = calls - state.calls, failed - state.failed
    if seen < 0 or errors < 0:  # a process has left, and its totals with it
        return msgspec.structs.replace(rebased, skipped=0), limit
    if calls < state.skipped:
        return rebased, limit
    if seen < _WINDOW and (errors < _WINDOW_FAILED or errors < _HOPELESS * seen):
        return state, limit
    expected = state.usual * seen
    share = errors / seen
    if errors <= expected + _DEVIATIONS * math.sqrt(expected):
        usual = state.usual + _USUAL_WEIGHT * (share - state.usual)
        usual = min(max(usual, _USUAL), max(state.usual, _USUAL_MAX))
        return Overload(usual, calls, failed), limit
    if state.cuts >= _CUTS and share < _HOPELESS:
        return Overload(share, calls, failed), state.full
    cut = msgspec.structs.replace(
        rebased, cuts=state.cuts + 1, full=state.full if state.cuts else limit, skipped=calls + math.ceil(limit)
    )
    return cut, limit * _CUT

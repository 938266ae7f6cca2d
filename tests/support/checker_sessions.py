"""The checker's rules for sessions: order, one at a time (I5), and callers (I10). `checker.py` has the vocabulary."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from math import inf

from tests.support.facts import NOT_FINAL, Asking, Dispatch, Facts, Line, Result

_LOST_LEASE = ("reclaim", "fence")
# What was given back in the middle of its call: the upstream may not have noticed yet.
_CUT_SHORT = ("given_back", *_LOST_LEASE)
# A call that ran out of time is over when its caller closes the connection. The upstream hears of that through whatever
# is in between, and the next try may come by another way and be there first, by so much.
_NOTICED_S = 0.5

Found = Iterator[tuple[str, str, str]]
"""(kind, key, detail)"""


# -- I5: order


def session_order(facts: Facts, sessions: dict[str, list[tuple[int, Line]]]) -> Found:
    for session, places in sessions.items():
        later = inf
        for at in range(len(places) - 1, -1, -1):
            place, line = places[at]
            if at and places[at - 1][0] == place:
                yield "same place", line.id, f"{places[at - 1][1].id} is also number {place} of {session}"
            if later < inf:
                yield from _overtaken(line, later)
            yield from _two_at_once(line)
            later = min([later, *(call.begun for call in line.dispatches)])
        facts.seen["overlap"] += _overlaps(line for _, line in places)
    yield from _accepted_in_order(facts)
    for unit in facts.units.values():
        if len(unit.places) > 1:
            yield "two places", unit.key, " and ".join(map(str, sorted(unit.places)))


def _overtaken(line: Line, later: float) -> Found:
    """`later` is when the first line behind this one was dispatched."""
    result = line.results[0] if line.results else None
    accepted = _accepted_attempt(line, result)
    unsettled = result is None and not (line.unit and line.unit.excused)
    if unsettled or (accepted is not None and accepted.ended >= later):
        yield "overtaken", line.id, f"a later line was dispatched at {later}"
    others = [call for call in line.dispatches if call is not accepted and call.ended > later]
    lost = _on_record(line, _LOST_LEASE)
    late = sum(call.begun > later for call in others)
    if late > lost:
        yield "late dispatch", line.id, f"{late} began after {later}, {lost} are on record as reclaimed or fenced"
    # A line that failed had a last attempt too, which nothing but the outcome records.
    known = _on_record(line, (*NOT_FINAL, "fence")) + (accepted is None)
    if len(others) > known:
        yield "overlap", line.id, f"{len(others)} were not over at {later}, {known} are on record"


def _two_at_once(line: Line) -> Found:
    """Attempts of one line that went on together: all but one must have been taken from whoever made them."""
    if len(line.dispatches) < 2:
        return
    calls = sorted(line.dispatches, key=_begin)
    lost, retried = _on_record(line, _CUT_SHORT), _on_record(line, ("retry",))
    for at, later in enumerate(calls):
        together = [call for call in calls[:at] if call.ended > later.begun]
        left = sum(call.digest is None and call.ended - later.begun < _NOTICED_S for call in together)
        if len(together) > lost + min(left, retried):
            yield "two at once", line.id, f"{len(together) + 1} attempts together, {lost} are on record as taken back"
            return


def _overlaps(lines: Iterable[Line]) -> int:
    """How many attempts began while another of the session was going on."""
    last, found = -inf, 0
    for call in sorted((call for line in lines for call in line.dispatches), key=_begin):
        found += call.begun < last
        last = max(last, call.ended)
    return found


def _accepted_attempt(line: Line, result: Result | None) -> Dispatch | None:
    if result is None or result.digest is None:
        return None
    return min((call for call in line.dispatches if call.digest == result.digest), key=_end, default=None)


def _begin(call: Dispatch) -> float:
    return call.begun


def _end(call: Dispatch) -> float:
    return call.ended


def _on_record(line: Line, kinds: Iterable[str]) -> int:
    whole = line.unit.records if line.unit else {}
    return sum(line.records.get(kind, 0) + whole.get(kind, 0) for kind in kinds)


def _accepted_in_order(facts: Facts) -> Found:
    """Whoever was told a place before another asked is before it."""
    units = [unit for unit in facts.units.values() if unit.session is not None and unit.accepted < inf]
    highest: defaultdict[str | None, int] = defaultdict(int)
    moments = [(unit.invoked, 0, unit) for unit in units] + [(unit.accepted, 1, unit) for unit in units]
    for _, told, unit in sorted(moments, key=lambda moment: moment[:2]):
        if told:
            highest[unit.session] = max(highest[unit.session], unit.first + len(unit.lines) - 1)
        elif unit.first <= highest[unit.session]:
            yield "out of order", unit.key, f"is number {unit.first}; {highest[unit.session]} was confirmed before"


# -- I10: callers


def callers_answered(facts: Facts) -> Found:
    owners = {
        call.digest: line.id for line in facts.lines.values() for call in line.dispatches if call.digest is not None
    }
    for line in facts.lines.values():
        for asking in line.askings:
            yield from _answered(line, asking, owners)


def _answered(line: Line, asking: Asking, owners: dict[str, str]) -> Found:
    if not asking.verdict:
        yield "unanswered", line.id, f"its caller waits since {asking.begun}"
    elif asking.verdict == "fail":
        yield "turned away", line.id, f"its caller came at {asking.begun}"
    elif asking.verdict == "ok":
        owner = owners.get(asking.digest, line.id) if asking.digest is not None else line.id
        session = line.unit.session if line.unit else None
        if owner != line.id:
            yield "another's answer", line.id, f"its caller got that of {owner}"
        elif asking.session is not None and asking.session != session:
            yield "another's answer", line.id, f"its caller was told of {asking.session}, not of {session}"

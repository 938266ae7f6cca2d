"""The fuse of a run: what trips it, and what takes it out."""

from __future__ import annotations

from penstock.model import Again, Halt, Outcome, OutcomeState, Verdict
from penstock.worker.fuse import NOTHING_SUCCEEDED, Fuse

_FAILED = Outcome(OutcomeState.FAILED, None, 404, None, "not_found", "HTTP 404: nothing is served here")
_OTHER = Outcome(OutcomeState.FAILED, None, 400, None, "bad", "no")
_PASSING = Again("server_error", "HTTP 500", 1.0, True, 500)
_REFUSED = Again("rate_limit", "HTTP 429", 1.0, False, 429)


def trips(*verdicts: Verdict) -> list[int]:
    """Places of the verdicts after which the route is halted."""
    fuse = Fuse(3)
    return [place for place, verdict in enumerate(verdicts, 1) if fuse.note("m", verdict) is not None]


def test_so_many_failures_of_one_kind_trip_it() -> None:
    assert trips(_FAILED, _FAILED, _FAILED) == [3]
    assert trips(_PASSING, _PASSING, _PASSING) == [3]
    assert trips(_FAILED, _OTHER, _FAILED, _OTHER, _FAILED) == [5]
    assert trips(*[_FAILED] * 6) == [3, 6], "a route that was opened again is watched again"


def test_what_was_not_admitted_does_not_count() -> None:
    assert trips(*[_REFUSED] * 9, *[Halt("quota", "no")] * 9) == []


def test_one_result_takes_it_out_for_good() -> None:
    for state in (OutcomeState.COMPLETED, OutcomeState.SKIPPED, OutcomeState.NOT_FOUND):
        assert trips(_FAILED, Outcome(state), *[_FAILED] * 9) == []


def test_routes_are_watched_apart_and_the_reason_is_told() -> None:
    fuse = Fuse(2)
    assert fuse.note("a", _FAILED) is None
    assert fuse.note("b", _FAILED) is None
    halt = fuse.note("a", _FAILED)
    assert halt is not None
    assert halt.error_code == NOTHING_SUCCEEDED
    assert "2 calls failed alike (check --base-url and the model's name): HTTP 404: nothing" in halt.error_message
    assert fuse.note("c", _OTHER) is None
    halt = fuse.note("c", _OTHER)
    assert halt is not None
    assert halt.error_message.endswith("2 calls failed alike: bad: no")

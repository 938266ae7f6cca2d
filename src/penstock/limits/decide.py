"""Decision on a model's limits: the controllers, given what all processes report. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from penstock.adapt import concurrency, rate
from penstock.adapt.concurrency import Bounds, Pressure, Totals
from penstock.limits.store import LimitState, Reported


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What an operator allows: calls at a time, calls and tokens a minute."""

    calls: float
    start: float = 16.0
    per_minute: float | None = None
    tokens_per_minute: float | None = None
    spread_s: float = 1.0

    @property
    def bounds(self) -> Bounds:
        return Bounds(1.0, max(1.0, self.calls), self.spread_s)

    def per_s(self, found: float | None, tokens: float | None) -> float | None:
        """The rate to keep: what was found, within what is allowed."""
        rates = [found, self.per_minute and self.per_minute / 60]
        if self.tokens_per_minute and tokens:
            rates.append(self.tokens_per_minute / 60 / tokens)
        return min((each for each in rates if each is not None), default=None)


def decide(
    state: LimitState | None,
    reports: Sequence[Reported],
    now_s: float,
    ceilings: Ceilings,
    *,
    open_at_s: float,
    pressure: Pressure | None = None,
) -> tuple[LimitState, str | None]:
    """A model's next state, and in words why its limits moved; None if they stand where they were.

    `open_at_s` is when its gate opens, if that is closed."""
    totals = reduce(Totals.plus, (each.report.totals for each in reports), Totals())
    admitted = sum(each.report.admitted for each in reports)
    refused = sum(each.report.refused for each in reports)
    if state is None:
        calls = concurrency.begin(ceilings.start, now_s, totals, ceilings.bounds)
        return LimitState(calls, rate.begin(now_s, 0)), None
    calls, why_calls = concurrency.adjust(state.concurrency, now_s, totals, ceilings.bounds, pressure)
    pace, why_rate = _pace(state, reports, now_s, admitted, refused, open_at_s)
    reasons = []
    if why_calls and abs(calls.limit - state.concurrency.limit) > 0.02 * state.concurrency.limit:
        reasons.append(f"{state.concurrency.limit:.0f} → {calls.limit:.0f}: {why_calls}")
    if why_rate:
        reasons.append(why_rate)
    return LimitState(calls, pace, refused, admitted + refused), "; ".join(reasons) or None


def _pace(
    state: LimitState, reports: Sequence[Reported], now_s: float, admitted: int, refused: int, open_at_s: float
) -> tuple[rate.Rate, str | None]:
    pace = state.rate
    if admitted + refused < state.made:
        # A process has left, and its calls with it. The admitted alone become fewer with each refusal, too.
        pace = rate.begin_count(pace, now_s, admitted)
    pace = rate.pass_time(pace, now_s)
    if refused > state.refused:
        return rate.refuse(pace, now_s, admitted, open_at_s)
    stated = [each.report.stated_per_s for each in reports if each.report.stated_per_s is not None]
    if stated and (pace.per_s is not None or _matters(stated, reports)):
        pace = rate.state_allowance(pace, now_s, min(stated))
    return rate.adjust(pace, now_s, admitted, used=any(each.report.paced for each in reports))


def _matters(stated: Sequence[float], reports: Sequence[Reported]) -> bool:
    """Whether what headers state could be reached: a limit far above what is called is nobody's concern."""
    totals = reduce(Totals.plus, (each.report.totals for each in reports), Totals())
    in_flight = sum(each.wanted for each in reports)
    return not totals.calls or in_flight / max(totals.busy_s / totals.calls, 1e-3) > min(stated) / 2

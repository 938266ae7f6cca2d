"""Behaviour of the mock: the chosen options, and the decision about one call.

Every random decision is a function of the seed, the call's key and its attempt number, never of
the order in which calls arrive: a run can be repeated with any number of workers.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from statistics import NormalDist
from struct import Struct

from penstock.config import MIB
from penstock.errors import UsageError

DURATION_MAX_S = 3_600.0
RESPONSE_MAX_BYTES = 64 * MIB
LOGNORMAL_SIGMA = 0.5
LOGNORMAL_TAIL = 20.0
"""A lognormal latency is cut at this multiple of its median."""

_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0}
_PERIODS_S = {"s": 1.0, "m": 60.0, "h": 3_600.0}
_NUMBER = r"(?:\d+\.?\d*|\.\d+)"
_DURATION = re.compile(rf"({_NUMBER})\s*(us|ms|s|m|)")
_RATE = re.compile(rf"({_NUMBER})\s*(?:/\s*(s|m|h))?")
_SHARE = re.compile(rf"({_NUMBER})\s*(%?)")

_NORMAL = NormalDist()
_DRAWS = Struct("<2Q")
_DRAW = Struct("<Q")


def parse_duration(text: str) -> float:
    """Seconds, from `50ms`, `2s`, `1m` or a bare number of seconds."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"'{text}' is not a duration", hint="Write 50ms, 0.05, 2s or 1m.")
    seconds = float(match[1]) * _UNITS_S[match[2]]
    if seconds > DURATION_MAX_S:
        raise UsageError(f"'{text}' is longer than an hour", hint="A bare number means seconds; write 50ms for 50 ms.")
    return seconds


def parse_share(text: str) -> float:
    """A fraction of 0 to 1, from `0.05` or `5%`."""
    match = _SHARE.fullmatch(text.strip())
    share = float(match[1]) / (100 if match[2] else 1) if match else math.nan
    if not 0 <= share <= 1:
        raise UsageError(f"'{text}' is not a fraction", hint="Write a number from 0 to 1, or a percentage such as 5%.")
    return share


@dataclass(frozen=True, slots=True)
class Latency:
    """Time that a call is worked on: fixed (`low_s == high_s`), uniform, or lognormal around `low_s`."""

    low_s: float = 0.0
    high_s: float = 0.0
    lognormal: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.low_s <= self.high_s <= DURATION_MAX_S:
            raise UsageError(
                f"a latency of {self.low_s:g} s to {self.high_s:g} s is not a range",
                hint="Put the smaller bound first; both lie between 0 and one hour.",
            )

    @classmethod
    def parse(cls, text: str) -> Latency:
        """From `50ms` (fixed), `50ms..200ms` (uniform) or `~50ms` (lognormal, median 50 ms)."""
        text = text.strip()
        if text.startswith("~"):
            median_s = parse_duration(text[1:])
            return cls(median_s, median_s, lognormal=True)
        low, dots, high = text.partition("..")
        low_s = parse_duration(low)
        return cls(low_s, parse_duration(high) if dots else low_s)

    @property
    def random(self) -> bool:
        return self.lognormal or self.low_s != self.high_s

    def at(self, draw: float) -> float:
        """The latency at `draw`, a quantile of 0 to 1."""
        if not self.lognormal:
            return self.low_s + (self.high_s - self.low_s) * draw
        z = _NORMAL.inv_cdf(min(max(draw, 1e-9), 1 - 1e-9))
        return self.low_s * min(math.exp(LOGNORMAL_SIGMA * z), LOGNORMAL_TAIL)


@dataclass(frozen=True, slots=True)
class RateLimit:
    """Rate limit of `calls` per `period_s`; the bucket holds one period's allowance and starts full."""

    calls: float
    period_s: float = 1.0

    def __post_init__(self) -> None:
        if not (0 < self.calls < math.inf and 0 < self.period_s < math.inf):
            raise UsageError("a rate limit must be more than nothing", hint="Write 100/s, 600/m or 100 (per second).")

    @classmethod
    def parse(cls, text: str) -> RateLimit:
        match = _RATE.fullmatch(text.strip())
        if match is None:
            raise UsageError(f"'{text}' is not a rate", hint="Write 100/s, 600/m, 5000/h or 100 (per second).")
        return cls(float(match[1]), _PERIODS_S[match[2] or "s"])


class Fate(Enum):
    """Fate of an admitted call."""

    ANSWER = "answer"
    ERROR = "error"
    DROP = "drop"
    HANG = "hang"


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Options of the mock. The default answers at once and never fails."""

    latency: Latency = field(default_factory=Latency)
    capacity: int | None = None
    queue_limit: int | None = None
    error_rate: float = 0.0
    drop_rate: float = 0.0
    hang_rate: float = 0.0
    slow_rate: float = 0.0
    slow_latency: Latency = field(default_factory=lambda: Latency(5.0, 5.0))
    reject_rate: float = 0.0
    rate_limit: RateLimit | None = None
    quota: int | None = None
    require_key: str | None = None
    response_bytes: int = 0
    seed: int = 0
    track: bool = True

    def __post_init__(self) -> None:
        for name in ("error_rate", "drop_rate", "hang_rate", "slow_rate", "reject_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name} {getattr(self, name)} is not a fraction", hint="It takes 0 to 1.")
        # The fates share one draw, so that each rate is a share of all calls and not of the rest.
        if self.error_rate + self.drop_rate + self.hang_rate + self.slow_rate > 1 + 1e-9:
            raise UsageError("error_rate, drop_rate, hang_rate and slow_rate add up to more than 1")
        _at_least("capacity", self.capacity, 1)
        _at_least("queue_limit", self.queue_limit, 0)
        _at_least("quota", self.quota, 0)
        if self.queue_limit is not None and self.capacity is None:
            raise UsageError("queue_limit has no effect without a capacity", hint="Set a capacity too.")
        if not 0 <= self.response_bytes <= RESPONSE_MAX_BYTES:
            raise UsageError(f"response_bytes {self.response_bytes} is out of range (0 to {RESPONSE_MAX_BYTES})")
        if not 0 <= self.seed < 1 << 64:
            raise UsageError(f"seed {self.seed} is out of range (0 to 2^64 - 1)")

    @property
    def random(self) -> bool:
        """Whether calls differ at all: if not, nothing need be drawn."""
        faults = self.error_rate or self.drop_rate or self.hang_rate or self.slow_rate
        return bool(faults) or self.latency.random

    def rejects(self, key: str) -> bool:
        """Whether the mock answers the input behind `key` with 400, every time."""
        if not self.reject_rate:
            return False
        (draw,) = _DRAW.unpack(self._digest(key.encode(), b"reject", _DRAW.size))
        return bool(draw < self.reject_rate * 2.0**64)

    def decide(self, key: str, attempt: int) -> tuple[Fate, float]:
        """The fate of the `attempt`-th admitted call of `key`, and the seconds it is worked on."""
        if not self.random:
            return Fate.ANSWER, self.latency.low_s
        fault, pace = _DRAWS.unpack(self._digest(b"%d\0%s" % (attempt, key.encode()), b"call", _DRAWS.size))
        quantile = pace / 2.0**64
        delay_s = self.latency.at(quantile)
        draw = fault / 2.0**64
        for rate, fate in (
            (self.error_rate, Fate.ERROR),
            (self.drop_rate, Fate.DROP),
            (self.hang_rate, Fate.HANG),
        ):
            if draw < rate:
                return fate, delay_s
            draw -= rate
        if draw < self.slow_rate:
            delay_s = self.slow_latency.at(quantile)
        return Fate.ANSWER, delay_s

    def _digest(self, data: bytes, purpose: bytes, size: int) -> bytes:
        return blake2b(data, digest_size=size, key=self.seed.to_bytes(8, "little"), person=purpose).digest()


def _at_least(name: str, value: int | None, low: int) -> None:
    if value is not None and value < low:
        raise UsageError(f"{name} {value} is out of range", hint=f"It takes {low} or more.")

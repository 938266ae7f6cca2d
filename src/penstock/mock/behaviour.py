"""Behaviour of the mock: the chosen options, how they change, and the decision about one call.

Every random decision is a function of the seed, the call's key and its attempt number, never of
the order in which calls arrive: a run can be repeated with any number of workers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from hashlib import blake2b
from statistics import NormalDist
from struct import Struct
from typing import Any

from penstock.config import MIB
from penstock.errors import UsageError

DURATION_MAX_S = 3_600.0
RESPONSE_MAX_BYTES = 64 * MIB
TOKENS_MAX = 1_000_000
SLOWDOWN_MAX = 1_000.0
LOGNORMAL_SIGMA = 0.5
LOGNORMAL_TAIL = 20.0
"""A lognormal latency is cut at this multiple of its median."""

_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0}
_PERIODS_S = {"s": 1.0, "m": 60.0, "h": 3_600.0}
_NUMBER = r"(?:\d+\.?\d*|\.\d+)"
_DURATION = re.compile(rf"({_NUMBER})\s*(us|ms|s|m|)")
_RATE = re.compile(rf"({_NUMBER})\s*(?:/\s*(s|m|h))?")
_SHARE = re.compile(rf"({_NUMBER})\s*(%?)")
_COUNT = re.compile(r"\d{1,18}")

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


def parse_count(text: str) -> int:
    if _COUNT.fullmatch(text.strip()) is None:
        raise UsageError(f"'{text}' is not a whole number", hint="Write digits only, such as 150.")
    return int(text)


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
class Tokens:
    """Output tokens of an answer: uniform from `low` to `high`, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high <= TOKENS_MAX:
            raise UsageError(
                f"{self.low} to {self.high} tokens are not a range",
                hint=f"Put the smaller bound first; both lie between 1 and {TOKENS_MAX}.",
            )

    @classmethod
    def parse(cls, text: str) -> Tokens:
        """From `100` (every answer) or `20..200`."""
        low, dots, high = text.partition("..")
        return cls(parse_count(low), parse_count(high if dots else low))


@dataclass(frozen=True, slots=True)
class RateLimit:
    """Rate limit of `amount` calls, or tokens, per `period_s`."""

    amount: float
    period_s: float = 1.0

    def __post_init__(self) -> None:
        if not (0 < self.amount < math.inf and 0 < self.period_s < math.inf):
            raise UsageError("a rate limit must be more than nothing", hint="Write 100/s, 600/m or 100 (per second).")

    @classmethod
    def parse(cls, text: str) -> RateLimit:
        match = _RATE.fullmatch(text.strip())
        if match is None:
            raise UsageError(f"'{text}' is not a rate", hint="Write 100/s, 600/m, 5000/h or 100 (per second).")
        return cls(float(match[1]), _PERIODS_S[match[2] or "s"])


class LimitHeaders(StrEnum):
    """Headers by which the mock tells of its rate limits."""

    FULL = "full"
    """State of each limit with every answer; `retry-after` and `retry-after-ms` with a refusal."""
    RETRY_AFTER = "retry-after"
    """`retry-after` in whole seconds, with a refusal only."""
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Change:
    """Option that gets another value while the mock serves, `at_s` seconds after it started."""

    at_s: float
    name: str
    value: str

    @classmethod
    def parse_all(cls, text: str) -> tuple[Change, ...]:
        """From `30s:capacity=75,60s:capacity=none`."""
        return tuple(map(cls._parse, text.split(",")))

    @classmethod
    def _parse(cls, text: str) -> Change:
        match = re.fullmatch(r"([^:=]*):([^:=]*)=([^:=]*)", text)
        if match is None:
            raise UsageError(f"'{text}' is not a change", hint="Write TIME:NAME=VALUE, such as 30s:capacity=75.")
        return cls(parse_duration(match[1]), match[2].strip(), match[3].strip())


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
    tokens: Tokens | None = None
    """Output tokens; without it, as many as the text has."""
    token_time_s: float = 0.0
    """Time per output token of a call that runs alone."""
    slowdown: float = 1.0
    """Time per output token with every slot taken, as a multiple of `token_time_s`."""
    capacity: int | None = None
    queue_limit: int | None = None
    error_rate: float = 0.0
    drop_rate: float = 0.0
    hang_rate: float = 0.0
    slow_rate: float = 0.0
    slow_latency: Latency = field(default_factory=lambda: Latency(5.0, 5.0))
    reject_rate: float = 0.0
    rate_limit: RateLimit | None = None
    token_limit: RateLimit | None = None
    burst_s: float | None = None
    """The buckets of both limits hold the allowance of this time; of one period if None."""
    limit_headers: LimitHeaders = LimitHeaders.FULL
    retry_after_s: float | None = None
    """Wait that every refusal by a limit announces, and for which nothing is let through after it."""
    quota: int | None = None
    require_key: str | None = None
    response_bytes: int = 0
    seed: int = 0
    track: bool = True
    vllm_metrics: bool = False
    changes: tuple[Change, ...] = ()

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
        self._check_tokens()
        self._check_limits()
        if not 0 <= self.response_bytes <= RESPONSE_MAX_BYTES:
            raise UsageError(f"response_bytes {self.response_bytes} is out of range (0 to {RESPONSE_MAX_BYTES})")
        if not 0 <= self.seed < 1 << 64:
            raise UsageError(f"seed {self.seed} is out of range (0 to 2^64 - 1)")
        behaviour = self
        for change in sorted(self.changes, key=lambda change: change.at_s):
            behaviour = behaviour.with_values({change.name: change.value})

    def _check_tokens(self) -> None:
        if not 0 <= self.token_time_s <= DURATION_MAX_S:
            raise UsageError(f"token_time_s {self.token_time_s} is out of range", hint="It takes 0 to one hour.")
        if self.token_time_s and self.tokens is None:
            raise UsageError("a time per token has no effect without tokens", hint="Say how many: --tokens 20..200.")
        if not 1 <= self.slowdown <= SLOWDOWN_MAX:
            raise UsageError(f"slowdown {self.slowdown} is out of range", hint=f"It takes 1 to {SLOWDOWN_MAX:g}.")
        if self.slowdown > 1 and self.capacity is None:
            raise UsageError("slowdown has no effect without a capacity", hint="Set a capacity too.")

    def _check_limits(self) -> None:
        for name in ("burst_s", "retry_after_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= DURATION_MAX_S:
                raise UsageError(f"{name} {value} is out of range", hint="It takes more than 0, up to one hour.")
        if self.retry_after_s is not None and self.limit_headers is LimitHeaders.NONE:
            raise UsageError("limit headers 'none' announce no wait", hint="Leave out retry-after, or the headers.")

    def with_values(self, values: Mapping[str, str | float | None]) -> Behaviour:
        """The behaviour with other values of some options, under the names and in the forms of the command line.

        None, like the text `none`, takes a limit away.
        """
        chosen: dict[str, Any] = {}
        for name, value in values.items():
            if name not in _CHANGEABLE:
                raise UsageError(f"'{name}' cannot be changed", hint=f"Known are {', '.join(_CHANGEABLE)}.")
            text = "none" if value is None else value if isinstance(value, str) else _plain(value)
            option, parse = _CHANGEABLE[name]
            try:
                chosen[option] = parse(text)
            except UsageError as error:
                raise UsageError(f"{name}: {error.message}", hint=error.hint) from error
        return replace(self, **chosen, changes=())

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

    def tokens_of(self, key: str) -> int | None:
        """Output tokens of the answer to the input behind `key`, the same every time; None if its text decides."""
        tokens = self.tokens
        if tokens is None:
            return None
        draw = int.from_bytes(self._digest(key.encode(), b"tokens", _DRAW.size), "little")
        return tokens.low + draw % (tokens.high - tokens.low + 1)

    def token_time_at(self, running: int) -> float:
        """Seconds per output token with so many calls running: rises from the first slot to the last."""
        if self.capacity is None or self.capacity == 1:
            return self.token_time_s
        load = min(1.0, (running - 1) / (self.capacity - 1))
        return self.token_time_s * (1 + (self.slowdown - 1) * load)

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


def _plain(number: float) -> str:
    """A number as a person would write it: without an exponent."""
    return str(number) if isinstance(number, int) else f"{number:.9f}"


def _or_none(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: None if text == "none" else parse(text)


_CHANGEABLE: dict[str, tuple[str, Callable[[str], Any]]] = {
    "capacity": ("capacity", _or_none(parse_count)),
    "latency": ("latency", Latency.parse),
    "token-time": ("token_time_s", parse_duration),
    "rate-limit": ("rate_limit", _or_none(RateLimit.parse)),
    "token-limit": ("token_limit", _or_none(RateLimit.parse)),
    "quota": ("quota", _or_none(parse_count)),
    "error-rate": ("error_rate", parse_share),
}
"""Options that can be changed while the mock serves: the field of each, and how its text is read."""

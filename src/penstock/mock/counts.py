"""Counts of the mock's calls: totals, over time, how long they took, and how often each key was called."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable
from itertools import accumulate

import msgspec

MAX_KEYS = 2_000_000
MAX_MODELS = 1_000
INTERVAL_MS = 100
MAX_INTERVALS = 3_000
OTHER = "(other)"
DROPPED = "dropped"
HUNG = "hung"

# A key's calls are one integer, a field of bits per outcome, so that a million keys cost little more than
# their names: a key answered once is the small integer 1, which Python keeps only once.
_FIELDS = ("200", "500", DROPPED, HUNG, "400", "429", "503", "401", "402")
_FIELD_BITS = 40
_MASK = (1 << _FIELD_BITS) - 1
_ONE = {name: 1 << (_FIELD_BITS * at) for at, name in enumerate(_FIELDS)}
_ADMITTED = ("200", "500", DROPPED, HUNG)
_ADMITTED_MASK = (1 << (_FIELD_BITS * len(_ADMITTED))) - 1
_REFUSED = ("429", "503", "402")


class KeyCalls(msgspec.Struct, frozen=True):
    """Calls of one key. `seq` is the order in which keys were first seen, from 1."""

    seq: int
    key: str
    calls: int
    statuses: dict[str, int]


class CallPage(msgspec.Struct, frozen=True):
    data: list[KeyCalls]
    last: int
    """Pass it as `after` to get the next page."""
    has_more: bool
    object: str = "list"


class Interval(msgspec.Struct):
    """Calls that came within 100 ms, and how many of them a limit refused (402, 429, 503)."""

    at_ms: int
    """Beginning, since the start or the last reset."""
    calls: int = 0
    refused: int = 0


class Stats(msgspec.Struct, frozen=True):
    """Totals since the start or the last reset."""

    calls: int
    by_status: dict[str, int]
    by_path: dict[str, int]
    by_model: dict[str, int]
    in_flight: int
    waiting: int
    max_in_flight: int
    max_waiting: int
    abandoned: int
    ignored_waits: int
    completion_tokens: int
    latency_p50_ms: float | None
    latency_p95_ms: float | None
    keys: int
    max_calls_per_key: int
    untracked_calls: int
    bytes_in: int
    bytes_out: int
    connections: int
    elapsed_s: float


class Latencies:
    """Histogram of latencies in a fixed number of buckets, 16 for each doubling: a percentile is within 3 %."""

    _PER_DOUBLING = 16
    _LEAST_S = 1e-6
    _BUCKETS = 36 * _PER_DOUBLING

    def __init__(self) -> None:
        self._counts = [0] * self._BUCKETS

    def add(self, latency_s: float) -> None:
        at = int(math.log2(latency_s / self._LEAST_S) * self._PER_DOUBLING) if latency_s > self._LEAST_S else 0
        self._counts[at if at < self._BUCKETS else -1] += 1

    def percentile_ms(self, percent: float) -> float | None:
        """The latency that so many percent of the calls did not exceed; None without calls."""
        below = list(accumulate(self._counts))
        if not below[-1]:
            return None
        at = bisect_left(below, math.ceil(below[-1] * percent / 100))
        return round(1000 * self._LEAST_S * 2 ** ((at + 0.5) / self._PER_DOUBLING), 3)


class Counts:
    """Counts. Totals are counted as answers leave; a key's call is counted when its fate is decided."""

    def __init__(
        self, *, track: bool = True, max_keys: int = MAX_KEYS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._track = track
        self._max_keys = max_keys
        self._packed: dict[str, int] = {}
        self._keys: list[str] = []
        self.by_status: Counter[str] = Counter()
        self.by_path: Counter[str] = Counter()
        self.by_model: Counter[str] = Counter()
        self.calls = self.served = self.abandoned = self.untracked_calls = 0
        self.bytes_in = self.bytes_out = self.connections = 0
        self.max_calls_per_key = self.completion_tokens = 0
        self.latencies = Latencies()
        self._intervals: deque[Interval] = deque(maxlen=MAX_INTERVALS)
        self._clock = clock
        self._started_at = clock()
        self._begin_interval(self._started_at)

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._started_at

    def count_arrival(self, path: str, model: str, now: float) -> None:
        if now >= self._interval_ends_at:
            self._begin_interval(now)
        self._interval.calls += 1
        self.calls += 1
        self.by_path[path] += 1
        self.by_model[model if model in self.by_model or len(self.by_model) < MAX_MODELS else OTHER] += 1

    def _begin_interval(self, now: float) -> None:
        number = int((now - self._started_at) * 1000) // INTERVAL_MS
        self._interval = Interval(number * INTERVAL_MS)
        self._interval_ends_at = self._started_at + (number + 1) * INTERVAL_MS / 1000
        self._intervals.append(self._interval)

    def rate(self) -> list[Interval]:
        """The latest intervals in which calls came."""
        return [interval for interval in self._intervals if interval.calls]

    def next_attempt(self, key: str) -> int:
        """Attempt number of a key's next call, 1 for the first. Calls that are not admitted (401, 429, 503) do not
        count."""
        packed = self._packed.get(key)
        if packed is not None:
            return _total(packed & _ADMITTED_MASK) + 1
        # Without a record the number of arrival is used: still seeded, but no longer independent of the order.
        return 1 if self._track and len(self._packed) < self._max_keys else self.calls

    def count_served(self, arrived_at: float, tokens: int) -> None:
        self.latencies.add(self._clock() - arrived_at)
        self.completion_tokens += tokens

    def count_decision(self, key: str, status: str) -> None:
        """Count the decision about the call that arrived last."""
        if status in _REFUSED:
            self._interval.refused += 1
        packed = self._packed.get(key)
        if packed is None:
            if not self._track or len(self._packed) >= self._max_keys:
                self.untracked_calls += 1
                return
            self._keys.append(key)
            self._packed[key] = _ONE[status]
            self.max_calls_per_key = self.max_calls_per_key or 1
            return
        self._packed[key] = packed = packed + _ONE[status]
        self.max_calls_per_key = max(self.max_calls_per_key, _total(packed))

    @property
    def keys(self) -> int:
        return len(self._keys)

    def page(self, after: int, limit: int) -> CallPage:
        data = [self._record(seq) for seq in range(after + 1, min(after + limit, self.keys) + 1)]
        last = data[-1].seq if data else after
        return CallPage(data, last, has_more=last < self.keys)

    def _record(self, seq: int) -> KeyCalls:
        key = self._keys[seq - 1]
        statuses = _unpack(self._packed[key])
        return KeyCalls(seq, key, sum(statuses.values()), statuses)


def _unpack(packed: int) -> dict[str, int]:
    pairs = ((name, packed >> (_FIELD_BITS * at) & _MASK) for at, name in enumerate(_FIELDS))
    return {name: count for name, count in pairs if count}


def _total(packed: int) -> int:
    total = 0
    while packed:
        total += packed & _MASK
        packed >>= _FIELD_BITS
    return total

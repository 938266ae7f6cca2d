from __future__ import annotations

import math
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.mock.answers import embedding_of, text_for
from penstock.mock.behaviour import (
    Behaviour,
    Change,
    Fate,
    Latency,
    LimitHeaders,
    RateLimit,
    Tokens,
    parse_duration,
    parse_share,
)
from penstock.mock.counts import MAX_INTERVALS, Counts, Latencies
from penstock.mock.limit_headers import go_duration
from penstock.mock.limits import Excess, Gate, RateLimits, TokenBucket
from penstock.mock.wire import Request, RequestReader, WireError, WireLimits


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("50ms", 0.05), ("0.05", 0.05), ("2s", 2), ("1m", 60), (".5s", 0.5), (" 250 us ", 0.00025)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "ms", "-1s", "5x", "nan", "1e3", "2h", "4000", "50ms..60ms"])
def test_bad_durations_say_what_to_write(text: str) -> None:
    with pytest.raises(UsageError) as failure:
        parse_duration(text)
    assert failure.value.hint


@pytest.mark.parametrize(
    ("text", "latency"),
    [
        ("50ms", Latency(0.05, 0.05)),
        ("50ms..200ms", Latency(0.05, 0.2)),
        ("0..1s", Latency(0, 1)),
        ("~50ms", Latency(0.05, 0.05, lognormal=True)),
    ],
)
def test_latencies(text: str, latency: Latency) -> None:
    assert Latency.parse(text) == latency


@pytest.mark.parametrize("text", ["200ms..50ms", "..", "50ms..", "~", "~1s..2s", "1s..2s..3s"])
def test_bad_latencies(text: str) -> None:
    with pytest.raises(UsageError):
        Latency.parse(text)


def test_a_lognormal_latency_has_its_median_and_a_bounded_tail() -> None:
    latency = Latency.parse("~50ms")
    assert latency.at(0.5) == pytest.approx(0.05)
    assert latency.at(0.9) > 1.5 * latency.at(0.5)
    assert latency.at(1.0) <= 1.0
    assert latency.at(0.0) > 0


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("100/s", RateLimit(100, 1)),
        ("600/m", RateLimit(600, 60)),
        ("7", RateLimit(7, 1)),
        ("0.5 / s", RateLimit(0.5, 1)),
        ("10/h", RateLimit(10, 3600)),
    ],
)
def test_rates(text: str, limit: RateLimit) -> None:
    assert RateLimit.parse(text) == limit


@pytest.mark.parametrize("text", ["0", "0/s", "-1/s", "5/d", "x", "5/"])
def test_bad_rates(text: str) -> None:
    with pytest.raises(UsageError):
        RateLimit.parse(text)


def test_tokens() -> None:
    assert Tokens.parse("20..200") == Tokens(20, 200)
    assert Tokens.parse("7") == Tokens(7, 7)
    for text in ("", "0", "..", "5..", "9..8", "1.5", "-1..2", "1..99999999"):
        with pytest.raises(UsageError):
            Tokens.parse(text)


def test_changes() -> None:
    changes = Change.parse_all("30s:capacity=75, 1m:quota=none")
    assert changes == (Change(30, "capacity", "75"), Change(60, "quota", "none"))
    for text in ("", "capacity=75", "30s:capacity", "x:capacity=75", "30s:capacity=75,", "1s:a=b=c"):
        with pytest.raises(UsageError) as failure:
            Change.parse_all(text)
        assert failure.value.hint


def test_options_are_changed_together_or_not_at_all() -> None:
    behaviour = Behaviour(tokens=Tokens(1, 9), quota=5, changes=(Change(1, "quota", "6"),))
    values: dict[str, str | float | None] = {
        "capacity": 75,
        "rate-limit": "600/m",
        "token-limit": 100,
        "error-rate": 1e-5,
        "quota": None,
    }
    changed = behaviour.with_values({**values, "token-time": "2ms", "latency": "1s..2s"})
    assert changed == Behaviour(
        tokens=Tokens(1, 9),
        capacity=75,
        rate_limit=RateLimit(600, 60),
        token_limit=RateLimit(100, 1),
        error_rate=1e-5,
        token_time_s=0.002,
        latency=Latency(1, 2),
    )
    wrongs: list[dict[str, str | float | None]] = [
        {"seed": 1},
        {"error-rate": None},
        {"error-rate": 2},
        {"capacity": -1},
        {"capacity": 1.5},
    ]
    for wrong in wrongs:
        with pytest.raises(UsageError, match=next(iter(wrong))):
            behaviour.with_values({"quota": 1, **wrong})


def test_tokens_are_drawn_from_seed_and_key() -> None:
    keys = [f"key-{number}" for number in range(500)]
    behaviour = Behaviour(tokens=Tokens(3, 7))
    drawn = [behaviour.tokens_of(key) for key in keys]
    assert set(drawn) == {3, 4, 5, 6, 7}
    assert drawn == [behaviour.tokens_of(key) for key in keys]
    assert drawn != [Behaviour(tokens=Tokens(3, 7), seed=1).tokens_of(key) for key in keys]
    assert Behaviour().tokens_of("key") is None


def test_the_time_per_token_rises_with_the_slots_taken() -> None:
    behaviour = Behaviour(tokens=Tokens(1, 1), token_time_s=0.002, slowdown=2, capacity=101)
    times_ms = [1000 * behaviour.token_time_at(running) for running in (1, 51, 101, 150)]
    assert times_ms == pytest.approx([2, 3, 4, 4])
    assert Behaviour(tokens=Tokens(1, 1), token_time_s=0.002).token_time_at(50) == 0.002
    assert behaviour.with_values({"capacity": 1}).token_time_at(1) == 0.002


def test_shares() -> None:
    assert parse_share("5%") == parse_share("0.05") == 0.05
    for text in ("2", "101%", "-0.1", "nan", ""):
        with pytest.raises(UsageError):
            parse_share(text)


@pytest.mark.parametrize(
    "chosen",
    [
        {"error_rate": 1.5},
        {"error_rate": math.nan},
        {"error_rate": 0.6, "drop_rate": 0.5},
        {"capacity": 0},
        {"queue_limit": 1},
        {"capacity": 1, "queue_limit": -1},
        {"response_bytes": -1},
        {"seed": -1},
        {"quota": -1},
        {"token_time_s": 0.001},
        {"tokens": Tokens(1, 1), "token_time_s": -1.0},
        {"slowdown": 2.0},
        {"slowdown": 0.5, "capacity": 1},
        {"burst_s": 0.0},
        {"retry_after_s": math.inf},
        {"retry_after_s": 1.0, "limit_headers": LimitHeaders.NONE},
        {"changes": (Change(0, "capacity", "0"),)},
        {"changes": (Change(0, "seed", "1"),)},
        {"changes": (Change(5, "capacity", "none"),), "capacity": 1, "queue_limit": 1},
    ],
)
def test_impossible_behaviours_are_refused(chosen: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Behaviour(**chosen)


FAULTY = Behaviour(
    latency=Latency(0.01, 0.02),
    error_rate=0.1,
    drop_rate=0.05,
    hang_rate=0.02,
    slow_rate=0.03,
    slow_latency=Latency(1.0, 1.0),
    reject_rate=0.1,
    seed=7,
)


def test_decisions_depend_on_seed_key_and_attempt_only() -> None:
    keys = [f"key-{number}" for number in range(200)]
    first = {key: FAULTY.decide(key, 1) for key in keys}
    assert {key: FAULTY.decide(key, 1) for key in reversed(keys)} == first
    assert {key: FAULTY.decide(key, 2) for key in keys} != first
    other = Behaviour(latency=Latency(0.01, 0.02), error_rate=0.1, seed=8)
    assert {key: other.decide(key, 1) for key in keys} != first


def test_each_fault_has_its_share_of_all_calls() -> None:
    count = 20_000
    decided = [FAULTY.decide(f"key-{number}", 1) for number in range(count)]
    fates = Counter(fate for fate, _ in decided)
    for fate, rate in ((Fate.ERROR, 0.1), (Fate.DROP, 0.05), (Fate.HANG, 0.02)):
        assert_share(fates[fate], count, rate)
    assert_share(sum(delay_s == 1.0 for _, delay_s in decided), count, 0.03)
    assert all(0.01 <= delay_s <= 0.02 or delay_s == 1.0 for _, delay_s in decided)


def test_attempts_of_one_key_fail_independently() -> None:
    count = 20_000
    behaviour = Behaviour(error_rate=0.2)
    both = sum(
        behaviour.decide(f"key-{number}", 1)[0] is behaviour.decide(f"key-{number}", 2)[0] is Fate.ERROR
        for number in range(count)
    )
    assert_share(both, count, 0.04)


def test_rejections_are_a_share_of_inputs_and_stay() -> None:
    count = 20_000
    rejected = [FAULTY.rejects(f"key-{number}") for number in range(count)]
    assert_share(sum(rejected), count, 0.1)
    assert rejected == [FAULTY.rejects(f"key-{number}") for number in range(count)]
    assert Behaviour(reject_rate=1).rejects("any")
    assert not Behaviour().rejects("any")


def assert_share(seen: int, count: int, rate: float) -> None:
    """Within five standard deviations; the seed is fixed, so this passes always or never."""
    assert abs(seen - count * rate) < 5 * math.sqrt(count * rate * (1 - rate))


def test_the_bucket_refills_and_says_how_long_to_wait() -> None:
    now = 100.0
    bucket = TokenBucket(RateLimit(2, 1), None, now)

    def take() -> bool:
        found = bucket.has(1, now)
        if found:
            bucket.take(1)
        return found

    assert [take(), take(), take()] == [True, True, False]
    assert bucket.wait_s(1) == pytest.approx(0.5)
    assert bucket.full_s == pytest.approx(1.0)
    now += 0.5
    assert [take(), take()] == [True, False]
    now += 60
    assert take()
    assert bucket.remaining == 1


def test_a_bucket_holds_its_burst_and_lends_what_it_never_holds() -> None:
    bucket = TokenBucket(RateLimit(600, 60), 2.0, 0.0)
    assert (bucket.size, bucket.has(20, 0.0), bucket.has(50, 0.0)) == (20, True, True)
    bucket.take(50)
    assert (bucket.remaining, bucket.has(1, 3.0), bucket.has(1, 3.1)) == (0, False, True)
    assert bucket.wait_s(50) == pytest.approx(1.9)


def test_a_limit_that_changes_gives_nothing_back() -> None:
    now = 0.0
    limits = RateLimits(Behaviour(rate_limit=RateLimit(10, 1)), lambda: now)
    assert [limits.admit(0) for _ in range(10)] == [None] * 10
    limits.change(Behaviour(rate_limit=RateLimit(100, 1)))
    assert limits.admit(0) == Excess("requests", 0.01)
    now = 0.02
    assert [limits.admit(0) is None for _ in range(3)] == [True, True, False]
    limits.change(Behaviour())
    assert limits.admit(0) is None


def test_a_call_that_exceeds_one_limit_is_charged_to_none() -> None:
    limits = RateLimits(Behaviour(rate_limit=RateLimit(2, 1), token_limit=RateLimit(100, 1)), lambda: 0.0)
    assert limits.admit(60) is None
    assert limits.admit(60) == Excess("tokens", 0.2)
    assert limits.admit(40) is None
    assert limits.admit(1) == Excess("requests", 0.5)


@pytest.mark.parametrize(
    ("headers", "ignored"), [(LimitHeaders.FULL, 1), (LimitHeaders.RETRY_AFTER, 2), (LimitHeaders.NONE, 0)]
)
def test_calls_inside_an_announced_wait_are_counted(headers: LimitHeaders, ignored: int) -> None:
    times = [0.0, 0.0, 0.1, 0.3, 0.6, 1.4]
    behaviour = Behaviour(rate_limit=RateLimit(4, 2), burst_s=0.5, limit_headers=headers)
    limits = RateLimits(behaviour, lambda: times.pop(0))
    assert [limits.admit(0) is None for _ in range(5)] == [True, False, False, True, True]
    assert limits.ignored_waits == ignored


def test_a_wait_that_is_forced_is_also_enforced() -> None:
    now = 0.0
    limits = RateLimits(Behaviour(rate_limit=RateLimit(1, 1), retry_after_s=30), lambda: now)
    assert limits.admit(0) is None
    assert limits.admit(0) == Excess("requests", 30)
    now = 20.0
    assert limits.admit(0) == Excess("requests", 10)
    now = 30.0
    assert limits.admit(0) is None
    assert limits.ignored_waits == 1


class Entrant:
    def __init__(self, begun: list[Entrant]) -> None:
        self._begun = begun

    def begin(self) -> None:
        self._begun.append(self)


def test_the_gate_admits_in_order_and_forgets_who_leaves() -> None:
    gate, begun = Gate(1, 2), list[Entrant]()
    first, second, third, fourth = (Entrant(begun) for _ in range(4))
    for entrant in (first, second, third):
        gate.enter(entrant)
    fullness = [gate.full]
    gate.leave(second)
    fullness.append(gate.full)
    assert (begun, fullness) == ([first], [True, False])
    gate.enter(fourth)
    gate.leave(first)
    gate.leave(third)
    assert begun == [first, third, fourth]
    assert (gate.working, gate.waiting, gate.max_working, gate.max_waiting) == (1, 0, 1, 2)


def test_a_gate_that_grows_admits_and_one_that_shrinks_expels_none() -> None:
    gate, begun = Gate(1, None), list[Entrant]()
    entrants = [Entrant(begun) for _ in range(4)]
    for entrant in entrants:
        gate.enter(entrant)
    gate.resize(3)
    assert (begun, gate.working, gate.waiting) == (entrants[:3], 3, 1)
    gate.resize(1)
    gate.leave(entrants[0])
    gate.leave(entrants[1])
    assert (gate.working, gate.waiting) == (1, 1)
    gate.resize(None)
    assert begun == entrants


def test_a_long_queue_of_short_calls_does_not_recurse() -> None:
    gate = Gate(1, None)

    class Short:
        def begin(self) -> None:
            gate.leave(self)

    blocker = Entrant([])
    gate.enter(blocker)
    for _ in range(20_000):
        gate.enter(Short())
    gate.leave(blocker)
    assert (gate.working, gate.waiting) == (0, 0)


def test_counts_are_paged_in_the_order_keys_came() -> None:
    counts = Counts()
    for key, status in (("b", "500"), ("a", "200"), ("b", "200"), ("c", "429"), ("b", "429")):
        counts.count_decision(key, status)
    page = counts.page(0, 2)
    assert [(record.key, record.calls) for record in page.data] == [("b", 3), ("a", 1)]
    assert page.data[0].statuses == {"200": 1, "500": 1, "429": 1}
    assert (page.last, page.has_more) == (2, True)
    page = counts.page(page.last, 2)
    assert [record.key for record in page.data] == ["c"]
    assert not page.has_more
    assert counts.max_calls_per_key == 3


def test_refused_calls_are_no_attempts() -> None:
    counts = Counts()
    for status in ("429", "503", "401"):
        counts.count_decision("key", status)
    assert counts.next_attempt("key") == 1
    counts.count_decision("key", "dropped")
    assert counts.next_attempt("key") == 2


def test_counting_stops_at_its_bound() -> None:
    counts = Counts(max_keys=2)
    for key in ("a", "b", "c", "a"):
        counts.count_decision(key, "200")
    assert (counts.keys, counts.untracked_calls) == (2, 1)


def test_calls_are_counted_over_time_up_to_a_bound() -> None:
    now = 1_000.0
    counts = Counts(clock=lambda: now)
    for now, status in ((1_000.05, "200"), (1_000.05, "429"), (1_000.12, "503"), (1_009.99, "500")):
        counts.count_arrival("/v1/chat/completions", "m", now)
        counts.count_decision("key", status)
    seen = [(interval.at_ms, interval.calls, interval.refused) for interval in counts.rate()]
    assert seen == [(0, 2, 1), (100, 1, 1), (9_900, 1, 0)]
    for number in range(2 * MAX_INTERVALS):
        counts.count_arrival("/v1/chat/completions", "m", 2_000.0 + number)
    assert len(counts.rate()) == MAX_INTERVALS


@given(st.lists(st.floats(1e-6, 7_200), min_size=1, max_size=50), st.integers(1, 100))
def test_percentiles_are_close(latencies_s: list[float], percent: int) -> None:
    latencies = Latencies()
    assert latencies.percentile_ms(percent) is None
    for latency_s in latencies_s:
        latencies.add(latency_s)
    true_ms = 1000 * sorted(latencies_s)[math.ceil(len(latencies_s) * percent / 100) - 1]
    assert latencies.percentile_ms(percent) == pytest.approx(true_ms, rel=0.03, abs=0.001)


def test_latencies_out_of_range_are_counted_at_its_ends() -> None:
    for latency_s in (0.0, -1.0, 1e9):
        latencies = Latencies()
        latencies.add(latency_s)
        assert latencies.percentile_ms(50) is not None


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0ms"), (0.012, "12ms"), (1, "1s"), (1.5, "1.5s"), (360, "6m0s"), (3_661, "61m1s")]
)
def test_reset_times_are_written_as_go_does(seconds: float, text: str) -> None:
    assert go_duration(seconds) == text


def test_padding_reaches_the_size_asked_for() -> None:
    assert len(text_for("grüße", "digest", 500).encode()) == 500
    assert text_for("hello", "digest", 3) == "echo: hello [digest]"


def test_embeddings_are_unit_vectors_of_their_text() -> None:
    vector = embedding_of(b"text", 64)
    assert math.hypot(*vector) == pytest.approx(1, abs=1e-4)
    assert vector == embedding_of(b"text", 64)
    assert vector != embedding_of(b"other", 64)


REQUEST = b"POST /a?b=c HTTP/1.1\r\nHost: x\r\nX-Two: 1\r\nX-Two: 2\r\nContent-Length: 3\r\n\r\nabc"
CHUNKED = (
    b"POST /chunked HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3;name=value\r\nabc\r\nA\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\n"
)
PLAIN = b"\r\nGET http://host/path?q HTTP/1.0\r\n\r\n"


def read_all(pieces: list[bytes]) -> list[Request]:
    reader, requests = RequestReader(WireLimits()), []
    for piece in pieces:
        reader.feed(piece)
        while (request := reader.next()) is not None:
            requests.append(request)
    assert reader.buffered_bytes == 0
    return requests


@given(st.lists(st.integers(0, len(REQUEST + CHUNKED + PLAIN)), max_size=30))
def test_requests_are_the_same_however_the_bytes_are_cut(cuts: list[int]) -> None:
    stream = REQUEST + CHUNKED + PLAIN
    places = [0, *sorted(cuts), len(stream)]
    first, second, third = read_all([stream[a:b] for a, b in pairwise(places)])
    assert (first.method, first.path, first.query, first.body) == ("POST", "/a", "b=c", b"abc")
    assert first.headers[b"x-two"] == b"1, 2"
    assert (second.path, second.body) == ("/chunked", b"abc0123456789")
    assert (third.path, third.query, third.keep_alive, third.has_body) == ("/path", "q", False, False)


def status_of(data: bytes, limits: WireLimits | None = None) -> int:
    reader = RequestReader(limits or WireLimits(header_max_bytes=256, body_max_bytes=100))
    reader.feed(data)
    with pytest.raises(WireError) as failure:
        reader.next()
    return failure.value.status


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET /\r\n\r\n", 400),
        (b"GET / HTTP/1.1\n\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", 505),
        (b"GET / HTTP/1.1\r\nHost : x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\n folded\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: \x00\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 300, 431),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: +1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 101\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
        (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 1\r\n\r\na", 501),
        (b"POST / HTTP/1.1\r\nHost: x\r\nExpect: cake\r\nContent-Length: 1\r\n\r\n", 417),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n65\r\n" + b"a" * 101, 413),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"x" * 2_000, 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"T: aaaa\r\n" * 100, 431),
    ],
)
def test_malformed_requests_are_named(data: bytes, status: int) -> None:
    assert status_of(data) == status


def test_what_comes_before_a_malformed_request_is_served_first() -> None:
    reader = RequestReader(WireLimits(header_max_bytes=256))
    reader.feed(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 20 + REQUEST + b"GET / HTTP/1.1\r\nA: " + b"a" * 600)
    requests = [reader.next() for _ in range(21)]
    assert [request and request.method for request in requests] == ["GET"] * 20 + ["POST"]
    with pytest.raises(WireError) as failure:
        reader.next()
    assert failure.value.status == 431


@given(st.binary(max_size=600))
def test_noise_is_refused_or_waited_on_but_never_breaks_the_reader(noise: bytes) -> None:
    for start in (b"", b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"):
        reader = RequestReader(WireLimits(header_max_bytes=256, body_max_bytes=100))
        reader.feed(start + noise)
        with suppress(WireError):
            while reader.next() is not None:
                pass

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
from penstock.mock.behaviour import Behaviour, Fate, Latency, RateLimit, parse_duration, parse_share
from penstock.mock.counts import Counts
from penstock.mock.limit_headers import go_duration
from penstock.mock.limits import Gate, TokenBucket
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

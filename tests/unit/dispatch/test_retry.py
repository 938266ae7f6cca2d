"""What each answer and failure means, as tables."""

from __future__ import annotations

import random
from email.utils import formatdate
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import RetryLimits
from penstock.dispatch.http.answer import MAX_MESSAGE_CHARS, Answer, is_json, kept_body
from penstock.dispatch.http.processor import join_url
from penstock.dispatch.retry import (
    Failure,
    Refusals,
    backoff_s,
    judge_answer,
    judge_failure,
    refused_backoff_s,
    route_rest_s,
)
from penstock.model import Again, Halt, Outcome, OutcomeState, Verdict

NOW_S = 1_800_000_000.0
LIMITS = RetryLimits()
KEYS = st.sampled_from(["error", "code", "type", "status", "message", "detail", "details", "retryDelay"])


def judge(
    status: int,
    body: bytes = b"{}",
    headers: dict[str, str] | None = None,
    *,
    attempt: int = 1,
    secrets: tuple[str, ...] = (),
) -> Verdict:
    answer = Answer(status, body, headers or {})
    return judge_answer(answer, attempt, LIMITS, random.Random(1), now_s=NOW_S, secrets=secrets)


def error_body(**error: Any) -> bytes:
    return msgspec.json.encode({"error": error})


def again(verdict: Verdict) -> Again:
    assert isinstance(verdict, Again), verdict
    return verdict


def failed(verdict: Verdict) -> Outcome:
    assert isinstance(verdict, Outcome), verdict
    assert verdict.state is OutcomeState.FAILED
    return verdict


class TestClasses:
    @pytest.mark.parametrize("status", [408, 425, 500, 502, 504, 520, 524])
    def test_charged_until_the_attempts_are_used_up(self, status: int) -> None:
        first = again(judge(status, attempt=LIMITS.max_attempts - 1))
        assert (first.counts, first.error_code, first.status_code) == (True, f"http_{status}", status)
        last = failed(judge(status, b'{"why": 1}', attempt=LIMITS.max_attempts))
        assert (last.status_code, last.body) == (status, b'{"why": 1}')

    @pytest.mark.parametrize("status", [429, 503, 529])
    def test_not_admitted_is_never_charged(self, status: int) -> None:
        for attempt in (1, LIMITS.max_attempts, 10 * LIMITS.max_attempts):
            assert not again(judge(status, attempt=attempt)).counts

    @pytest.mark.parametrize("status", [300, 301, 302, 304, 307, 308, 400, 403, 404, 405, 413, 422, 418, 501, 999])
    def test_permanent(self, status: int) -> None:
        outcome = failed(judge(status, b'{"a": 1}'))
        assert (outcome.status_code, outcome.body, outcome.error_code) == (status, b'{"a": 1}', f"http_{status}")

    @pytest.mark.parametrize("status", [401, 402])
    def test_a_person_is_needed(self, status: int) -> None:
        verdict = judge(status, attempt=99)
        assert isinstance(verdict, Halt)
        assert verdict.status_code == status

    @pytest.mark.parametrize(
        "error",
        [
            {"code": "insufficient_quota"},
            {"type": "insufficient_quota", "code": None},
            {"code": "credit_balance_exhausted"},
            {"code": "organization_spend_limit_exceeded"},
            {"code": "project_spend_limit_exceeded"},
            {"code": "organization_usage_limit_exceeded"},
            {"type": "enforced_spend_limit_reached", "message": "limit"},
            {"code": "rate_limit_exceeded", "type": "insufficient_quota"},
        ],
    )
    def test_quota_halts_instead_of_retrying(self, error: dict[str, Any]) -> None:
        assert isinstance(judge(429, error_body(**error)), Halt)

    @pytest.mark.parametrize("code", ["rate_limit_exceeded", "slow_down"])
    def test_a_rate_limit_does_not(self, code: str) -> None:
        assert again(judge(429, error_body(code=code))).error_code == code

    def test_success(self) -> None:
        verdict = judge_answer(
            Answer(201, b' {"a":1} ', {"x-request-id": "r\n1" + "x" * 500}, 12),
            1,
            LIMITS,
            random.Random(1),
            now_s=NOW_S,
        )
        assert isinstance(verdict, Outcome)
        assert (verdict.state, verdict.body) == (OutcomeState.COMPLETED, b' {"a":1} ')
        assert verdict.request_id is not None
        assert (verdict.request_id[:3], len(verdict.request_id)) == ("r 1", 128)
        assert verdict.duration_ms == 12

    @pytest.mark.parametrize(
        ("code", "counts"),
        [
            ("connect_failed", False),
            ("connect_timeout", False),
            ("proxy_refused", False),
            ("tls_certificate_untrusted", False),
            ("tls_failed", False),
            ("first_byte_timeout", True),
            ("idle_timeout", True),
            ("request_timeout", True),
            ("connection_reset", True),
            ("protocol_error", True),
        ],
    )
    def test_failures_without_an_answer(self, code: str, counts: bool) -> None:
        verdict = again(judge_failure(Failure(code, "m", 5), 1, LIMITS, random.Random(1)))
        assert (verdict.error_code, verdict.counts, verdict.duration_ms) == (code, counts, 5)
        last = judge_failure(Failure(code, "m"), LIMITS.max_attempts, LIMITS, random.Random(1))
        assert isinstance(last, Outcome if counts else Again)

    def test_an_answer_too_large_fails_at_once(self) -> None:
        verdict = failed(judge_failure(Failure("response_too_large", "m", 1, 200), 1, LIMITS, random.Random(1)))
        assert verdict.status_code == 200


class TestRetryAfter:
    @pytest.mark.parametrize(
        ("headers", "gate_s"),
        [
            ({}, 0),
            ({"retry-after": "3"}, 3),
            ({"retry-after": "1.5"}, 1.5),
            ({"retry-after-ms": "250"}, 0.25),
            ({"retry-after-ms": "250", "retry-after": "3"}, 0.25),
            ({"retry-after-ms": "soon", "retry-after": "3"}, 3),
            ({"retry-after": formatdate(NOW_S + 40, usegmt=True)}, 40),
            ({"retry-after": formatdate(NOW_S - 40, usegmt=True)}, 0),
            ({"retry-after": formatdate(NOW_S + 315_360_000, usegmt=True)}, LIMITS.retry_after_max_s),
            ({"retry-after": "315360000"}, LIMITS.retry_after_max_s),
            ({"retry-after": "1e300"}, LIMITS.retry_after_max_s),
            ({"retry-after": "-1"}, 0),
            ({"retry-after": "0"}, 0),
            ({"retry-after": "inf"}, 0),
            ({"retry-after": "nan"}, 0),
            ({"retry-after": ""}, 0),
            ({"retry-after": "tomorrow, perhaps"}, 0),
            ({"retry-after": "Mon, 99 Foo 20000 99:99:99 GMT"}, 0),
            ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "12ms"}, 0.012),
            ({"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "0m6.5s"}, 6.5),
            ({"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "6m0s"}, LIMITS.retry_cap_s),
            ({"x-ratelimit-remaining-tokens": "7", "x-ratelimit-reset-tokens": "6s"}, 0),
            ({"x-ratelimit-reset-tokens": "6s"}, 0),
            ({"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "-1"}, 0),
            ({"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "later"}, 0),
            (
                {
                    "anthropic-ratelimit-requests-remaining": "0",
                    "anthropic-ratelimit-requests-reset": "2027-01-15T08:00:30Z",
                },
                30,
            ),
            (
                {
                    "anthropic-ratelimit-requests-remaining": "0",
                    "anthropic-ratelimit-requests-reset": "2019-01-15T08:00:30Z",
                },
                0,
            ),
        ],
    )
    def test_headers(self, headers: dict[str, str], gate_s: float) -> None:
        verdict = again(judge(429, headers=headers))
        assert verdict.gate_s == pytest.approx(gate_s, abs=1)
        assert verdict.delay_s > verdict.gate_s
        assert verdict.delay_s <= verdict.gate_s + LIMITS.retry_cap_s

    @pytest.mark.parametrize(("delay", "gate_s"), [("13s", 13), ("0.5s", 0.5), ("-3s", 0.1), ("x", 0.1), (7, 0.1)])
    def test_geminis_way(self, delay: object, gate_s: float) -> None:
        details = [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": delay}]
        body = error_body(code=429, status="RESOURCE_EXHAUSTED", message="m", details=details)
        for whole in (body, b"[" + body + b"]"):
            verdict = again(judge(429, whole))
            assert (verdict.gate_s, verdict.error_code) == (gate_s, "RESOURCE_EXHAUSTED")

    def test_is_obeyed_for_server_errors_too(self) -> None:
        verdict = again(judge(500, headers={"retry-after": "9"}))
        assert (verdict.gate_s, verdict.counts) == (9, True)


class TestBackoff:
    def test_doubles_up_to_the_cap_with_full_jitter(self) -> None:
        for attempt, ceiling in ((1, 1), (2, 2), (5, 16), (7, 60), (100, 60), (10_000, 60)):
            drawn = [backoff_s(attempt, LIMITS, random.Random(seed)) for seed in range(300)]
            assert 0 <= min(drawn) < 0.1 * ceiling
            assert 0.9 * ceiling < max(drawn) <= ceiling

    def test_refusals_wait_longer_as_the_episode_lasts(self) -> None:
        for lasting_s, ceiling in ((0, 2), (5, 12), (1000, 60)):
            drawn = [refused_backoff_s(lasting_s, LIMITS, random.Random(seed)) for seed in range(300)]
            assert min(drawn) >= LIMITS.retry_base_s
            assert 0.9 * ceiling < max(drawn) <= ceiling

    def test_a_route_rests_longer_the_longer_it_refuses(self) -> None:
        rests = [route_rest_s(lasting_s, LIMITS) for lasting_s in (0, 0.2, 4, 100, 10_000)]
        assert rests == [LIMITS.refusal_rest_s, LIMITS.refusal_rest_s, 1, 25, LIMITS.retry_cap_s]

    def test_an_episode_ends_when_refusals_stop(self) -> None:
        refusals = Refusals(LIMITS)
        assert refusals.note_refusal("m", 0) == 0
        assert refusals.note_refusal("m", 50) == 50
        assert refusals.note_refusal("other", 50) == 0
        assert refusals.note_refusal("m", 100) == 100
        assert refusals.note_refusal("m", 100 + 2 * LIMITS.retry_cap_s + 1) == 0

    def test_one_admitted_call_ends_a_route_s_episode(self) -> None:
        refusals = Refusals(LIMITS)
        refusals.note_refusal("m", 0.0)
        refusals.note_refusal("other", 0.0)
        assert refusals.note_refusal("m", 30.0) == 30.0
        refusals.end("m")
        assert refusals.note_refusal("m", 31.0) == 0.0
        assert refusals.note_refusal("other", 31.0) == 31.0


class TestMessages:
    @pytest.mark.parametrize(
        ("body", "code", "message"),
        [
            (b"", "http_400", "HTTP 400"),
            (b"{}", "http_400", "HTTP 400: {}"),
            (b'{"error": "no\\tscaling"}', "http_400", "HTTP 400: no scaling"),
            (
                b'{"error": {"message": "bad", "type": "invalid_request_error", "code": null}}',
                None,
                "HTTP 400: bad",
            ),
            (
                b'{"object": "error", "message": "bad", "type": "BadRequestError", "code": 400}',
                None,
                "HTTP 400: bad",
            ),
            (b'{"detail": "bad"}', "http_400", "HTTP 400: bad"),
            (b'{"detail": [{"loc": ["body"]}]}', "http_400", 'HTTP 400: [{"loc":["body"]}]'),
            (b"<html><h1>400</h1>\r\n<p>nginx</html>", "http_400", "HTTP 400: 400 nginx"),
            (b"\xff\xfe bad", "http_400", "HTTP 400: \ufffd\ufffd bad"),
            (b'{"error": {"code": "not a code!", "message": "m"}}', "http_400", "HTTP 400: m"),
            (b'{"error": {"code": ["x"], "message": {"y": 1}}}', "http_400", 'HTTP 400: {"y":1}'),
            (b'"text"', "http_400", "HTTP 400: text"),
            (b"[]", "http_400", "HTTP 400: []"),
        ],
    )
    def test_shapes(self, body: bytes, code: str | None, message: str) -> None:
        outcome = failed(judge(400, body))
        assert outcome.error_message == message
        if code is not None:
            assert outcome.error_code == code

    def test_redirects_say_where_to(self) -> None:
        outcome = failed(judge(302, b"", {"location": "http://169.254.169.254/"}))
        assert outcome.error_message == "HTTP 302: redirect to http://169.254.169.254/: not followed"

    def test_secrets_are_taken_out_before_the_text_is_cut(self) -> None:
        key = "sk-" + "k" * 40
        for padding in range(MAX_MESSAGE_CHARS - 60, MAX_MESSAGE_CHARS):
            outcome = failed(judge(400, error_body(message="x" * padding + key, code=key), secrets=(key,)))
            assert "kkkk" not in f"{outcome.error_message} {outcome.error_code}"

    @given(
        st.integers(100, 999),
        st.binary(max_size=200),
        st.dictionaries(st.sampled_from(["retry-after"]), st.text()),
    )
    def test_nothing_an_upstream_says_can_crash_us(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        verdict = judge(status, body, headers)
        message = verdict.error_message or ""
        assert len(message) <= MAX_MESSAGE_CHARS
        assert message.isprintable()
        if isinstance(verdict, Again):
            assert 0 <= verdict.delay_s <= LIMITS.retry_after_max_s + LIMITS.retry_cap_s

    @given(st.recursive(st.none() | st.booleans() | st.text(), lambda inner: st.dictionaries(KEYS, inner)))
    def test_nor_any_shape_of_error(self, error: object) -> None:
        judge(429, msgspec.json.encode(error))
        judge(400, msgspec.json.encode([error]))


class TestBodies:
    @pytest.mark.parametrize(
        ("body", "valid"),
        [
            (b"{}", True),
            (b" 1 ", True),
            (b'"\xc3\xa9"', True),
            (b'"\\ud83d"', True),
            (b'["\\ud83d", NaN]', False),
            (b"", False),
            (b"nope", False),
            (b"{} {}", False),
            (b'{"a": "\xff"}', False),
            (b'{"\xff": 1}', False),
            (b"\xef\xbb\xbf{}", False),
            (b"[" * 100_000 + b"]" * 100_000, False),
            (b'"\\u12', False),
        ],
    )
    def test_json(self, body: bytes, valid: bool) -> None:
        assert is_json(body) is valid

    def test_what_is_not_json_is_kept_as_a_bounded_string(self) -> None:
        assert kept_body(b"") is None
        assert kept_body(b'{"a":  1}') == b'{"a":  1}'
        assert kept_body(b"<p>\xff") == '"<p>\ufffd"'.encode()
        assert len(kept_body(b"x" * 20_000_000) or b"") < 2_000_000


class TestUrls:
    @pytest.mark.parametrize(
        ("base", "path", "joined"),
        [
            ("http://h/v1", "/v1/chat/completions", "http://h/v1/chat/completions"),
            ("http://h/v1", "/chat/completions", "http://h/v1/chat/completions"),
            ("http://h/v1", "/v1", "http://h/v1"),
            ("http://h/v1", "/v10/x", "http://h/v1/v10/x"),
            ("http://h", "/v1/messages", "http://h/v1/messages"),
            ("http://h/openai/v1", "/v1/embeddings?a=1", "http://h/openai/v1/embeddings?a=1"),
            ("http://h/v1", "http://evil/v1/x", None),
            ("http://h/v1", "//evil/x", None),
            ("http://h/v1", "/v1/../x", None),
            ("http://h/v1", "/v1/%2E%2e/x", None),
            ("http://h/v1", "/..", None),
            ("http://h/v1", "/a\\b", None),
            ("http://h/v1", "/a\r\nb", None),
            ("http://h/v1", "/a#b", None),
            ("http://h/v1", "/v1/a..b/...", "http://h/v1/a..b/..."),
        ],
    )
    def test_join(self, base: str, path: str, joined: str | None) -> None:
        assert join_url(base, path) == joined

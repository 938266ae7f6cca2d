"""Verdicts on the answers to rows, as tables."""

from __future__ import annotations

import json
import random
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import RetryLimits
from penstock.dispatch.http.answer import Answer
from penstock.dispatch.rows.answer_path import MISSING
from penstock.dispatch.rows.definition import parse_definition
from penstock.dispatch.rows.judge import decode_json, judge_row
from penstock.model import Again, Halt, Outcome, OutcomeState, Usage, Verdict
from tests.unit.dispatch.rows.test_definition import CHAT, HTTP, SCHEMA

LIMITS = RetryLimits()
HEADERS = {"x-request-id": "req_1"}


def judge(
    spec: dict[str, Any],
    status: int = 200,
    body: Any = None,
    *,
    raw: bytes | None = None,
    attempt: int = 1,
    limits: RetryLimits = LIMITS,
    secrets: tuple[str, ...] = (),
) -> Verdict:
    answer = Answer(status, json.dumps(body).encode() if raw is None else raw, HEADERS, 7)
    rng = random.Random(1)
    return judge_row(parse_definition(spec), answer, attempt, limits, rng, now_s=0.0, secrets=secrets)


def done(verdict: Verdict) -> Any:
    assert isinstance(verdict, Outcome), verdict
    assert verdict.state is OutcomeState.COMPLETED
    assert (verdict.request_id, verdict.duration_ms, verdict.error_code) == ("req_1", 7, None)
    return json.loads(verdict.body or b"")


def ended(verdict: Verdict) -> tuple[OutcomeState, str | None, str | None]:
    assert isinstance(verdict, Outcome), verdict
    assert (verdict.request_id, verdict.duration_ms, verdict.body) == ("req_1", 7, None)
    return verdict.state, verdict.error_code, verdict.error_message


def again(verdict: Verdict) -> tuple[str, str]:
    assert isinstance(verdict, Again), verdict
    assert verdict.counts
    assert verdict.duration_ms == 7
    return verdict.error_code, verdict.error_message


def completion(content: Any, finish_reason: str = "stop", **message: Any) -> dict[str, Any]:
    choice = {"message": {"role": "assistant", "content": content, **message}, "finish_reason": finish_reason}
    return {"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}


class TestChat:
    TYPED: ClassVar[dict[str, Any]] = {
        **CHAT,
        "schema": {**SCHEMA, "properties": {"category": {"type": "string"}, "score": {"type": "number"}}},
    }

    def test_the_text_is_a_column(self) -> None:
        verdict = judge(CHAT, body=completion("a boot"))
        assert done(verdict) == {"answer": "a boot"}
        assert isinstance(verdict, Outcome)
        assert verdict.usage == Usage(3, 0, 2, 0)
        assert done(judge({**CHAT, "column": "said"}, body=completion("", "length"))) == {"said": ""}

    @pytest.mark.parametrize(
        "content",
        [
            '{"score": 1, "category": "boot", "more": 2}',
            '```json\n{"category": "boot", "score": 1}\n```',
            '\n ```\n{"category": "boot", "score": 1}```\n',
        ],
    )
    def test_the_properties_of_the_schema_are_columns_in_its_order(self, content: str) -> None:
        verdict = judge(self.TYPED, body=completion(content))
        assert list(done(verdict).items()) == [("category", "boot"), ("score", 1)]

    @pytest.mark.timeout(20)
    @pytest.mark.parametrize("content", ["```" + "\n" * 20_000, "```json\n" + " \n" * 20_000 + "``", "```", "``````"])
    def test_a_fence_around_nothing_is_judged_at_once(self, content: str) -> None:
        assert again(judge(self.TYPED, body=completion(content)))[0] == "invalid_answer"

    def test_a_property_that_is_not_there_is_null(self) -> None:
        assert done(judge(self.TYPED, body=completion("{}"))) == {"category": None, "score": None}

    @pytest.mark.parametrize(
        ("body", "code", "message"),
        [
            (completion("boot"), "invalid_answer", "the answer is not JSON"),
            (completion('{"category": "boot"'), "invalid_answer", "the answer is not JSON"),
            (completion("[]"), "invalid_answer", "the answer does not fit the schema: it is not of type object"),
            (
                completion('{"category": 3}'),
                "invalid_answer",
                "the answer does not fit the schema: category is not of type string",
            ),
            (completion(None), "invalid_answer", "the answer has no text"),
            (completion([{"type": "text"}]), "invalid_answer", "the answer is not a chat completion"),
            ({"choices": []}, "invalid_answer", "the answer is not a chat completion"),
            ([], "invalid_answer", "the answer is not a chat completion"),
            (
                completion('{"categ', "length"),
                "truncated",
                "the answer was cut off at its token limit before its JSON was whole",
            ),
        ],
    )
    def test_what_is_tried_again_and_fails_in_the_end(self, body: Any, code: str, message: str) -> None:
        assert again(judge(self.TYPED, body=body)) == (code, message)
        last = judge(self.TYPED, body=body, attempt=LIMITS.max_attempts)
        assert ended(last) == (OutcomeState.FAILED, code, message)

    def test_tokens_of_an_answer_that_does_not_fit_are_counted(self) -> None:
        last = judge(self.TYPED, body=completion("boot"), attempt=LIMITS.max_attempts)
        assert isinstance(last, Outcome)
        assert last.usage == Usage(3, 0, 2, 0)

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            (completion(None, refusal="I cannot."), "the model refused: I cannot."),
            (completion("", "content_filter"), "the provider's content filter stopped the answer"),
        ],
    )
    def test_a_refusal_fails_at_once(self, body: Any, message: str) -> None:
        for spec in (CHAT, self.TYPED):
            assert ended(judge(spec, body=body)) == (OutcomeState.FAILED, "refused", message)

    def test_other_answers_are_judged_as_everywhere(self) -> None:
        error = {"error": {"code": "bad_thing", "message": "no"}}
        assert ended(judge(CHAT, 400, error)) == (OutcomeState.FAILED, "bad_thing", "HTTP 400: no")
        assert ended(judge(CHAT, 404, error)) == (OutcomeState.FAILED, "bad_thing", "HTTP 404: no")
        assert again(judge(CHAT, 500, error)) == ("bad_thing", "HTTP 500: no")
        assert isinstance(judge(CHAT, 401, error), Halt)
        refused = judge(CHAT, 429, error)
        assert isinstance(refused, Again)
        assert not refused.counts
        assert again(judge(CHAT, raw=b"<html>"))[0] == "invalid_response"


class TestHttp:
    @pytest.mark.parametrize("status", [401, 402])
    def test_what_halts_a_provider_fails_a_row_after_its_attempts(self, status: int) -> None:
        error = {"error": {"code": "insufficient_quota", "message": "no"}}
        assert again(judge(HTTP, status, error)) == ("insufficient_quota", f"HTTP {status}: no")
        last = judge(HTTP, status, error, attempt=LIMITS.max_attempts)
        assert ended(last) == (OutcomeState.FAILED, "insufficient_quota", f"HTTP {status}: no")

    SPEC: ClassVar[dict[str, Any]] = {**HTTP, "columns": {"price": "offer.price", "tags": "tags[*].name"}}

    def test_columns_are_found_in_the_answer(self) -> None:
        body = {"offer": {"price": 3}, "tags": [{"name": "x"}, {}], "usage": {"prompt_tokens": 1}}
        verdict = judge(self.SPEC, body=body)
        assert done(verdict) == {"price": 3, "tags": ["x", None]}
        assert isinstance(verdict, Outcome)
        assert verdict.usage == Usage(1, 0, 0, 0)
        assert done(judge(self.SPEC, body={})) == {"price": None, "tags": None}
        assert done(judge(HTTP, body=[1])) == {"answer": [1]}

    @pytest.mark.parametrize("status", [404, 410])
    def test_what_a_get_does_not_find(self, status: int) -> None:
        assert again(judge(HTTP, status, {})) == ("not_found", f"HTTP {status}")
        last = judge(HTTP, status, {}, attempt=LIMITS.max_attempts_not_found)
        assert ended(last) == (OutcomeState.NOT_FOUND, "not_found", f"HTTP {status}")
        posted = judge({**HTTP, "method": "POST"}, status, {"error": "no"})
        assert ended(posted) == (OutcomeState.FAILED, f"http_{status}", f"HTTP {status}: no")

    def test_not_found_is_not_tried_more_often_than_anything_else(self) -> None:
        last = judge(HTTP, 404, {}, limits=RetryLimits(max_attempts=1))
        assert ended(last)[0] is OutcomeState.NOT_FOUND

    @pytest.mark.parametrize(
        ("condition", "status", "body", "matches"),
        [
            ({"status": 200}, 200, {}, True),
            ({"status": 200}, 201, {}, False),
            ({"status": "4xx"}, 451, {}, True),
            ({"status": "4xx"}, 500, {}, False),
            ({"status": [404, "5xx"]}, 502, {}, True),
            ({"path": "a", "exists": True}, 200, {"a": None}, True),
            ({"path": "a", "exists": True}, 200, {}, False),
            ({"path": "a.b", "missing": True}, 200, {"a": 1}, True),
            ({"path": "a", "missing": True}, 200, {"a": None}, False),
            ({"path": "a", "equals": 1}, 200, {"a": 1.0}, True),
            ({"path": "a", "equals": 1}, 200, {"a": True}, False),
            ({"path": "a", "equals": None}, 200, {"a": None}, True),
            ({"path": "a", "equals": None}, 200, {}, False),
            ({"path": "a", "equals": {"b": []}}, 200, {"a": {"b": []}}, True),
            ({"path": "a", "contains": "out"}, 200, {"a": "sold out"}, True),
            ({"path": "a", "contains": "out"}, 200, {"a": ["sold out"]}, False),
            ({"path": "a[*].b", "contains": 3}, 200, {"a": [{"b": 3}]}, True),
            ({"path": "a", "contains": 3}, 200, {"a": "3"}, False),
            ({"path": "a", "contains": 3}, 200, {"a": 3}, False),
            ({"status": "2xx", "path": "a", "equals": 1}, 500, {"a": 1}, False),
        ],
    )
    def test_conditions(self, condition: dict[str, Any], status: int, body: Any, matches: bool) -> None:
        rules = [
            {"outcome": "skipped", **condition},
            {"outcome": "fail", "status": ["1xx", "2xx", "3xx", "4xx", "5xx"]},
        ]
        state = ended(judge({**HTTP, "rules": rules}, status, body))[0]
        assert state is (OutcomeState.SKIPPED if matches else OutcomeState.FAILED)

    def test_an_answer_that_is_not_json_has_no_paths(self) -> None:
        spec = {**HTTP, "rules": [{"path": "", "missing": True, "outcome": "skipped"}]}
        assert ended(judge(spec, raw=b"plain"))[0] is OutcomeState.SKIPPED

    @pytest.mark.parametrize(
        ("rule", "expected"),
        [
            ({"outcome": "skipped"}, (OutcomeState.SKIPPED, "skipped", "HTTP 200: rules[0] says skipped")),
            ({"outcome": "fail"}, (OutcomeState.FAILED, "processor_failed", "HTTP 200: rules[0] says fail")),
            (
                {"outcome": "fail", "code": "sold_out", "message": "{{ answer.why }} ({{ status }})"},
                (OutcomeState.FAILED, "sold_out", "gone (200)"),
            ),
            (
                {"outcome": "fail", "message": "{{ answer.who }}"},
                (
                    OutcomeState.FAILED,
                    "processor_failed",
                    "HTTP 200: rules[0] says fail; its message: line 1: a value in {{ answer.who }} is not there",
                ),
            ),
        ],
    )
    def test_outcomes_that_end_the_row(
        self, rule: dict[str, Any], expected: tuple[OutcomeState, str | None, str | None]
    ) -> None:
        assert ended(judge({**HTTP, "rules": [{"status": 200, **rule}]}, body={"why": "gone"})) == expected

    def test_done_by_a_rule(self) -> None:
        rules = [{"status": [204, 409], "outcome": "done"}]
        assert done(judge({**HTTP, "rules": rules}, 409, {"x": 1})) == {"answer": {"x": 1}}
        assert done(judge({**HTTP, "rules": rules}, 204, raw=b"")) == {"answer": ""}
        assert done(judge({**HTTP, "rules": rules}, 409, raw=b"caf\xc3\xa9 \xff")) == {"answer": "café \ufffd"}
        assert done(judge({**self.SPEC, "rules": rules}, 204, raw=b"")) == {"price": None, "tags": None}

    def test_not_found_by_a_rule(self) -> None:
        spec = {**HTTP, "rules": [{"path": "hits", "equals": [], "outcome": "not_found", "message": "no hits"}]}
        assert again(judge(spec, body={"hits": []})) == ("not_found", "no hits")
        assert ended(judge(spec, body={"hits": []}, attempt=2)) == (OutcomeState.NOT_FOUND, "not_found", "no hits")

    @pytest.mark.parametrize(
        ("after", "body", "delay_s"),
        [
            (12, {}, 12.0),
            ("wait.s", {"wait": {"s": 2.5}}, 2.5),
            ("wait.s", {"wait": {"s": "4"}}, 4.0),
            ("wait.s", {"wait": {"s": -4}}, 0.0),
            ("wait.s", {"wait": {"s": 1e300}}, LIMITS.retry_after_max_s),
        ],
    )
    def test_a_retry_by_a_rule_waits_as_told(self, after: Any, body: Any, delay_s: float) -> None:
        rules = [{"status": 200, "outcome": "retry", "after": after}]
        verdict = judge({**HTTP, "rules": rules}, body=body)
        assert again(verdict) == ("processor_retry", "HTTP 200: rules[0] says retry")
        assert isinstance(verdict, Again)
        assert verdict.delay_s == delay_s
        last = judge({**HTTP, "rules": rules}, body=body, attempt=LIMITS.max_attempts)
        assert isinstance(last, Outcome)
        assert (last.state, last.error_code) == (OutcomeState.FAILED, "processor_retry")

    @pytest.mark.parametrize("told", [{}, {"s": None}, {"s": True}, {"s": "soon"}, {"s": []}, {"s": 10**400}])
    def test_seconds_that_are_none_leave_the_usual_backoff(self, told: Any) -> None:
        rules = [{"status": 200, "outcome": "retry", "after": "s"}]
        verdict = judge({**HTTP, "rules": rules}, body=told)
        assert isinstance(verdict, Again)
        assert 0 <= verdict.delay_s <= LIMITS.retry_base_s

    def test_a_strategy_has_its_own_columns(self) -> None:
        spec = {**HTTP, "columns": {"a": "x"}, "strategies": [{"name": "1"}, {"name": "2", "columns": {"b": "y"}}]}
        found = [done(judge(spec, body={"x": 1, "y": 2}, attempt=attempt)) for attempt in (1, 2, 3)]
        assert found == [{"a": 1}, {"b": 2}, {"a": 1}]

    def test_secrets_are_kept_out_of_messages(self) -> None:
        spec = {**HTTP, "rules": [{"status": 200, "outcome": "fail", "message": "{{ answer }}"}]}
        assert ended(judge(spec, body="key sk-12345678", secrets=("sk-12345678",)))[2] == "key [redacted]"


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


class TestDecoding:
    @given(JSON)
    def test_whatever_came_as_json_can_be_kept(self, value: Any) -> None:
        decoded = decode_json(json.dumps(value).encode())
        assert decoded is not MISSING
        assert decode_json(msgspec.json.encode(decoded)) == decoded

    def test_half_of_a_surrogate_pair_is_replaced(self) -> None:
        assert decode_json(rb'{"a": "x\ud83d", "b": "\ud83d\ude00"}') == {"a": "x\ufffd", "b": "😀"}

    @pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'"\\u12"', b'{"\\u0041": NaN}', b'["\\u0041", 1e999]'])
    def test_what_is_not_json(self, body: bytes) -> None:
        assert decode_json(body) is MISSING

    @given(st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
    def test_every_answer_gets_a_verdict(self, body: bytes) -> None:
        for spec in (
            CHAT,
            TestChat.TYPED,
            TestHttp.SPEC,
            {**HTTP, "rules": [{"path": "", "exists": True, "outcome": "done"}]},
        ):
            verdict = judge(spec, raw=body)
            if isinstance(verdict, Outcome) and verdict.state is OutcomeState.COMPLETED:
                assert isinstance(msgspec.json.decode(verdict.body or b""), dict)

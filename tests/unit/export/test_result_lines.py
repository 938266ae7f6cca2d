from __future__ import annotations

import json
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.export.result_lines import (
    NOT_RUN,
    OutcomeRow,
    anthropic_line,
    anthropic_not_run_line,
    openai_bytes,
    openai_error_line,
    openai_line,
)
from penstock.model import BatchState, Outcome, OutcomeState

BATCH = UUID(int=7)
LINE_ENDS = "\u2028\u2029\u0085\x0b\x0c\x1c\x1d\x1e\r\n"

texts = st.text(st.characters(codec="utf-8") | st.sampled_from(LINE_ENDS + '"\\\x7f'), max_size=20)
values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """JSON as upstreams write it: compact or pretty, escaped or raw."""
    value, indent = draw(values), draw(st.sampled_from([None, 2]))
    return json.dumps(value, ensure_ascii=draw(st.booleans()), indent=indent).encode()


outcomes = st.builds(
    Outcome,
    st.sampled_from(OutcomeState),
    st.none() | bodies(),
    st.none() | st.sampled_from([0, 99, 200, 204, 400, 599, 1000]),
    st.none() | texts,
    st.none() | texts,
    st.none() | texts,
)


def result_of(line: int, custom_id: str, outcome: Outcome) -> OutcomeRow:
    return OutcomeRow(
        line,
        str(outcome.state),
        custom_id,
        outcome.status_code,
        outcome.request_id,
        outcome.error_code,
        outcome.error_message,
        outcome.body,
    )


def only_line(text: bytes) -> Any:
    """What is on the line, if it is one line to every reader."""
    assert text.endswith(b"\n")
    assert len(text.decode().splitlines()) == 1
    assert text.count(b"\n") == 1
    return json.loads(text)


class TestOpenAI:
    @given(st.integers(1, 2**31 - 1), texts, outcomes)
    def test_the_length_is_known_without_making_the_line(self, line: int, custom_id: str, outcome: Outcome) -> None:
        made = openai_line(BATCH, result_of(line, custom_id, outcome))
        assert openai_bytes(line, custom_id, outcome) == len(made)

    @given(texts, outcomes)
    def test_every_result_is_one_line(self, custom_id: str, outcome: Outcome) -> None:
        said = only_line(openai_line(BATCH, result_of(3, custom_id, outcome)))
        assert said["id"] == f"batch_req_{BATCH.hex}_3"
        assert said["custom_id"] == custom_id
        if outcome.state is OutcomeState.COMPLETED:
            assert said["error"] is None
        if outcome.body is not None:
            assert said["response"]["body"] == json.loads(outcome.body)

    def test_an_output_file_always_has_a_response(self) -> None:
        said = only_line(openai_line(BATCH, result_of(1, "a", Outcome(OutcomeState.COMPLETED))))
        assert said["response"] == {"status_code": 200, "request_id": f"batch_req_{BATCH.hex}_1", "body": None}

    @pytest.mark.parametrize("state", list(NOT_RUN))
    def test_what_was_not_run(self, state: BatchState) -> None:
        said = only_line(openai_error_line(BATCH, 1, "a\u2028", *NOT_RUN[state]))
        assert said["response"] is None
        assert said["error"]["code"] == f"batch_{state}"


class TestAnthropic:
    @given(texts, outcomes)
    def test_every_result_is_one_line(self, custom_id: str, outcome: Outcome) -> None:
        said = only_line(anthropic_line(result_of(3, custom_id, outcome)))
        assert said["custom_id"] == custom_id
        if outcome.state is OutcomeState.COMPLETED:
            assert said["result"]["type"] == "succeeded"
        else:
            assert said["result"]["type"] == "errored"
            assert isinstance(said["result"]["error"]["error"]["type"], str)
            assert isinstance(said["result"]["error"]["error"]["message"], str)

    def test_a_message(self) -> None:
        outcome = Outcome(OutcomeState.COMPLETED, b'{\n"type": "message"}', 200)
        said = only_line(anthropic_line(result_of(1, "a", outcome)))
        assert said == {"custom_id": "a", "result": {"type": "succeeded", "message": {"type": "message"}}}

    @pytest.mark.parametrize(
        ("status", "body", "error"),
        [
            (
                400,
                b'{"type":"error","error":{"type":"invalid_request_error","message":"no","details":{"a":1}}}',
                {"type": "invalid_request_error", "message": "no", "details": {"a": 1}},
            ),
            (422, b'{"error":{"message":"bad","type":"BadRequestError"}}', "invalid_request_error: bad"),
            (529, b'{"error":"overloaded"}', "overloaded_error: told"),
            (500, b'"text"', "api_error: told"),
            (503, None, "api_error: told"),
            (404, b'{"error":{"type":"not_found_error"}}', "not_found_error: told"),
            (404, b'{"error":{"type":["x"],"message":{}}}', "not_found_error: told"),
            (400, b'{"error":' + b"[" * 100_000, "invalid_request_error: told"),
            (400, b'{"error":{"type":"api_error","message":"\\ud83d"}}', "invalid_request_error: told"),
            (None, None, "api_error: told"),
        ],
    )
    def test_an_error(self, status: int | None, body: bytes | None, error: Any) -> None:
        outcome = Outcome(OutcomeState.FAILED, body, status, "req_1", "code", "told")
        said = only_line(anthropic_line(result_of(1, "a", outcome)))
        if isinstance(error, str):
            kind, message = error.split(": ")
            error = {"type": kind, "message": message}
        assert said["result"] == {
            "type": "errored",
            "error": {"type": "error", "error": error, "request_id": "req_1"},
        }

    def test_a_timeout(self) -> None:
        outcome = Outcome(OutcomeState.FAILED, error_code="request_timeout", error_message="slow")
        said = only_line(anthropic_line(result_of(1, "a", outcome)))
        assert said["result"]["error"]["error"] == {"type": "timeout_error", "message": "slow"}

    def test_what_was_not_run(self) -> None:
        kinds = {state: only_line(anthropic_not_run_line("a", state))["result"] for state in NOT_RUN}
        assert kinds == {BatchState.CANCELLED: {"type": "canceled"}, BatchState.EXPIRED: {"type": "expired"}}

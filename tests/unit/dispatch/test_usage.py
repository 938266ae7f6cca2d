from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dispatch.http.answer import is_json, json_with_usage
from penstock.model import Usage

CHAT = {
    "prompt_tokens": 10,
    "completion_tokens": 20,
    "total_tokens": 30,
    "prompt_tokens_details": {"cached_tokens": 4, "audio_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 5},
}
RESPONSES = {
    "input_tokens": 10,
    "input_tokens_details": {"cached_tokens": 4},
    "output_tokens": 20,
    "output_tokens_details": {"reasoning_tokens": 5},
    "total_tokens": 30,
}
ANTHROPIC = {
    "input_tokens": 10,
    "cache_creation_input_tokens": 1,
    "cache_read_input_tokens": 4,
    "output_tokens": 20,
    "service_tier": "batch",
}
HUGE = 2**31


@pytest.mark.parametrize(
    ("told", "usage"),
    [
        (CHAT, Usage(10, 4, 20, 5)),
        (RESPONSES, Usage(10, 4, 20, 5)),
        (ANTHROPIC, Usage(15, 4, 20, 0)),
        ({"prompt_tokens": 8, "total_tokens": 8}, Usage(8)),
        ({**CHAT, "prompt_tokens_details": None, "completion_tokens_details": None}, Usage(10, 0, 20, 0)),
        ({**ANTHROPIC, "cache_creation_input_tokens": None, "cache_read_input_tokens": None}, Usage(10, 0, 20, 0)),
        ({}, Usage()),
        # What makes no sense is left out; the rest is kept.
        ({**CHAT, "prompt_tokens": -1}, Usage(0, 4, 20, 5)),
        ({**CHAT, "prompt_tokens": 1.5, "completion_tokens": "20"}, Usage(0, 4, 0, 5)),
        ({**CHAT, "prompt_tokens": True}, Usage(0, 4, 20, 5)),
        ({**CHAT, "prompt_tokens": HUGE}, Usage(0, 4, 20, 5)),
        ({**CHAT, "completion_tokens": 10**400}, Usage(10, 4, 0, 5)),
        ({**CHAT, "prompt_tokens_details": [1]}, Usage(10, 0, 20, 5)),
        ({**CHAT, "prompt_tokens_details": {"cached_tokens": {"a": 1}}}, Usage(10, 0, 20, 5)),
        (None, None),
        ("many", None),
        ([CHAT], None),
        (12, None),
    ],
)
def test_what_an_answer_says_it_cost(told: Any, usage: Usage | None) -> None:
    assert json_with_usage(json.dumps({"id": "x", "usage": told, "choices": []}).encode()) == (True, usage)


@pytest.mark.parametrize(
    ("body", "valid"),
    [
        (b'{"usage":{"prompt_tokens":' + b"1" * 10_000 + b"}}", True),
        (b'{"usage":{"prompt_tokens":[' + b"1," * 20_000 + b"1]}}", True),
        (b'{"usage":{"prompt_tokens":1e999}}', True),
        (b'{"usage":{"prompt_tokens":' + b"[" * 5_000 + b"]" * 5_000 + b"}}", False),
        (b'{"usage":{"prompt_tokens":7}', False),
        (b'{"usage":{"prompt_tokens":7}} x', False),
        (b'{"usage":{"prompt_tokens":"\xff"}}', False),
        (b"[1,", False),
        (b"[1]", True),
        (b"7", True),
        (b"", False),
        (b"<html>", False),
    ],
    ids=range(12),
)
def test_hostile_answers_cost_nothing(body: bytes, valid: bool) -> None:
    assert json_with_usage(body) == (valid, json_with_usage(body)[1])
    assert json_with_usage(body)[1] in (None, Usage())
    assert is_json(body) is valid


def test_an_answer_cut_off_inside_a_character_still_tells() -> None:
    body = b'{"content":"\\ud83d","usage":{"prompt_tokens":3,"completion_tokens":4}}'
    assert json_with_usage(body) == (True, Usage(3, 0, 4, 0))


@given(st.binary(max_size=30) | st.text(max_size=30).map(lambda text: json.dumps({"usage": text})[:20].encode()))
def test_both_readings_agree_on_what_is_json(body: bytes) -> None:
    assert json_with_usage(body)[0] is is_json(body)


counts = st.integers() | st.floats() | st.text(max_size=3) | st.none() | st.booleans() | st.lists(st.integers())


@given(
    st.dictionaries(
        st.sampled_from([*CHAT, *RESPONSES, *ANTHROPIC]), counts | st.fixed_dictionaries({"cached_tokens": counts})
    )
)
def test_tokens_always_fit_where_they_are_summed(told: dict[str, Any]) -> None:
    valid, usage = json_with_usage(json.dumps({"usage": told}, allow_nan=True).encode())
    if valid:
        assert usage is not None
        for value in (usage.input_tokens, usage.cached_tokens, usage.output_tokens, usage.reasoning_tokens):
            assert 0 <= value < HUGE

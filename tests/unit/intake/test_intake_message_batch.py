"""The body that creates a message batch, taken apart while it arrives."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import IntakeLimits
from penstock.intake.message_batch import Splitter
from penstock.intake.refusal import IntakeRefused


def split(body: bytes, step: int | None = None, **options: Any) -> list[Any]:
    """Each line's object, checked to be what a line of a batch file looks like."""
    splitter = Splitter(IntakeLimits(**options))
    step = step or len(body) or 1
    lines = b"".join(splitter.feed(body[at : at + step]) for at in range(0, len(body), step))
    splitter.finish()
    found = [json.loads(line) for line in lines.split(b"\n")[:-1]]
    assert splitter.requests == len(found)
    assert all((line["method"], line["url"]) == ("POST", "/v1/messages") for line in found)
    return [{"custom_id": line["custom_id"], "params": line["body"]} for line in found]


def request(number: int = 0, **params: Any) -> dict[str, Any]:
    return {"custom_id": f"r-{number}", "params": {"model": "m", "max_tokens": 8} | params}


TRICKY = [
    request(0, text='} ] , { [ "quoted" \\ \\" \u2028 é \n'),
    request(1, nested=[[{"a": {"b": []}}], {}, "]}"]),
    {"params": {"stream": False, "model": "m"}, "custom_id": "params-first"},
    request(3, text="\\" * 5 + '"'),
    request(4, text=""),
]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_cut_anywhere_it_is_the_same(indent: int | None, ascii_only: bool) -> None:
    body = json.dumps({"requests": TRICKY}, indent=indent, ensure_ascii=ascii_only).encode()
    for step in (1, 2, 3, 5, 7, 64, len(body)):
        assert split(body, step) == TRICKY
    assert split(b" \r\n\t" + body.replace(b"\n", b"\r\n") + b"\n ", 3) == TRICKY


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(st.lists(st.dictionaries(st.text(), _JSON), min_size=1, max_size=5), st.integers(1, 50), st.booleans())
def test_any_request_comes_through(params: list[dict[str, Any]], step: int, ascii_only: bool) -> None:
    requests = [
        {"custom_id": str(number), "params": entry | {"model": "m", "stream": None}}
        for number, entry in enumerate(params)
    ]
    assert split(json.dumps({"requests": requests}, ensure_ascii=ascii_only).encode("utf-8", "replace"), step)


def refused(body: bytes | Any, **options: Any) -> IntakeRefused:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(IntakeRefused) as caught:
        split(text, **options)
    for step in (1, 7):
        with pytest.raises(IntakeRefused) as again:
            split(text, step, **options)
        assert (again.value.code, again.value.message.split(":")[0]) == (
            caught.value.code,
            caught.value.message.split(":")[0],
        )
    return caught.value


@pytest.mark.parametrize(
    ("entry", "place", "code"),
    [
        ({"custom_id": "x"}, "requests.1.params", "missing_required_parameter"),
        ({"params": {"model": "m"}}, "requests.1.custom_id", "missing_required_parameter"),
        ({"custom_id": 7, "params": {"model": "m"}}, "requests.1.custom_id", "invalid_request"),
        ({"custom_id": "a b", "params": {"model": "m"}}, "requests.1.custom_id", "invalid_request"),
        ({"custom_id": "", "params": {"model": "m"}}, "requests.1.custom_id", "invalid_request"),
        ({"custom_id": "é", "params": {"model": "m"}}, "requests.1.custom_id", "invalid_request"),
        ({"custom_id": "x" * 65, "params": {"model": "m"}}, "requests.1.custom_id", "invalid_request"),
        ({"custom_id": "x\n", "params": {"model": "m"}}, "requests.1.custom_id", "invalid_request"),
        ({"custom_id": "r-0", "params": {"model": "m"}}, "requests.1.custom_id", "duplicate_custom_id"),
        ({"custom_id": "x", "params": []}, "requests.1.params", "invalid_request"),
        ({"custom_id": "x", "params": {}}, "requests.1.params.model", "missing_required_parameter"),
        ({"custom_id": "x", "params": {"model": 3}}, "requests.1.params.model", "invalid_request"),
        ({"custom_id": "x", "params": {"model": ""}}, "requests.1.params.model", "invalid_request"),
        ({"custom_id": "x", "params": {"model": "m", "stream": True}}, "requests.1.params.stream", "invalid_request"),
        ({"custom_id": "x", "params": {"model": "m", "stream": 1}}, "requests.1.params.stream", "invalid_request"),
        ({"custom_id": "x", "params": {"model": "m"}, "owner": "me"}, "requests.1.owner", "invalid_request"),
        ("text", "requests.1", "invalid_request"),
        (None, "requests.1", "invalid_request"),
        ([], "requests.1", "invalid_request"),
    ],
)
def test_a_bad_request_is_named(entry: Any, place: str, code: str) -> None:
    error = refused({"requests": [request(0), entry, request(2)]})
    assert (error.message.partition(": ")[0], error.code) == (place, code)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "it ends in the middle, after 0 requests"),
        (b"  ", "it ends in the middle"),
        (b"[]", "expected '{' near its beginning"),
        (b"{}", "requests: Field required"),
        (b'{"requests": []}', "requests: at least one"),
        (b'{"requests": {}}', "requests: Input should be an array"),
        (b'{"requests": null}', "requests: Input should be an array"),
        (b'{"other": 1, "requests": []}', "other: Extra inputs"),
        (b'{"requests": [%b], "other": 1}', "other: Extra inputs"),
        (b'{"requests": [%b], "requests": []}', "requests: the key is there twice"),
        (b'{"requests": [%b]} x', "something after its end"),
        (b'{"requests": [%b]', "ends in the middle, after 1 requests"),
        (b'{"requests": [%b', "ends in the middle, after 1 requests"),
        (b'{"requests": [%b,]}', "requests.1: Input should be an object"),
        (b'{"requests": [%b %b]}', "expected ','"),
        (b'{"requests": [{"custom_id": "x", "params": {"model": "m"]}]}', "requests.0: not valid JSON"),
        (b'{"requests": [{"custom_id": "x", "params": {"model": "\xff"}}]}', "requests.0: not valid JSON"),
        (b'{"requests": [{"custom_id": "x", "params": {"model": "a\nb"}}]}', "requests.0: not valid JSON"),
        (b'{"requests": [{"custom_id": "x", "custom_id": "y", "params": {"model": "m"}}]}', "requests.0.custom_id: "),
        (b'{"requests": [{"custom_id": "x", "params": {"model": "m", "d": %b}}]}', "nested deeper"),
        (b"{requests: []}", "expected a key"),
        (b'{"requests" []}', "expected ':'"),
    ],
)
def test_a_bad_body_is_said_so(body: bytes, message: str) -> None:
    filled = body.replace(b'"d": %b', b'"d": ' + b"[" * 500 + b"]" * 500)
    assert message in refused(filled.replace(b"%b", json.dumps(request(0)).encode())).message


def test_limits() -> None:
    body = {"requests": [request(number) for number in range(4)]}
    assert refused(body, max_message_batch_requests=3).code == "too_many_tasks"
    assert refused(body, max_message_batch_bytes=100).code == "file_too_large"
    error = refused({"requests": [request(0), request(1, text="x" * 2000)]}, max_line_bytes=1000)
    assert (error.code, error.message.partition(": ")[0]) == ("file_too_large", "requests.1")


def test_models_nobody_serves_are_refused_once_asked() -> None:
    asked: list[str] = []

    def serves(model: str) -> bool:
        asked.append(model)
        return model != "k"

    splitter = Splitter(IntakeLimits(), serves)
    entries = [*(request(number) for number in range(5)), request(5, model="k")]
    with pytest.raises(IntakeRefused, match=r"^requests\.5\.params\.model: \"k\" is not served here") as caught:
        splitter.feed(json.dumps({"requests": entries}).encode())
    assert caught.value.code == "model_not_found"
    assert asked == ["m", "k"]


def test_memory_is_that_of_one_request() -> None:
    one = json.dumps(request(0, text="x" * 1_000_000)).encode()
    splitter = Splitter(IntakeLimits())
    splitter.feed(b'{"requests": [')
    tracemalloc.start()
    try:
        for number in range(40):
            entry = one.replace(b"r-0", b"r-%d" % number) + b","
            for at in range(0, len(entry), 65_536):
                splitter.feed(entry[at : at + 65_536])
        assert tracemalloc.get_traced_memory()[1] < 8_000_000
    finally:
        tracemalloc.stop()


def test_a_long_string_is_looked_at_once() -> None:
    """Thousands of small chunks of one string take the time of their bytes, not of all that came before."""
    splitter = Splitter(IntakeLimits())
    splitter.feed(b'{"requests": [{"custom_id": "x", "params": {"model": "m", "text": "')
    looked_at = []
    for _ in range(2_000):
        before = splitter._at
        splitter.feed(b"\\\\" * 2048)
        looked_at.append(splitter._at - before)
    assert max(looked_at) <= 4096
    lines = splitter.feed(b'"}}]}')
    splitter.finish()
    assert len(json.loads(lines)["body"]["text"]) == 2_000 * 2048

"""CloudEvents: what the official SDK makes is read, what we write the SDK reads, and errors name what is wrong."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any, get_args

import pytest
from cloudevents.core.bindings import http as sdk
from cloudevents.core.v1.event import CloudEvent
from hypothesis import given
from hypothesis import strategies as st

from penstock.sessions import cloudevents
from penstock.sessions.cloudevents import BATCHED, Event, EventError, Mode, rfc3339

STRUCTURED = {"content-type": "application/cloudevents+json; charset=utf-8"}
PLAIN: dict[str, Any] = {"specversion": "1.0", "id": "1", "source": "/s", "type": "t"}


def _read(headers: dict[str, str], body: bytes) -> Event:
    found, batched = cloudevents.read({name.lower(): value for name, value in headers.items()}, body)
    assert not batched
    (event,) = found
    return event


def _structured(**changed: Any) -> Event:
    return _read(STRUCTURED, json.dumps({**PLAIN, **changed}).encode())


@pytest.mark.parametrize("write", [sdk.to_structured_event, sdk.to_binary_event])
def test_what_the_sdk_writes_is_read(write: Any) -> None:
    made = CloudEvent(
        {
            "id": 'ü "1%" \u20ac',
            "source": "https://example.org/a?b=c",
            "type": "com.example.some",
            "subject": "grüße an alle",
            "time": datetime(2026, 1, 31, 12, 0, 0, 5, tzinfo=UTC),
            "datacontenttype": "application/json",
            "dataschema": "https://example.org/schema",
            "traceparent": "00-abc-01",
        },
        {"hello": ["wörld", 1, None]},
    )
    message = write(made)
    event = _read(message.headers, message.body)
    assert (event.id, event.source, event.type) == (made.get_id(), made.get_source(), made.get_type())
    assert event.subject == "grüße an alle"
    assert event.time is not None
    assert datetime.fromisoformat(event.time) == made.get_time()
    assert event.dataschema == "https://example.org/schema"
    assert event.extensions == {"traceparent": "00-abc-01"}
    assert event.data is not None
    assert json.loads(event.data) == {"hello": ["wörld", 1, None]}


@pytest.mark.parametrize("mode", get_args(Mode))
def test_what_is_written_the_sdk_reads(mode: Mode) -> None:
    event = Event(
        "evt_1",
        "urn:penstock",
        "com.penstock.session.request.completed",
        'chat "ü" 100%',
        rfc3339(datetime(2026, 1, 31, tzinfo=UTC)),
        "application/json",
        data=b'{"a":[1, 2.50]}',
        extensions={"causeid": "x y"},
    )
    headers, body = cloudevents.write(event, mode)
    assert all(value.isascii() for value in headers.values())
    read = sdk.from_http_event(sdk.HTTPMessage(headers, body))
    assert (read.get_id(), read.get_source(), read.get_type()) == (event.id, event.source, event.type)
    assert read.get_subject() == event.subject
    assert read.get_time() == datetime(2026, 1, 31, tzinfo=UTC)
    assert read.get_extension("causeid") == "x y"
    assert read.get_data() == {"a": [1, 2.5]}
    assert _read(headers, body) == event


@given(
    id=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=40),
    data=st.none() | st.binary(max_size=40),
    mode=st.sampled_from(get_args(Mode)),
)
def test_writing_and_reading_are_each_others_inverse(id: str, data: bytes | None, mode: Mode) -> None:  # noqa: A002
    kind = None if data is None else "application/octet-stream"
    event = Event(id, "/s", "t", id, datacontenttype=kind, data=data, extensions={"note": id})
    back = _read(*cloudevents.write(event, mode))
    # Over HTTP a body of no bytes and no body are the same.
    assert back == event or (mode == "binary" and data == b"" and back.data is None)


def test_data_keeps_its_bytes() -> None:
    body = b'{"specversion":"1.0","id":"1","source":"/s","type":"t","data": {"n": 1.50, "s": "\\u00e9"} }'
    assert _read(STRUCTURED, body).data == b'{"n": 1.50, "s": "\\u00e9"}'
    assert _structured(data_base64="AAEC").data == b"\0\1\2"
    assert _structured(data="text", datacontenttype="text/plain").data == b"text"
    assert _structured().data is None


def test_binary_headers_may_be_quoted_and_encoded() -> None:
    headers = {"ce-specversion": "1.0", "ce-id": '"a \\"b\\""', "ce-source": "/s", "ce-type": "Euro%20%E2%82%AC"}
    event = _read(headers, b"")
    assert (event.id, event.type, event.data) == ('a "b"', "Euro €", None)


def test_a_batch_is_read_in_order_and_may_be_empty() -> None:
    headers = {"content-type": BATCHED}
    found, batched = cloudevents.read(headers, json.dumps([{**PLAIN, "id": str(n)} for n in range(3)]).encode())
    assert batched
    assert [event.id for event in found] == ["0", "1", "2"]
    assert cloudevents.read(headers, b"[]") == ([], True)
    with pytest.raises(EventError, match="lacks 'id'") as refusal:
        cloudevents.read(headers, json.dumps([PLAIN, {**PLAIN, "id": None}]).encode())
    assert refusal.value.index == 1


@pytest.mark.parametrize("missing", ["specversion", "id", "source", "type"])
def test_required_attributes_are_required_in_every_mode(missing: str) -> None:
    for value in (None, ""):
        with pytest.raises(EventError, match=missing) as refusal:
            _structured(**{missing: value})
        assert refusal.value.attribute == missing
    headers = {f"ce-{name}": value for name, value in PLAIN.items() if name != missing}
    with pytest.raises(EventError, match=missing):
        _read(headers, b"")


@pytest.mark.parametrize(
    ("changed", "attribute"),
    [
        ({"specversion": "0.3"}, "specversion"),
        ({"source": "not a reference"}, "source"),
        ({"id": 5}, "id"),
        ({"time": "yesterday"}, "time"),
        ({"time": "2026-02-30T00:00:00Z"}, "time"),
        ({"dataschema": "relative"}, "dataschema"),
        ({"datacontenttype": "json"}, "datacontenttype"),
        ({"subject": ""}, "subject"),
        ({"Camel": "x"}, "Camel"),
        ({"with-dash": "x"}, "with-dash"),
        ({"ext": {"nested": 1}}, "ext"),
        ({"ext": 2**31}, "ext"),
        ({"ext": 1.5}, "ext"),
        ({"ext": "x" * 5_000}, "ext"),
        ({"data": 1, "data_base64": "AA=="}, "data"),
        ({"data_base64": "!"}, "data_base64"),
        ({"data_base64": 7}, "data_base64"),
    ],
)
def test_what_is_wrong_is_named(changed: dict[str, Any], attribute: str) -> None:
    with pytest.raises(EventError) as refusal:
        _structured(**changed)
    assert refusal.value.attribute == attribute


@pytest.mark.parametrize(
    ("headers", "body", "unsupported"),
    [
        ({"content-type": "application/json"}, b"{}", True),
        ({}, b"{}", True),
        ({"content-type": "application/cloudevents+avro"}, b"", True),
        (STRUCTURED, b"[]", False),
        (STRUCTURED, b"{", False),
        (STRUCTURED, b"\xff", False),
        ({"content-type": BATCHED}, b"{}", False),
        ({"content-type": BATCHED}, b"[1]", False),
    ],
)
def test_what_is_no_event_is_refused(headers: dict[str, str], body: bytes, unsupported: bool) -> None:
    with pytest.raises(EventError) as refusal:
        _read(headers, body)
    assert refusal.value.unsupported == unsupported


def test_extension_values_take_their_canonical_form() -> None:
    assert _structured(flag=True, number=-7, text="x", gone=None).extensions == {
        "flag": "true",
        "number": "-7",
        "text": "x",
    }

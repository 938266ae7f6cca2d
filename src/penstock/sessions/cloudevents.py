"""CloudEvents 1.0 over HTTP: structured, binary and batched, in JSON. cloudevents.io has the texts.

Events are read strictly: required attributes must be there, names and types must be legal, and an error names the
attribute. An event's data is kept as the bytes that came.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal
from urllib.parse import quote, unquote_to_bytes

import msgspec

Mode = Literal["structured", "binary"]

SPEC_VERSION = "1.0"
STRUCTURED = "application/cloudevents+json"
BATCHED = "application/cloudevents-batch+json"

_REQUIRED = ("specversion", "id", "source", "type")
_KNOWN = (*_REQUIRED, "datacontenttype", "dataschema", "subject", "time")
_NAME = re.compile(r"[a-z0-9]+")
_MEDIA = re.compile(r"[\w!#$&^.+-]+/[\w!#$&^.+-]+\s*(?:;.*)?", re.DOTALL)
_JSON_MEDIA = re.compile(r"[\w!#$&^.+-]+/(?:[\w!#$&^.+-]+\+)?json\s*(?:;.*)?", re.IGNORECASE | re.DOTALL)
_TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(?:\.\d+)?(?:[Zz]|[+-]\d\d:\d\d)")
# RFC 3986, as loosely as a reference can be checked without a scheme: no spaces, no controls, none of "<>\^`{|}.
_REFERENCE = re.compile(r'[^\x00-\x20\x7f-\x9f"<>\\^`{|}]+')
_INT32 = range(-(2**31), 2**31)
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_MAX_ATTRIBUTE_CHARS = 2_048
_MAX_ATTRIBUTES = 64

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST = msgspec.json.Decoder(list[msgspec.Raw])


class EventError(ValueError):
    """The request is no CloudEvent. `attribute` names the wrong attribute, if one is to blame."""

    def __init__(self, message: str, attribute: str | None = None, *, unsupported: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.attribute = attribute
        self.unsupported = unsupported
        """Whether the content type is not one of CloudEvents."""
        self.index: int | None = None
        """Index of the event in its batch."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event. Extension attributes are texts, as they are written in a header."""

    id: str
    source: str
    type: str
    subject: str | None = None
    time: str | None = None
    datacontenttype: str | None = None
    dataschema: str | None = None
    data: bytes | None = None
    extensions: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_json(self) -> bool:
        """Whether the data is declared as JSON, which is also the meaning of no declaration."""
        return self.datacontenttype is None or is_json(self.datacontenttype)


def is_json(media: str) -> bool:
    return _JSON_MEDIA.fullmatch(media.strip()) is not None


def rfc3339(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


# -- reading


def read(headers: Mapping[str, str], content: bytes) -> tuple[list[Event], bool]:
    """Read the events of a request, and whether they came as a batch. `headers` have names in lower case."""
    media = headers.get("content-type", "")
    kind = media.partition(";")[0].strip().lower()
    if kind == STRUCTURED:
        return [_read_structured(content)], False
    if kind == BATCHED:
        return _read_batch(content), True
    if kind.startswith("application/cloudevents"):
        raise EventError(f"Events are taken in JSON: {STRUCTURED} or {BATCHED}, not {kind[:100]}.", unsupported=True)
    if "ce-specversion" in headers:
        return [_read_binary(headers, media, content)], False
    raise EventError(
        f"The request holds no event: its content type must be {STRUCTURED} or {BATCHED}, or its headers must be "
        "those of an event (ce-specversion, ce-id, ce-source, ce-type).",
        unsupported=True,
    )


def _read_batch(content: bytes) -> list[Event]:
    entries = _decoded(_LIST, content, "The body is not a JSON array of events.")
    found = []
    for index, entry in enumerate(entries):
        try:
            found.append(_read_structured(bytes(entry)))
        except EventError as error:
            error.index = index
            raise
    return found


def _read_structured(content: bytes) -> Event:
    fields = _decoded(_OBJECT, content, "The event is not a JSON object.")
    data, data_base64 = fields.pop("data", None), fields.pop("data_base64", None)
    attributes: dict[str, str] = {}
    for name, raw in fields.items():
        value = msgspec.json.decode(raw)
        if value is not None:  # null means that the attribute is absent
            attributes[_named(name)] = _as_text(name, value)
    event = _checked(attributes)
    if data is not None and data_base64 is not None:
        raise EventError("'data' and 'data_base64' are both given: an event has one of them.", "data")
    if data_base64 is not None:
        return _with_data(event, _from_base64(data_base64))
    if data is None:
        return event
    if not event.has_json:
        # Data of another kind is carried as a text.
        text = msgspec.json.decode(data)
        if isinstance(text, str):
            return _with_data(event, text.encode())
    return _with_data(event, bytes(data))


def _read_binary(headers: Mapping[str, str], media: str, content: bytes) -> Event:
    attributes: dict[str, str] = {}
    for header, value in headers.items():
        if header.startswith("ce-"):
            name = header.removeprefix("ce-")
            if name in ("datacontenttype", "data"):
                raise EventError(f"'ce-{name}' is no header of an event.", name)
            attributes[_named(name)] = _from_header(name, value)
    if media:
        attributes["datacontenttype"] = media
    return _with_data(_checked(attributes), content or None)


def _decoded(decoder: msgspec.json.Decoder[Any], content: bytes, message: str) -> Any:
    try:
        return decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise EventError(message) from None


def _named(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise EventError(f"'{name[:50]}' is not the name of an attribute: they are of a-z and 0-9 only.", name[:50])
    return name


def _as_text(name: str, value: Any) -> str:
    """An attribute's value as text: the canonical form of its type."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, int) and value in _INT32:
        text = str(value)
    else:
        raise EventError(f"'{name}' must be a text, a boolean or a whole number of 32 bits.", name)
    if name in _KNOWN:
        raise EventError(f"'{name}' must be a text.", name)
    return text


def _from_header(name: str, value: str) -> str:
    if quoted := _QUOTED.fullmatch(value):
        value = re.sub(r"\\(.)", r"\1", quoted[1])
    try:
        return unquote_to_bytes(value.encode("latin-1")).decode()
    except (UnicodeDecodeError, UnicodeEncodeError):
        raise EventError(f"'ce-{name}' is not UTF-8, percent-encoded.", name) from None


def _from_base64(raw: msgspec.Raw) -> bytes:
    try:
        return base64.b64decode(msgspec.json.decode(raw, type=str), validate=True)
    except (msgspec.ValidationError, binascii.Error, ValueError):
        raise EventError("'data_base64' is not base64.", "data_base64") from None


def _checked(attributes: dict[str, str]) -> Event:
    if len(attributes) > _MAX_ATTRIBUTES:
        raise EventError(f"The event has more than {_MAX_ATTRIBUTES} attributes.")
    for name in _REQUIRED:
        if not attributes.get(name):
            raise EventError(f"The event lacks '{name}', which every event must have.", name)
    for name, value in attributes.items():
        if not value and name in _KNOWN:
            raise EventError(f"'{name}' must not be empty.", name)
        if len(value) > _MAX_ATTRIBUTE_CHARS or "\0" in value:
            raise EventError(f"'{name}' is longer than {_MAX_ATTRIBUTE_CHARS} characters, or has a NUL.", name)
    if (version := attributes.pop("specversion")) != SPEC_VERSION:
        raise EventError(f"'specversion' is '{version[:20]}': this server takes {SPEC_VERSION}.", "specversion")
    if not _REFERENCE.fullmatch(attributes["source"]):
        raise EventError("'source' must be a URI or a relative reference.", "source")
    if (schema := attributes.get("dataschema")) and (":" not in schema or not _REFERENCE.fullmatch(schema)):
        raise EventError("'dataschema' must be an absolute URI.", "dataschema")
    if (media := attributes.get("datacontenttype")) and not _MEDIA.fullmatch(media):
        raise EventError("'datacontenttype' must be a media type, such as application/json.", "datacontenttype")
    if (time := attributes.get("time")) and not _is_time(time):
        raise EventError("'time' must be a time as in RFC 3339: 2026-01-31T12:00:00Z.", "time")
    extensions = {name: attributes.pop(name) for name in list(attributes) if name not in _KNOWN}
    return Event(
        attributes["id"],
        attributes["source"],
        attributes["type"],
        attributes.get("subject"),
        attributes.get("time"),
        attributes.get("datacontenttype"),
        attributes.get("dataschema"),
        extensions=extensions,
    )


def _is_time(text: str) -> bool:
    if not _TIME.fullmatch(text):
        return False
    try:
        # A leap second is legal, and unknown to datetime.
        datetime.fromisoformat(re.sub(r":60(?=[.Zz+-])", ":59", text).upper())
    except ValueError:
        return False
    return True


def _with_data(event: Event, data: bytes | None) -> Event:
    return replace(event, data=data)


# -- writing


def write(event: Event, mode: Mode) -> tuple[dict[str, str], bytes]:
    """Write the headers and the body of a request that carries the event."""
    return _write_structured(event) if mode == "structured" else _write_binary(event)


def _attributes(event: Event) -> dict[str, str]:
    named = {"specversion": SPEC_VERSION, "id": event.id, "source": event.source, "type": event.type}
    optional = {"subject": event.subject, "time": event.time, "dataschema": event.dataschema}
    return named | {name: value for name, value in optional.items() if value is not None} | dict(event.extensions)


def _write_structured(event: Event) -> tuple[dict[str, str], bytes]:
    fields: dict[str, Any] = dict(_attributes(event))
    if event.datacontenttype is not None:
        fields["datacontenttype"] = event.datacontenttype
    if event.data is not None:
        if event.has_json:
            fields["data"] = msgspec.Raw(event.data)
        else:
            fields["data_base64"] = base64.b64encode(event.data).decode()
    return {"content-type": f"{STRUCTURED}; charset=utf-8"}, msgspec.json.encode(fields)


def _write_binary(event: Event) -> tuple[dict[str, str], bytes]:
    headers = {f"ce-{name}": _to_header(value) for name, value in _attributes(event).items()}
    if event.data is not None or event.datacontenttype is not None:
        headers["content-type"] = event.datacontenttype or "application/json"
    return headers, event.data or b""


# Printable ASCII stays as it is, but for the space, the quote and the percent sign.
_PLAIN = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"%')


def _to_header(value: str) -> str:
    return quote(value, safe=_PLAIN)

"""Checks of lines that the fast path did not take, and what is wrong with them.

Runs once per bad line, so it looks at the line again, field by field, and spends what a good
message needs.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import accumulate
from typing import NamedTuple

import msgspec

from penstock.config import IntakeLimits

MAX_URL_CHARS = 1024
MAX_MODEL_CHARS = 512

_REQUIRED = ("custom_id", "url", "body")
_BLANK = b" \t\r\n"
_BOM = b"\xef\xbb\xbf"
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TEXT = msgspec.json.Decoder(str)
_ANYTHING = msgspec.json.Decoder()

# What any HTTP client sends as it stands: no scheme, host, query, fragment, escape or backslash
# that a client or a proxy could read as another place.
_URL = re.compile(r"/[A-Za-z0-9._~!$&'()*+,;=:@/-]*")
_DOT_SEGMENT = re.compile(r"/\.{0,2}(?=/)|/\.{1,2}$")

# Possessive, so that a long string leaves no states behind to go back to.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}

_DETAILED_BYTES = 1024 * 1024
"""Lines beyond this get the decoder's terse message: a second parser would need many times their size."""


class Fault(NamedTuple):
    field: str
    reason: str
    code: str


def is_blank(line: bytes) -> bool:
    return not line.strip(_BLANK)


def depth(line: bytes) -> int:
    """How deep a valid JSON text nests."""
    brackets = _STRING.sub(b"", line).translate(None, _NOT_BRACKETS)
    return max(accumulate(map(_STEP.__getitem__, brackets)), default=0)


def duplicate_key(line: bytes) -> str | None:
    """A key that the line's object holds twice. Which of the two counts is anyone's guess."""
    fields = _FIELDS.decode(line)
    quotes = sum(2 + bytes(value).count(b'"') for value in fields.values())
    if line.count(b'"') == quotes:
        return None
    # Either a key is there twice or a key has a quote in it: tell them apart.
    keys: list[str] = []

    def keep_keys(pairs: list[tuple[str, object]]) -> None:
        keys[:] = (key for key, _ in pairs)  # of the outermost object in the end, which closes last

    json.loads(line.decode(), object_pairs_hook=keep_keys, parse_int=str)
    return next((key for key, times in Counter(keys).items() if times > 1), None)


def object_fault(line: bytes, limits: IntakeLimits) -> Fault | None:
    """What is wrong with a line that should be one JSON object, before its fields are looked at."""
    if len(line) > limits.max_line_bytes:
        return too_long(limits)
    try:
        _FIELDS.decode(line)
    except msgspec.ValidationError:
        return Fault("", f"found {_kind(line.lstrip(_BLANK))}; expected a JSON object", "invalid_json_line")
    except RecursionError:
        return _too_deep(limits)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Fault("", _malformed(line, error), "invalid_json_line")
    return _bad_text(line) or shape_fault(line, limits)


def explain(line: bytes, limits: IntakeLimits, *, model_required: bool = False, whole_answers: bool = False) -> Fault:
    """The first fault of a line that is not acceptable; with `whole_answers`, none may ask for a streamed one."""
    if fault := object_fault(line, limits):
        return fault
    fields = _FIELDS.decode(line)
    return (
        _several_missing(fields)
        or _bad_custom_id(fields, limits)
        or _bad_method(fields)
        or _bad_url(fields)
        or _bad_body(fields, model_required, whole_answers or model_required)
        or number_fault(line)
        or Fault("", "the line cannot be read", "invalid_json_line")
    )


def _several_missing(fields: dict[str, msgspec.Raw]) -> Fault | None:
    """The fields that are missing, where they are more than one: a person adds them all at once."""
    first, *others = [name for name in _REQUIRED if name not in fields] or [""]
    if not others:
        return None
    named = " and ".join(others)
    reason = f"missing, and so {'is' if len(others) == 1 else 'are'} {named}; a request has {', '.join(_REQUIRED)}"
    return Fault(first, reason, "missing_required_parameter")


def too_long(limits: IntakeLimits) -> Fault:
    reason = f"longer than {limits.max_line_bytes:,} bytes (max_line_bytes)"
    return Fault("", reason, "invalid_request")


def _kind(value: bytes) -> str:
    kinds = {"{": "an object", "[": "an array", '"': "a string", "t": "true", "f": "false", "n": "null"}
    return kinds.get(chr(value[0]), "a number")


def _too_deep(limits: IntakeLimits) -> Fault:
    reason = f"nested deeper than {limits.max_nesting} levels (max_nesting)"
    return Fault("", reason, "invalid_request")


def _malformed(line: bytes, error: Exception) -> str:
    if utf8 := _bad_text(line):
        return utf8.reason
    if line.startswith(_BOM):
        return "starts with a byte order mark, which only the file's first line may have"
    if len(line) > _DETAILED_BYTES:
        return f"not valid JSON: {error}"
    constants: list[str] = []
    try:
        json.loads(line.decode(), parse_constant=constants.append, parse_int=str)
    except json.JSONDecodeError as better:
        return f"not valid JSON: {better.msg} at column {better.colno}, found {_shown(line, better.pos)}"
    except RecursionError:
        return "not valid JSON, and nested too deep to say where"
    if constants:
        return f"not valid JSON: {constants[0]} is not a JSON value; write null"
    # The standard library lets only two things pass that the decoder refuses; this is the other.
    return "not valid JSON: a \\ud800-\\udfff escape without its other half is no character"


def _shown(line: bytes, column: int) -> str:
    found = line.decode()[column : column + 20]
    return quoted(found) if found else "the end of the line"


def _bad_text(line: bytes) -> Fault | None:
    try:
        line.decode()
    except UnicodeDecodeError as error:
        reason = f"byte {error.start + 1} (0x{line[error.start]:02x}) is not valid UTF-8"
        return Fault("", reason, "invalid_json_line")
    return None


def shape_fault(line: bytes, limits: IntakeLimits) -> Fault | None:
    """What is wrong with valid JSON before its values are looked at."""
    brackets = line.count(b"{") + line.count(b"[")
    if brackets > limits.max_nesting and depth(line) > limits.max_nesting:
        return _too_deep(limits)
    if (key := duplicate_key(line)) is not None:
        return Fault(quoted(key).strip('"'), "the key is there twice; expected once", "invalid_request")
    return None


def number_fault(line: bytes) -> Fault | None:
    """A number with so many digits that the usual parsers refuse to read it back."""
    try:
        _ANYTHING.decode(line)
    except msgspec.ValidationError:
        return Fault("", "holds a number of thousands of digits, which parsers refuse", "invalid_request")
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    return None


def _value(fields: dict[str, msgspec.Raw], name: str, expected: str) -> tuple[str, Fault | None]:
    if name not in fields:
        return "", Fault(name, f"missing; expected {expected}", "missing_required_parameter")
    kind = _kind(bytes(fields[name]))
    if kind != "a string":
        return "", Fault(name, f"found {kind}; expected {expected}", "invalid_request")
    return _TEXT.decode(fields[name]), None


def _bad_custom_id(fields: dict[str, msgspec.Raw], limits: IntakeLimits) -> Fault | None:
    value, fault = _value(fields, "custom_id", _custom_id_rule(limits))
    return fault or custom_id_fault(value, limits)


def _custom_id_rule(limits: IntakeLimits) -> str:
    return f"a string of 1 to {limits.max_custom_id_chars} characters, unique in the file"


def custom_id_fault(custom_id: str, limits: IntakeLimits) -> Fault | None:
    """Why this text cannot name a request."""
    if not custom_id:
        return Fault("custom_id", f"empty; expected {_custom_id_rule(limits)}", "invalid_request")
    if len(custom_id) > limits.max_custom_id_chars:
        found = f"{len(custom_id):,} characters long"
        return Fault("custom_id", f"{found}; expected {_custom_id_rule(limits)}", "invalid_request")
    if "\0" in custom_id:
        return Fault("custom_id", "holds the character U+0000, which cannot be stored", "invalid_request")
    return None


def _bad_method(fields: dict[str, msgspec.Raw]) -> Fault | None:
    if "method" not in fields:
        return None
    value, fault = _value(fields, "method", '"POST"')
    if fault or value == "POST":
        return fault
    return Fault("method", f'found {quoted(value)}; expected "POST"', "invalid_request")


def _bad_url(fields: dict[str, msgspec.Raw]) -> Fault | None:
    value, fault = _value(fields, "url", "a path such as /v1/chat/completions")
    return fault or url_fault(value)


def url_fault(url: str) -> Fault | None:
    """Why the engine would not send a request to this path."""
    if len(url) > MAX_URL_CHARS:
        return Fault("url", f"{len(url):,} characters long; expected at most {MAX_URL_CHARS}", "invalid_request")
    if _URL.fullmatch(url) and not _DOT_SEGMENT.search(url):
        return None
    expected = "a path such as /v1/chat/completions, without host, query, escapes or dot segments"
    return Fault("url", f"found {quoted(url)}; expected {expected}", "invalid_request")


def _bad_body(fields: dict[str, msgspec.Raw], model_required: bool, whole_answers: bool) -> Fault | None:
    expected = "a JSON object"
    if "body" not in fields:
        return Fault("body", f"missing; expected {expected}", "missing_required_parameter")
    kind = _kind(bytes(fields["body"]))
    if kind != "an object":
        return Fault("body", f"found {kind}; expected {expected}", "invalid_request")
    inner = _FIELDS.decode(fields["body"])
    missing = "model" not in inner
    if missing and model_required:
        return Fault("body.model", "missing; expected a model's name", "missing_required_parameter")
    if whole_answers and bytes(inner.get("stream", b"false")) not in (b"false", b"null"):
        found = f"found {_kind(bytes(inner['stream']))}; a batch keeps whole answers"
        return Fault("body.stream", f"{found}: leave it out or write false", "invalid_request")
    if missing:
        return None
    value, fault = _value({"body.model": inner["model"]}, "body.model", "a model's name")
    return fault or model_fault(value)


def model_fault(model: str) -> Fault | None:
    """Why this name cannot be a route."""
    expected = f"a model's name of 1 to {MAX_MODEL_CHARS} characters"
    if not model:
        return Fault("body.model", f"empty; expected {expected}", "invalid_request")
    if len(model) > MAX_MODEL_CHARS:
        return Fault("body.model", f"{len(model):,} characters long; expected {expected}", "invalid_request")
    if not model.isprintable():
        return Fault("body.model", f"found {quoted(model)}; control characters are not allowed", "invalid_request")
    return None


def too_many_routes(url: str, model: str, limits: IntakeLimits) -> Fault:
    found = f"{quoted(model)} at {quoted(url)} is one more than {limits.max_routes_per_file:,} different"
    return Fault("body.model", f"{found} models and urls (max_routes_per_file)", "invalid_request")


def quoted(text: str) -> str:
    """A value as it may appear in a message: short, on one line, no control characters."""
    shown = text if len(text) <= 60 else text[:57] + "..."
    return json.dumps(shown, ensure_ascii=not shown.isprintable())

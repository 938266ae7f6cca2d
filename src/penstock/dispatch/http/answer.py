"""Reading what an upstream answered: its errors and its wishes to be left alone, however badly put."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

from penstock.adapt.allowance import Budget
from penstock.config import KIB, MIB, RetryLimits
from penstock.model import Usage

MAX_MESSAGE_CHARS = 500
MAX_REQUEST_ID_CHARS = 128
# Decoding takes many times the bytes; an honest error is far smaller.
_MAX_ERROR_BYTES = 64 * KIB
# Text becomes a JSON string, up to six bytes for one: bound what a failed item may store.
_MAX_KEPT_TEXT_BYTES = MIB

_CODE = re.compile(r"[A-Za-z][A-Za-z0-9_.:-]{0,63}")
_TAG = re.compile(r"<[^<>]*>")
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h))+")
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
_UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_BUDGETS = (
    ("x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"),
    ("x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"),
    ("anthropic-ratelimit-requests-remaining", "anthropic-ratelimit-requests-reset"),
    ("anthropic-ratelimit-tokens-remaining", "anthropic-ratelimit-tokens-reset"),
    ("anthropic-ratelimit-input-tokens-remaining", "anthropic-ratelimit-input-tokens-reset"),
    ("anthropic-ratelimit-output-tokens-remaining", "anthropic-ratelimit-output-tokens-reset"),
)
_STATED_BUDGETS = {
    kind: (
        tuple(f"x-ratelimit-{name}-{kind}" for name in ("limit", "remaining", "reset")),
        tuple(f"anthropic-ratelimit-{kind}-{name}" for name in ("limit", "remaining", "reset")),
    )
    for kind in ("requests", "tokens")
}

_any_json = msgspec.json.Decoder(msgspec.Raw)

_MAX_USAGE_BYTES = 16 * KIB
_MAX_TOKENS = 2**31 - 1

# Where OpenAI, its imitators and Anthropic put what an answer cost.


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Told(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _Costly(msgspec.Struct):
    usage: _Told | None = None


class _Odd(msgspec.Struct):
    usage: msgspec.Raw = msgspec.Raw(b"null")


_DETAILS = tuple(name for name in _Told.__struct_fields__ if name.endswith("_details"))
_COUNTS = tuple(name for name in _Told.__struct_fields__ if name not in _DETAILS)

_costly_json = msgspec.json.Decoder(_Costly)
_odd_json = msgspec.json.Decoder(_Odd)


class Answer(msgspec.Struct, frozen=True):
    """A whole HTTP answer. Header names are lower case."""

    status: int
    body: bytes
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    duration_ms: int = 0

    @property
    def request_id(self) -> str | None:
        value = self.headers.get("x-request-id") or self.headers.get("request-id")
        return _one_line(value)[:MAX_REQUEST_ID_CHARS] or None if value else None


@dataclass(slots=True, frozen=True)
class UpstreamError:
    code: str
    message: str
    words: frozenset[str]
    """Everything the upstream called the error: code, type, status."""


def is_json(body: bytes) -> bool:
    """Whether the bytes are one JSON value in valid UTF-8."""
    return _checked(body, _any_json)[0]


def json_with_usage(body: bytes) -> tuple[bool, Usage | None]:
    """Whether the bytes are JSON, as `is_json` says, and what they say the answer cost: both in one pass."""
    try:
        valid, found = _checked(body, _costly_json)
    except msgspec.ValidationError:
        return _json_with_odd_usage(body)
    if isinstance(found, _Costly):
        return valid, None if found.usage is None else _usage(found.usage)
    return valid, _lenient_usage(found.get("usage")) if isinstance(found, dict) else None


def _json_with_odd_usage(body: bytes) -> tuple[bool, Usage | None]:
    """The same for an answer that is no object, or whose account has something amiss."""
    try:
        valid, found = _checked(body, _odd_json)
        raw = bytes(found.usage) if isinstance(found, _Odd) else b""
        return valid, _lenient_usage(msgspec.json.decode(raw)) if 0 < len(raw) <= _MAX_USAGE_BYTES else None
    except (ValueError, RecursionError):
        return is_json(body), None


def _checked(body: bytes, decoder: msgspec.json.Decoder[Any]) -> tuple[bool, Any]:
    """Whether the bytes are JSON, and what the decoder made of them. Raises if it is not what the decoder is for."""
    try:
        # Skipping a value does not look inside its strings.
        text = None if body.isascii() else body.decode()
        return True, decoder.decode(body)
    except (UnicodeDecodeError, RecursionError):
        return False, None
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        # The grammar allows half of a surrogate pair, as an answer cut off inside an emoji has it:
        # that must not cost a second call.
        return _decoded_by_grammar(text or body.decode()) if b"\\u" in body else (False, None)


def _decoded_by_grammar(text: str) -> tuple[bool, Any]:
    try:
        return True, json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return False, None


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _usage(told: _Told) -> Usage:
    inputs = told.prompt_tokens_details or told.input_tokens_details
    outputs = told.completion_tokens_details or told.output_tokens_details
    prompt = told.input_tokens if told.prompt_tokens is None else told.prompt_tokens
    answer = told.output_tokens if told.completion_tokens is None else told.completion_tokens
    cached = told.cache_read_input_tokens
    if cached is not None or told.cache_creation_input_tokens is not None:
        # Anthropic counts what it found in its cache, or put there, beside the other input.
        prompt = _tokens(prompt) + _tokens(cached) + _tokens(told.cache_creation_input_tokens)
    elif inputs is not None:
        cached = inputs.cached_tokens
    reasoning = None if outputs is None else outputs.reasoning_tokens
    return Usage(_tokens(prompt), _tokens(cached), _tokens(answer), _tokens(reasoning))


def _lenient_usage(told: Any) -> Usage | None:
    """What is left of an account when all that makes no sense in it is taken out."""
    if not isinstance(told, dict):
        return None
    kept: dict[str, Any] = {name: _tokens(told[name]) for name in _COUNTS if told.get(name) is not None}
    for name in _DETAILS:
        details = told.get(name)
        if isinstance(details, dict):
            kept[name] = _Details(_tokens(details.get("cached_tokens")), _tokens(details.get("reasoning_tokens")))
    return _usage(_Told(**kept))


def _tokens(value: Any) -> int:
    """A believable number of tokens; 0 for anything else."""
    return value if type(value) is int and 0 <= value <= _MAX_TOKENS else 0


def kept_body(body: bytes, secrets: Sequence[str] = ()) -> bytes | None:
    """A failed answer's body as JSON: itself if it is JSON, else its text as a string; `secrets` are kept out."""
    if not body:
        return None
    for secret in secrets:
        body = body.replace(secret.encode(), b"[redacted]")
    if is_json(body):
        return body
    return msgspec.json.encode(body[:_MAX_KEPT_TEXT_BYTES].decode("utf-8", "replace"))


def short(text: str) -> str:
    """One printable line of bounded length."""
    line = _one_line(text[: 8 * MAX_MESSAGE_CHARS])
    return line if len(line) <= MAX_MESSAGE_CHARS else line[: MAX_MESSAGE_CHARS - 1] + "…"


def _one_line(text: str) -> str:
    if text.isprintable():
        return " ".join(text.split())
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def error_of(answer: Answer, secrets: Sequence[str] = ()) -> UpstreamError:
    """The upstream's own code and message, or the best that can be said without them."""
    told = _told(answer.body)
    names = [name for name in _names(told) if _CODE.fullmatch(name) and not any(secret in name for secret in secrets)]
    code = names[0] if names else f"http_{answer.status}"
    return UpstreamError(code, _message(answer, told, secrets), frozenset(names))


def _told(body: bytes) -> Any:
    """The part of an error body that speaks of the error, whatever its shape; None if unreadable."""
    if len(body) > _MAX_ERROR_BYTES:
        return None
    try:
        whole = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return None
    if isinstance(whole, list) and len(whole) == 1:
        whole = whole[0]
    if isinstance(whole, dict) and whole.get("error"):
        return whole["error"]
    return whole


def _names(told: Any) -> list[str]:
    if not isinstance(told, dict):
        return []
    return [name for name in (told.get("code"), told.get("type"), told.get("status")) if isinstance(name, str)]


def _message(answer: Answer, told: Any, secrets: Sequence[str]) -> str:
    text = told if isinstance(told, str) else ""
    if isinstance(told, dict):
        said = told.get("message") or told.get("detail") or ""
        text = said if isinstance(said, str) else msgspec.json.encode(said).decode()
    if not text and 300 <= answer.status < 400:
        text = f"redirect to {answer.headers.get('location') or 'nowhere'}: not followed"
    if not text:
        text = _TAG.sub(" ", answer.body[: 8 * KIB].decode("utf-8", "replace"))
    for secret in secrets:  # before the text is cut, so that no part of one is left
        text = text.replace(secret, "[redacted]")
    return short(f"HTTP {answer.status}: {text}".rstrip(": "))


def wait_hint_s(answer: Answer, limits: RetryLimits, now_s: float, *, with_budgets: bool) -> float:
    """How long the upstream asked to be left alone; 0 if it did not say so in a way to be believed."""
    told_s = (
        _positive(_number(answer.headers.get("retry-after-ms")), scale=1e-3)
        or _positive(_seconds_or_date(answer.headers.get("retry-after"), now_s))
        or _positive(_retry_delay(answer.body))
    )
    if told_s:
        return min(told_s, limits.retry_after_max_s)
    if with_budgets:
        # A reset is the time to a full refill, not to the next slot: a hint, held to one backoff.
        return min(_budget_reset_s(answer.headers, now_s), limits.retry_cap_s)
    return 0.0


def _positive(value: float | None, scale: float = 1.0) -> float:
    return value * scale if value is not None and math.isfinite(value) and value > 0 else 0.0


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None


def _seconds_or_date(text: str | None, now_s: float) -> float | None:
    seconds = _number(text)
    if seconds is not None or not text:
        return seconds
    try:
        date = parsedate_to_datetime(text)
    except (ValueError, TypeError, OverflowError, IndexError):
        return None
    return _until(date, now_s)


def _until(date: datetime, now_s: float) -> float | None:
    try:
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - now_s
    except (OverflowError, ValueError):
        return None


def _retry_delay(body: bytes) -> float | None:
    """Gemini's wish: a detail of the error with `"retryDelay": "13s"`."""
    told = _told(body) if b"retryDelay" in body else None
    details = told.get("details") if isinstance(told, dict) else None
    for detail in details if isinstance(details, list) else ():
        if isinstance(detail, dict) and isinstance(detail.get("retryDelay"), str):
            return _duration(detail["retryDelay"])
    return None


def _duration(text: str) -> float | None:
    """A duration as Go prints it: `12ms`, `1s`, `6m0s`."""
    if len(text) > 64 or not _DURATION.fullmatch(text):
        return None
    return sum(float(amount) * _UNIT_S[unit] for amount, unit in _DURATION_PART.findall(text))


def read_budgets(headers: Mapping[str, str], now_s: float) -> dict[str, Budget]:
    """Budgets of calls and tokens that an answer's headers state, by kind."""
    budgets: dict[str, Budget] = {}
    for kind, names in _STATED_BUDGETS.items():
        for limit, remaining, reset in names:
            if limit in headers and (text := headers.get(reset)):
                amounts = _number(headers.get(limit)), _number(headers.get(remaining)), _reset_s(text, now_s)
                if None not in amounts:
                    budgets[kind] = Budget(*(amount or 0.0 for amount in amounts))
    return budgets


def _budget_reset_s(headers: Mapping[str, str], now_s: float) -> float:
    """The longest reset among the budgets that are spent."""
    longest = 0.0
    for remaining, reset in _BUDGETS:
        text = headers.get(reset)
        if text and _number(headers.get(remaining)) == 0:
            longest = max(longest, _positive(_reset_s(text, now_s)))
    return longest


def _reset_s(text: str, now_s: float) -> float | None:
    seconds = _number(text)
    if seconds is None:
        seconds = _duration(text)
    if seconds is not None:
        return seconds
    try:
        return _until(datetime.fromisoformat(text), now_s)
    except ValueError:
        return None

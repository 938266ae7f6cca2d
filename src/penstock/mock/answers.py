"""Answers of the mock. The same request bytes always get the same answer bytes.

The text of an answer echoes the start of the last user message and ends in the digest of the
request body, so that a test can tell whether an answer belongs to its request. Where the request asks for JSON of a
schema, the answer is a value that fits, with that text in its texts.
"""

from __future__ import annotations

import base64
import math
import re
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b, shake_256
from sys import byteorder
from typing import Any

import msgspec

from penstock.mock.fitting import fitting

ECHO_MAX_CHARS = 200
DIMENSIONS_DEFAULT = 8
DIMENSIONS_MAX = 4_096
EMBEDDING_MAX_NUMBERS = 1_000_000
CREATED_AT = 1_767_225_600
MODELS = ("mock-chat", "mock-embedding", "mock-moderation")
MODERATION_CATEGORIES = ("harassment", "hate", "illicit", "self-harm", "sexual", "violence")

_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+);base64,")

encode_json = msgspec.json.Encoder().encode


class UnanswerableError(Exception):
    """Request that is valid JSON and still cannot be answered; the text says why."""


class Ask(msgspec.Struct):
    """Fields that every endpoint reads from a request body; unknown members are ignored."""

    model: str = "mock-moderation"
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None

    def text(self) -> str:
        """The part of the input that the answer echoes."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise UnanswerableError if the types are right and the values are not."""


class Message(msgspec.Struct):
    role: str = "user"
    content: Any = None


class ChatAsk(Ask, kw_only=True):
    model: str
    messages: list[Message]
    response_format: Any = None

    def text(self) -> str:
        return _last_user_text(self.messages)

    @property
    def schema(self) -> Any:
        """The JSON schema that the answer shall fit; None if it is plain text."""
        told = self.response_format if isinstance(self.response_format, dict) else {}
        if told.get("type") == "json_object":
            return {"type": "object", "properties": {"answer": {"type": "string"}}}
        described = told.get("json_schema")
        return described.get("schema") if isinstance(described, dict) else None

    def check(self) -> None:
        if not self.messages:
            raise UnanswerableError("messages is an empty list")


class CompletionAsk(Ask, kw_only=True):
    model: str
    prompt: str | list[Any] = ""

    def text(self) -> str:
        return _text_of(self.prompt)


class ResponseAsk(Ask, kw_only=True):
    model: str
    input: str | list[Message]

    def text(self) -> str:
        return self.input if isinstance(self.input, str) else _last_user_text(self.input)


class EmbeddingAsk(Ask, kw_only=True):
    model: str
    input: str | list[Any]
    dimensions: int | None = None
    encoding_format: str | None = None

    def text(self) -> str:
        return _text_of(self.input)

    def check(self) -> None:
        if not 1 <= self.size <= DIMENSIONS_MAX:
            raise UnanswerableError(f"dimensions must be 1 to {DIMENSIONS_MAX}")
        if len(_inputs(self.input)) * self.size > EMBEDDING_MAX_NUMBERS:
            raise UnanswerableError(f"inputs times dimensions must not exceed {EMBEDDING_MAX_NUMBERS}")

    @property
    def size(self) -> int:
        return DIMENSIONS_DEFAULT if self.dimensions is None else self.dimensions


class ModerationAsk(Ask, kw_only=True):
    input: str | list[Any]

    def text(self) -> str:
        return _text_of(self.input)

    def check(self) -> None:
        _inputs(self.input)


def _text_of(content: Any) -> str:
    """The text in a message's content: a string, or the text parts of a list."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return " ".join(part for part in map(_text_of_part, content) if part is not None)


def _text_of_part(part: Any) -> str | None:
    """A part's text; for an image that is sent along, its type and size."""
    if not isinstance(part, dict):
        return part if isinstance(part, str) else None
    if isinstance(part.get("text"), str):
        return str(part["text"])
    image = part.get("image_url")
    url = str(image.get("url") if isinstance(image, dict) else image)
    found = _DATA_URL.match(url)
    if found is None:
        return None
    size = (len(url) - found.end()) * 3 // 4 - url[-2:].count("=")
    return f"({found[1]}, {size:,} bytes)"


def _last_user_text(messages: list[Message]) -> str:
    said = (message for message in reversed(messages) if message.role == "user")
    message = next(said, messages[-1] if messages else Message())
    return _text_of(message.content)


def digest_of(body: bytes) -> str:
    """The digest that ends the text of the answer to `body`."""
    return blake2b(body, digest_size=8).hexdigest()


def text_for(asked: str, digest: str, response_bytes: int) -> str:
    text = f"echo: {asked[:ECHO_MAX_CHARS]} [{digest}]"
    if response_bytes:
        missing = response_bytes - len(text.encode())
        if missing > 0:
            text = f"{'.' * (missing - 1)} {text}"
    return text


def _tokens(text: str) -> int:
    return len(text) // 4 + 1


@dataclass(frozen=True, slots=True)
class Reply:
    """Text of an answer, with the values that its envelope needs."""

    ask: Any
    digest: str
    text: str
    tokens_in: int
    tokens_out: int


def reply_to(ask: Ask, digest: str, response_bytes: int, tokens_out: int | None = None) -> Reply:
    """The reply to a request; its text counts as `tokens_out` tokens, or by its length if that is None."""
    asked = ask.text()
    text = text_for(asked, digest, response_bytes)
    schema = ask.schema if isinstance(ask, ChatAsk) else None
    if schema is not None:
        text = encode_json(fitting(schema, text, digest)).decode()
    return Reply(ask, digest, text, _tokens(asked), _tokens(text) if tokens_out is None else tokens_out)


def _chat_usage(reply: Reply) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.tokens_in,
        "completion_tokens": reply.tokens_out,
        "total_tokens": reply.tokens_in + reply.tokens_out,
    }


def chat(reply: Reply) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{reply.digest}",
        "object": "chat.completion",
        "created": CREATED_AT,
        "model": reply.ask.model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": reply.text, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": _chat_usage(reply),
        "system_fingerprint": "fp_mock",
    }


def completion(reply: Reply) -> dict[str, Any]:
    return {
        "id": f"cmpl-{reply.digest}",
        "object": "text_completion",
        "created": CREATED_AT,
        "model": reply.ask.model,
        "choices": [{"index": 0, "text": reply.text, "logprobs": None, "finish_reason": "stop"}],
        "usage": _chat_usage(reply),
    }


def response(reply: Reply) -> dict[str, Any]:
    content = {"type": "output_text", "text": reply.text, "annotations": []}
    return {
        "id": f"resp_{reply.digest}",
        "object": "response",
        "created_at": CREATED_AT,
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "model": reply.ask.model,
        "output": [
            {
                "id": f"msg_{reply.digest}",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [content],
            }
        ],
        "usage": {
            "input_tokens": reply.tokens_in,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": reply.tokens_out,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.tokens_in + reply.tokens_out,
        },
    }


def message(reply: Reply) -> dict[str, Any]:
    return {
        "id": f"msg_{reply.digest}",
        "type": "message",
        "role": "assistant",
        "model": reply.ask.model,
        "content": [{"type": "text", "text": reply.text}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": reply.tokens_in, "output_tokens": reply.tokens_out},
    }


def embeddings(reply: Reply) -> dict[str, Any]:
    ask: EmbeddingAsk = reply.ask
    as_base64 = ask.encoding_format == "base64"
    vectors = (embedding_of(text, ask.size) for text in _inputs(ask.input))
    data = [
        {"object": "embedding", "index": at, "embedding": _floats_base64(vector) if as_base64 else vector}
        for at, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": reply.tokens_in, "total_tokens": reply.tokens_in}
    return {"object": "list", "data": data, "model": ask.model, "usage": usage}


def _inputs(value: str | list[Any]) -> list[bytes]:
    """The separate inputs: one string, one list of tokens, or a list of either."""
    if isinstance(value, str):
        return [value.encode()]
    if not value:
        raise UnanswerableError("input is an empty list")
    if all(isinstance(item, int) for item in value):
        return [encode_json(value)]
    return [item.encode() if isinstance(item, str) else encode_json(item) for item in value]


def embedding_of(text: bytes, dimensions: int) -> list[float]:
    """A unit vector that depends on nothing but the text and the number of dimensions."""
    raw = array("h", shake_256(text).digest(2 * dimensions))
    if byteorder == "big":
        raw.byteswap()
    length = math.sqrt(sum(number * number for number in raw)) or 1.0
    return [round(number / length, 6) for number in raw]


def _floats_base64(vector: list[float]) -> str:
    floats = array("f", vector)
    if byteorder == "big":
        floats.byteswap()
    return base64.b64encode(floats.tobytes()).decode("ascii")


def moderation(reply: Reply) -> dict[str, Any]:
    result = {
        "flagged": False,
        "categories": dict.fromkeys(MODERATION_CATEGORIES, False),
        "category_scores": dict.fromkeys(MODERATION_CATEGORIES, 0.0),
    }
    count = len(_inputs(reply.ask.input))
    return {"id": f"modr-{reply.digest}", "model": reply.ask.model, "results": [result] * count}


def models() -> dict[str, Any]:
    data = [{"id": name, "object": "model", "created": CREATED_AT, "owned_by": "penstock"} for name in MODELS]
    return {"object": "list", "data": data}


Envelope = Callable[[Reply], dict[str, Any]]
Stream = Callable[[Reply], Iterator[bytes]]

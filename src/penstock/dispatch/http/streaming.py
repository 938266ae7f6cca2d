"""Answers that are read as they come: their pieces are handed on at once, and the whole is an answer like any other."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from time import monotonic
from typing import Literal, Protocol

import msgspec

from penstock.dispatch.http.answer import Answer
from penstock.dispatch.http.client import HttpClient
from penstock.dispatch.http.redaction import Redactor
from penstock.model import Item

EVENT_STREAM = "text/event-stream"
_MAX_TYPE_CHARS = 200


class Pieces(Protocol):
    """One answer on its way."""

    def put(self, piece: bytes) -> None: ...

    def end(self) -> None:
        """Nothing more comes. What was not handed on yet need not be: the whole is recorded."""


class Streams(Protocol):
    """Where pieces go."""

    def begin(self, item: Item, content_type: str) -> Pieces: ...


class StoredStream(msgspec.Struct):
    """A whole stream as JSON, which is what an outcome holds. The text is what the pieces add up to, byte by byte."""

    object: Literal["stream"]
    content_type: str
    text: str


async def streamed(
    client: HttpClient, url: str, headers: Mapping[str, str], item: Item, streams: Streams, keys: Redactor
) -> Answer:
    """Call, and hand the answer on as it comes if it is a stream, without `keys`. Raises TransportError."""
    started = monotonic()
    async with client.open("POST", url, headers, item.raw) as answer:
        told = keys.headers(answer.headers)
        content_type = told.get("content-type") or ""
        if not 200 <= answer.status < 300 or not content_type.lower().startswith(EVENT_STREAM):
            return keys.answer(Answer(answer.status, await answer.read(), answer.headers, _since_ms(started)))
        # A browser would take the last of several types.
        if len(content_type) > _MAX_TYPE_CHARS or not content_type.isprintable() or "," in content_type:
            content_type = EVENT_STREAM
        texts: list[str] = []
        # Pieces may end within a character, and an upstream may send what is none: both ways must read the same.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces = streams.begin(item, content_type)
        try:
            async for piece in keys.pieces(answer):
                if text := decoder.decode(piece):
                    texts.append(text)
                    pieces.put(text.encode())
        finally:
            pieces.end()
        texts.append(decoder.decode(b"", final=True))
        whole = msgspec.json.encode(StoredStream("stream", content_type, "".join(texts)))
        return Answer(answer.status, whole, told, _since_ms(started))


def _since_ms(started: float) -> int:
    return int((monotonic() - started) * 1000)

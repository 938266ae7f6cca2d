"""The same answers as server-sent events, in the dialect of each endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.mock import answers
from penstock.mock.answers import Reply, encode_json

PIECES_MAX = 16
DONE = b"data: [DONE]\n\n"


def _data(value: dict[str, Any]) -> bytes:
    return b"data: %s\n\n" % encode_json(value)


def _event(value: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (value["type"].encode(), encode_json(value))


def _pieces(text: str) -> Iterator[str]:
    size = -(-len(text) // PIECES_MAX)
    return (text[at : at + size] for at in range(0, len(text), size))


def chat(reply: Reply) -> Iterator[bytes]:
    whole = answers.chat(reply)
    chunk = {name: whole[name] for name in ("id", "created", "model", "system_fingerprint")}
    chunk["object"] = "chat.completion.chunk"

    def delta(delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return _data(chunk | {"choices": [choice]})

    yield delta({"role": "assistant", "content": ""})
    for piece in _pieces(reply.text):
        yield delta({"content": piece})
    yield delta({}, "stop")
    if (reply.ask.stream_options or {}).get("include_usage"):
        yield _data(chunk | {"choices": [], "usage": whole["usage"]})
    yield DONE


def completion(reply: Reply) -> Iterator[bytes]:
    whole = answers.completion(reply)
    *pieces, last = _pieces(reply.text)
    for piece in pieces:
        choice = {"index": 0, "text": piece, "logprobs": None, "finish_reason": None}
        yield _data(whole | {"choices": [choice], "usage": None})
    choice = {"index": 0, "text": last, "logprobs": None, "finish_reason": "stop"}
    yield _data(whole | {"choices": [choice]})
    yield DONE


def response(reply: Reply) -> Iterator[bytes]:
    whole = answers.response(reply)
    begun = whole | {"status": "in_progress", "output": [], "usage": None}
    place = {"item_id": f"msg_{reply.digest}", "output_index": 0, "content_index": 0}
    number = 0
    yield _event({"type": "response.created", "sequence_number": number, "response": begun})
    for number, piece in enumerate(_pieces(reply.text), start=1):
        yield _event({"type": "response.output_text.delta", "sequence_number": number, **place, "delta": piece})
    done = {"type": "response.output_text.done", "sequence_number": number + 1, **place, "text": reply.text}
    yield _event(done)
    yield _event({"type": "response.completed", "sequence_number": number + 2, "response": whole})


def message(reply: Reply) -> Iterator[bytes]:
    usage = {"input_tokens": reply.tokens_in, "output_tokens": 0}
    begun = answers.message(reply) | {"content": [], "stop_reason": None, "usage": usage}
    yield _event({"type": "message_start", "message": begun})
    yield _event({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})
    for piece in _pieces(reply.text):
        delta = {"type": "text_delta", "text": piece}
        yield _event({"type": "content_block_delta", "index": 0, "delta": delta})
    yield _event({"type": "content_block_stop", "index": 0})
    stop = {"stop_reason": "end_turn", "stop_sequence": None}
    yield _event({"type": "message_delta", "delta": stop, "usage": {"output_tokens": reply.tokens_out}})
    yield _event({"type": "message_stop"})

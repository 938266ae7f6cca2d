"""Server-sent events, read from a stream of bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator

_EVENT_MAX_BYTES = 64 * 1024 * 1024


async def read_events(pieces: AsyncIterator[bytes]) -> AsyncIterator[tuple[str, str]]:
    """Read (event, data) of every whole event; comments, ids and retry times are passed over."""
    name, data, buffer = "message", list[str](), b""
    async for piece in pieces:
        *lines, buffer = (buffer + piece).split(b"\n")
        if len(buffer) > _EVENT_MAX_BYTES:
            raise ValueError("an event without end")
        for raw in lines:
            line = raw.rstrip(b"\r").decode("utf-8", "replace")
            if not line:
                if data:
                    yield name, "\n".join(data)
                name, data = "message", []
                continue
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if field == "event":
                name = value
            elif field == "data":
                data.append(value)

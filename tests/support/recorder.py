"""An upstream under a test's thumb: it notes every call with its beginning and end, and holds answers back if told to.

What a call is answered depends on what it says: `hold NAME ...` waits for `release(NAME)`, `fail CODE` is that status,
anything else is echoed. With `stream` the words of the answer come one by one; `hold` then waits after the first.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any

from tests.support.hostile import message, read_head
from tests.support.tcp_server import LoopThread, TcpServer
from tests.support.wait import wait_until


@dataclass(slots=True)
class Noted:
    """One call."""

    path: str
    text: str
    raw: bytes
    headers: dict[str, str]
    began: int
    ended: int | None = None
    """Beginnings and ends are numbered in one sequence."""


@dataclass
class Recorder:
    """What has been called so far."""

    thread: LoopThread
    url: str = ""
    calls: list[Noted] = field(default_factory=list)
    _clock: Iterator[int] = field(default_factory=count)
    _gates: dict[str, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))
    """Of the loop's thread."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def texts(self) -> list[str]:
        """What was asked, in order."""
        return [call.text for call in self.calls]

    def release(self, name: str) -> None:
        self.thread.do(lambda: self._gates[name].set())

    def wait_called(self, text: str, times: int = 1) -> None:
        def called() -> bool:
            return self.texts.count(text) >= times

        called.__qualname__ = f"'{text}' was called {times} times"
        wait_until(called, 30)

    def overlaps(self, calls: list[Noted]) -> list[tuple[Noted, Noted]]:
        """Pairs of which the second began before the first had ended."""
        ordered = sorted(calls, key=lambda call: call.began)
        pairs = pairwise(ordered)
        return [(a, b) for a, b in pairs if a.ended is None or b.began < a.ended]

    def begin(self, path: str, text: str, raw: bytes, headers: dict[str, str]) -> Noted:
        with self._lock:
            noted = Noted(path, text, raw, headers, next(self._clock))
            self.calls.append(noted)
        return noted

    def end(self, noted: Noted) -> None:
        with self._lock:
            noted.ended = next(self._clock)

    async def hold(self, text: str) -> None:
        words = text.split()
        if words[:1] == ["hold"]:
            with suppress(TimeoutError):
                async with asyncio.timeout(60):
                    await self._gates[words[1]].wait()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (request := await read_head(reader, 0)) is not None:
            raw = await reader.readexactly(int(request.headers["content-length"]))
            body = json.loads(raw)
            text = said(body)
            noted = self.begin(request.path, text, raw, request.headers)
            words = text.split()
            if words[:1] == ["fail"]:
                problem = {"message": "it fails", "type": "oops", "param": None, "code": "oops"}
                self._answer(writer, noted, int(words[1]), {"error": problem})
            elif body.get("stream"):
                await self._stream(writer, noted, text)
                if words[-1:] == ["broken"]:  # as a server that dies: no last chunk
                    return
            else:
                await self.hold(text)
                said_back = {"role": "assistant", "content": f"echo {text}"}
                choice = {"index": 0, "finish_reason": "stop", "message": said_back}
                answer = {"id": "c", "object": "chat.completion", "model": body["model"], "choices": [choice]}
                self._answer(writer, noted, 200, answer)
            await writer.drain()

    def _answer(self, writer: asyncio.StreamWriter, noted: Noted, status: int, value: Any) -> None:
        headers = {"content-type": "application/json", "x-request-id": "upstream-1"}
        self.end(noted)
        writer.write(message(status, json.dumps(value).encode(), headers))

    async def _stream(self, writer: asyncio.StreamWriter, noted: Noted, text: str) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        words = f"echo {text} ¡sí!".split()
        for number, word in enumerate(words):
            delta = {"index": 0, "delta": {"content": word if number == 0 else f" {word}"}, "finish_reason": None}
            event = json.dumps({"id": "c", "object": "chat.completion.chunk", "model": "m", "choices": [delta]})
            await _send_chunk(writer, f"data: {event}\n\n".encode())
            if number == 0:
                await self.hold(text)
        self.end(noted)
        if words[-2] != "broken":
            await _send_chunk(writer, b"data: [DONE]\n\n")
            await _send_chunk(writer, b"")


def said(body: dict[str, Any]) -> str:
    """The last thing a request says, in whichever dialect."""
    if "messages" in body:
        return str(body["messages"][-1]["content"])
    return str(body.get("input") or body.get("prompt") or "")


async def _send_chunk(writer: asyncio.StreamWriter, content: bytes) -> None:
    if writer.is_closing():
        raise ConnectionResetError
    writer.write(b"%x\r\n%b\r\n" % (len(content), content))
    await writer.drain()


@contextmanager
def recording() -> Iterator[Recorder]:
    """Listens for the length of the block."""
    with LoopThread("recorder") as thread:
        recorder = Recorder(thread)
        with thread.entered(TcpServer(recorder.serve)) as server:
            recorder.url = f"http://127.0.0.1:{server.port}"
            yield recorder

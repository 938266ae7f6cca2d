"""An upstream under a test's thumb: it notes every call with its beginning and end, and holds answers back if told to.

What a call is answered depends on what it says: `hold NAME ...` waits for `release(NAME)`, `fail CODE` is that status,
anything else is echoed. With `stream` the words of the answer come one by one; `hold` then waits after the first.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count, pairwise
from typing import Any

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

    url: str = ""
    calls: list[Noted] = field(default_factory=list)
    _clock: Iterator[int] = field(default_factory=count)
    _gates: dict[str, threading.Event] = field(default_factory=lambda: defaultdict(threading.Event))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def texts(self) -> list[str]:
        """What was asked, in order."""
        return [call.text for call in self.calls]

    def release(self, name: str) -> None:
        self._gates[name].set()

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

    def hold(self, text: str) -> None:
        words = text.split()
        if words[:1] == ["hold"]:
            self._gates[words[1]].wait(60)


def said(body: dict[str, Any]) -> str:
    """The last thing a request says, in whichever dialect."""
    if "messages" in body:
        return str(body["messages"][-1]["content"])
    return str(body.get("input") or body.get("prompt") or "")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    recorder: Recorder

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["content-length"]))
        body = json.loads(raw)
        text = said(body)
        noted = self.recorder.begin(self.path, text, raw, {k.lower(): v for k, v in self.headers.items()})
        words = text.split()
        if words[:1] == ["fail"]:
            problem = {"message": "it fails", "type": "oops", "param": None, "code": "oops"}
            self._answer(noted, int(words[1]), {"error": problem})
        elif body.get("stream"):
            self._stream(noted, text)
        else:
            self.recorder.hold(text)
            message = {"role": "assistant", "content": f"echo {text}"}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            self._answer(
                noted, 200, {"id": "c", "object": "chat.completion", "model": body["model"], "choices": [choice]}
            )

    def _answer(self, noted: Noted, status: int, value: Any) -> None:
        content = json.dumps(value).encode()
        self.recorder.end(noted)
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.send_header("x-request-id", "upstream-1")
        self.end_headers()
        self.wfile.write(content)

    def _stream(self, noted: Noted, text: str) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        words = f"echo {text} ¡sí!".split()
        for number, word in enumerate(words):
            delta = {"index": 0, "delta": {"content": word if number == 0 else f" {word}"}, "finish_reason": None}
            event = json.dumps({"id": "c", "object": "chat.completion.chunk", "model": "m", "choices": [delta]})
            self._chunk(f"data: {event}\n\n".encode())
            if number == 0:
                self.recorder.hold(text)
        self.recorder.end(noted)
        if words[-2] == "broken":  # as a server that dies: no last chunk
            self.close_connection = True
            self.connection.close()
            return
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _chunk(self, content: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(content), content))
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 -- the library's name
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


@contextmanager
def recording() -> Iterator[Recorder]:
    """Listens for the length of the block."""
    recorder = Recorder()
    handler = type("Handler", (_Handler,), {"recorder": recorder})
    with _Server(("127.0.0.1", 0), handler) as server:
        recorder.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield recorder
        finally:
            server.shutdown()

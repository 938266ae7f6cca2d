"""An upstream that counts the calls it has at once: one line in, one line out, on a connection of its own.

    with counting_calls() as gauge:
        ...  # processors call it: PROCESSOR % gauge.port
        assert gauge.peak <= 3

A caller that dies closes its connection, and its call is over.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator

from tests.support.tcp_server import LoopThread, TcpServer

# The first attempt at every seventh article is answered "later", and every tenth article "never" until it is mended.
PROCESSOR = """
import socket
import penstock

def call(item):
    sku = item.body["sku"]
    with socket.create_connection(("127.0.0.1", %d)) as connection, connection.makefile("rw") as lines:
        lines.write(f"{sku} {item.attempt}\\n")
        lines.flush()
        answer = lines.readline().strip()
    if answer == "later":
        raise penstock.Retry("later", after=0.01)
    if answer == "never":
        raise penstock.Fail("never")
    return {"answer": answer}
"""
CONFIG = """
[[processors]]
name = "call"
function = "processors_of_tests:call"
concurrency = 8
"""


class CallGauge:
    """How many calls there are, have been at most, and of what."""

    def __init__(self, call_s: float) -> None:
        self._call_s = call_s
        self.now = 0
        self.peak = 0
        self.calls: Counter[int] = Counter()
        """Calls that were answered, by article."""
        self.mended = False
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sku, attempt = map(int, (await reader.readline()).split())
        self.now += 1
        self.peak = max(self.peak, self.now)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._call_s):
                    await reader.read()  # to its end: the caller has died
                    return
            self.calls[sku] += 1
            answer = "fine"
            if sku % 10 == 0 and not self.mended:
                answer = "never"
            elif sku % 7 == 0 and attempt == 1:
                answer = "later"
            writer.write(f"{answer}\n".encode())
        finally:
            self.now -= 1


@contextlib.contextmanager
def counting_calls(call_s: float = 0.02) -> Iterator[CallGauge]:
    gauge = CallGauge(call_s)
    with LoopThread("gauge") as thread, thread.entered(TcpServer(gauge.serve)) as server:
        gauge.port = server.port
        yield gauge

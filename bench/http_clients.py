"""Which HTTP client? All behind the same protocol, on the path that an item really takes.

    python bench/http_clients.py [--requests 10000] [--rounds 3]

A cheap upstream in a process of its own answers 500 bytes of JSON to requests of 600 bytes. Each
client runs inside the HTTP processor and its dispatcher, with every time limit and the size limit
on, uvloop as in production. CPU is that of this process alone, client threads included.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import statistics
import sys
from collections.abc import Callable, Mapping
from multiprocessing.queues import Queue
from pathlib import Path
from time import perf_counter
from typing import cast
from uuid import uuid4

import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.aiohttp_transport import AiohttpTransport
from penstock.config import DispatchLimits, RetryLimits
from penstock.dispatch.direct import DirectTransport
from penstock.dispatch.http import HttpProcessor
from penstock.dispatch.transport import PyreqwestTransport, Transport
from penstock.model import Item, Lease, Outcome, OutcomeState, Verdict

IN_FLIGHT = (1, 64, 512)
CLIENTS: dict[str, Callable[[DispatchLimits, Mapping[str, str]], Transport]] = {
    "pyreqwest": PyreqwestTransport,
    "direct": DirectTransport,
    "aiohttp": AiohttpTransport,
}
BODY = b'{"model":"m","messages":[{"role":"user","content":"%s"}]}' % (b"x" * 546)
ANSWER = b'{"id":"x","choices":[{"message":{"role":"assistant","content":"%s"}}]}' % (b"y" * 430)
RESPONSE = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nX-Request-Id: req_1\r\nContent-Length: %d\r\n\r\n%s"
) % (len(ANSWER), ANSWER)


class CheapUpstream(asyncio.Protocol):
    """Just enough HTTP to find where a request ends."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._buffer = b""

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer + data
        while (head_end := buffer.find(b"\r\n\r\n")) >= 0:
            head = buffer[:head_end].lower() + b"\r\n"
            length_at = head.index(b"content-length:") + 15
            end = head_end + 4 + int(head[length_at : head.index(b"\r\n", length_at)])
            if len(buffer) < end:
                break
            buffer = buffer[end:]
            self._transport.write(RESPONSE)
        self._buffer = buffer


def serve(port: Queue[int]) -> None:
    async def forever() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(CheapUpstream, "127.0.0.1", 0, backlog=4096)
        port.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(forever())


async def measure(client: str, port: int, in_flight: int, requests: int) -> tuple[float, float]:
    """Requests per second, and microseconds of CPU for each."""
    limits = DispatchLimits(concurrency=in_flight)
    lease = Lease(1, 1, 1, uuid4(), "m", "/v1/chat/completions", 1, 1, 1, ((0, requests),))
    items = [Item(lease, line, line, str(line), BODY) for line in range(requests)]
    base_url = f"http://127.0.0.1:{port}/v1"
    completed = 0

    def sink(_: Item, verdict: Verdict) -> None:
        nonlocal completed
        assert isinstance(verdict, Outcome), verdict
        assert verdict.state is OutcomeState.COMPLETED
        completed += 1

    async with HttpProcessor(base_url, "sk-key", limits, RetryLimits(), transport=CLIENTS[client]) as processor:
        dispatcher = processor.dispatcher()
        await dispatcher.start(sink)
        cpu_before, began = cpu_s(), perf_counter()
        dispatcher.offer(items)
        await dispatcher.wait_idle()
        lasted_s, cpu = perf_counter() - began, cpu_s() - cpu_before
        await dispatcher.stop()
    assert completed == requests
    return requests / lasted_s, cpu / requests * 1e6


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--requests", type=int, default=10_000)
    arguments.add_argument("--rounds", type=int, default=3)
    chosen = arguments.parse_args()

    context = multiprocessing.get_context("spawn")
    port_queue: Queue[int] = context.Queue()
    upstream = context.Process(target=serve, args=(port_queue,), daemon=True)
    upstream.start()
    port = port_queue.get(timeout=30)
    print(f"{'in flight':>9}  {'client':10} {'req/s':>9} {'times':>6} {'CPU us/req':>11}")
    for in_flight in IN_FLIGHT:
        requests = chosen.requests if in_flight > 1 else chosen.requests // 4
        found: dict[str, list[tuple[float, float]]] = {client: [] for client in CLIENTS}
        for _ in range(chosen.rounds):  # in turns, so that a busy minute hits both
            for client in CLIENTS:
                found[client].append(uvloop.run(measure(client, port, in_flight, requests)))
        medians = {
            client: (statistics.median(r for r, _ in runs), statistics.median(c for _, c in runs))
            for client, runs in found.items()
        }
        for client, (rate, cpu) in medians.items():
            times = rate / medians["pyreqwest"][0]
            print(f"{in_flight:>9}  {client:10} {rate:>9,.0f} {times:>6.2f} {cpu:>11.1f}")
    upstream.terminate()
    upstream.join()


if __name__ == "__main__":
    main()

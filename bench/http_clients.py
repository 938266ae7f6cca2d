"""Which HTTP client? Each on the path that an item really takes, plain and over TLS.

    python bench/http_clients.py [--requests 10000] [--rounds 3]

A cheap upstream in a process of its own answers 500 bytes of JSON to requests of 600 bytes. Each
client runs inside the HTTP processor and its dispatcher, with every time limit and the size limit
on, uvloop as in production. CPU is that of this process alone. Handshakes are counted: there is one
for each call in flight.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import ssl
import statistics
import sys
import tempfile
from multiprocessing.queues import Queue
from pathlib import Path
from time import perf_counter
from typing import cast
from uuid import uuid4

import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.aiohttp_client import AiohttpClient
from penstock.config import DispatchLimits, RetryLimits
from penstock.dispatch.http.client import HttpClient
from penstock.dispatch.http.connect import ConnectOptions
from penstock.dispatch.http.processor import HttpProcessor
from penstock.model import Item, Lease, Outcome, OutcomeState, Verdict
from tests.support.certificates import make_certificate

IN_FLIGHT = (1, 64, 512)
CLIENTS: dict[tuple[str, str], type[HttpClient]] = {
    ("penstock", "http"): HttpClient,
    ("aiohttp", "http"): AiohttpClient,
    ("penstock", "https"): HttpClient,
    ("aiohttp", "https"): AiohttpClient,
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


def serve(ports: Queue[dict[str, int]], certificate: Path, key: Path) -> None:
    async def forever() -> None:
        loop = asyncio.get_running_loop()
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificate, key)
        plain = await loop.create_server(CheapUpstream, "127.0.0.1", 0, backlog=4096)
        secure = await loop.create_server(CheapUpstream, "127.0.0.1", 0, backlog=4096, ssl=tls)
        listening = {"http": plain, "https": secure}
        ports.put({scheme: server.sockets[0].getsockname()[1] for scheme, server in listening.items()})
        await asyncio.gather(plain.serve_forever(), secure.serve_forever())

    uvloop.run(forever())


async def measure(
    client: type[HttpClient], base_url: str, options: ConnectOptions, in_flight: int, requests: int
) -> tuple[float, float]:
    """Requests per second, and microseconds of CPU for each."""
    limits = DispatchLimits(concurrency=in_flight)
    lease = Lease(1, 1, 1, uuid4(), "m", "/v1/chat/completions", 1, 1, 1, ((0, requests),))
    items = [Item(lease, line, line, str(line), BODY) for line in range(requests)]
    completed = 0

    def sink(_: Item, verdict: Verdict) -> None:
        nonlocal completed
        assert isinstance(verdict, Outcome), verdict
        assert verdict.state is OutcomeState.COMPLETED
        completed += 1

    async with HttpProcessor(base_url, "sk-key", limits, RetryLimits(), options=options, client=client) as processor:
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

    with tempfile.TemporaryDirectory() as directory:
        certificate, key = make_certificate(Path(directory), "localhost")
        context = multiprocessing.get_context("spawn")
        told: Queue[dict[str, int]] = context.Queue()
        upstream = context.Process(target=serve, args=(told, certificate, key), daemon=True)
        upstream.start()
        try:
            compare(told.get(timeout=30), ConnectOptions(ca_file=str(certificate)), chosen.requests, chosen.rounds)
        finally:
            upstream.terminate()
            upstream.join()


def compare(ports: dict[str, int], options: ConnectOptions, requests: int, rounds: int) -> None:
    print(f"{'in flight':>9}  {'client':10} {'scheme':6} {'req/s':>9} {'times':>6} {'CPU us/req':>11}")
    for in_flight in IN_FLIGHT:
        count = requests if in_flight > 1 else requests // 4
        found: dict[tuple[str, str], list[tuple[float, float]]] = {chosen: [] for chosen in CLIENTS}
        for _ in range(rounds):  # in turns, so that a busy minute hits all
            for (name, scheme), client in CLIENTS.items():
                url = f"{scheme}://localhost:{ports[scheme]}/v1"
                found[name, scheme].append(uvloop.run(measure(client, url, options, in_flight, count)))
        rates = {chosen: statistics.median(rate for rate, _ in runs) for chosen, runs in found.items()}
        for (name, scheme), runs in found.items():
            rate, cpu = rates[name, scheme], statistics.median(cpu for _, cpu in runs)
            times = rate / rates["aiohttp", scheme]
            print(f"{in_flight:>9}  {name:10} {scheme:6} {rate:>9,.0f} {times:>6.2f} {cpu:>11.1f}")


if __name__ == "__main__":
    main()

"""Mock as a process: announce, serve, stop on a signal or after `--max-seconds`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import msgspec

from penstock.mock.behaviour import Behaviour
from penstock.mock.server import MockUpstream

RATE_INTERVAL_S = 5.0


async def serve(
    behaviour: Behaviour,
    host: str,
    port: int,
    *,
    as_json: bool = False,
    max_seconds: float | None = None,
    verbose: bool = False,
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with MockUpstream(behaviour, host=host, port=port) as upstream:
        _announce(upstream, as_json=as_json)
        watching = asyncio.create_task(_show_rate(upstream)) if verbose else None
        try:
            async with asyncio.timeout(max_seconds):
                await stop.wait()
        except TimeoutError:
            pass
        finally:
            if watching is not None:
                watching.cancel()


def _announce(upstream: MockUpstream, *, as_json: bool) -> None:
    line = upstream.base_url
    if as_json:
        ready = {"base_url": line, "origin": upstream.origin, "port": upstream.port, "pid": os.getpid()}
        line = msgspec.json.encode(ready).decode()
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def _show_rate(upstream: MockUpstream) -> None:
    loop = asyncio.get_running_loop()
    calls, at = 0, loop.time()
    while True:
        await asyncio.sleep(RATE_INTERVAL_S)
        stats, now = upstream.stats(), loop.time()
        # A reset in between makes the total smaller than it was.
        rate = max(0, stats.calls - calls) / (now - at)
        line = f"{rate:,.0f} calls/s, {stats.in_flight} in flight, {stats.waiting} waiting, {stats.calls:,} total"
        print(line, file=sys.stderr, flush=True)
        calls, at = stats.calls, now

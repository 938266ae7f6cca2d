"""Snapshots of metrics on their way from a worker process to its parent."""

from __future__ import annotations

import asyncio
import os

import uvloop

from penstock.worker.snapshots import send_snapshots


def test_a_parent_that_is_gone_is_no_error() -> None:
    async def run() -> None:
        reader, writer = os.pipe()
        async with asyncio.timeout(30), send_snapshots(writer):
            os.close(reader)
            while _is_open(writer):
                await asyncio.sleep(0.001)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True

"""What dispatch itself costs: items per second through functions that do nothing.

    python bench/dispatch_overhead.py [--items 300000] [--rounds 3]

The last column is how long the event loop had to wait for a turn of its own (a timer of 1 ms, late
by so much): every claim and settle needs several such turns.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import Any
from uuid import uuid4

import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from penstock.config import DispatchLimits, RetryLimits
from penstock.dispatch.python import PythonProcessor
from penstock.dispatch.signals import chunk
from penstock.model import Item, Lease, Verdict

CLAIM = 2_000


def sync_function(_: Item) -> dict[str, bool]:
    return {"ok": True}


async def async_function(_: Item) -> dict[str, bool]:
    return {"ok": True}


async def async_with_a_pause(_: Item) -> dict[str, bool]:
    await asyncio.sleep(0)
    return {"ok": True}


@chunk(100)
def sync_chunks(items: list[Item]) -> list[dict[str, bool]]:
    return [{"ok": True} for _ in items]


FUNCTIONS: list[Callable[..., Any]] = [sync_function, async_function, async_with_a_pause, sync_chunks]


async def measure(function: Callable[..., Any], items: list[Item]) -> tuple[float, float, float]:
    dispatcher = PythonProcessor(function, DispatchLimits(), RetryLimits()).dispatcher()
    dispatcher.low_water = CLAIM
    results: list[tuple[Item, Verdict]] = []
    late_s: list[float] = []

    async def watch_the_loop() -> None:
        while True:
            began = perf_counter()
            await asyncio.sleep(0.001)
            late_s.append(perf_counter() - began - 0.001)

    await dispatcher.start(lambda item, verdict: results.append((item, verdict)))
    watcher = asyncio.create_task(watch_the_loop())
    began, cpu_before = perf_counter(), process_time()
    for start in range(0, len(items), CLAIM):
        await dispatcher.wait_room()
        dispatcher.offer(items[start : start + CLAIM])
    await dispatcher.wait_idle()
    lasted_s, cpu_s = perf_counter() - began, process_time() - cpu_before
    watcher.cancel()
    await dispatcher.stop()
    assert len(results) == len(items)
    late_s.sort()
    return len(items) / lasted_s, cpu_s / len(items) * 1e6, late_s[int(0.95 * len(late_s))] * 1e3


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--items", type=int, default=300_000)
    arguments.add_argument("--rounds", type=int, default=3)
    chosen = arguments.parse_args()
    lease = Lease(1, 1, 1, uuid4(), "m", "/v1/rows", 1, 1, 1, ((0, chosen.items),))
    items = [Item(lease, line, line, str(line), b'{"a": 1}') for line in range(chosen.items)]
    print(f"{'function':20} {'items/s':>9} {'CPU us/item':>12} {'loop late, p95 ms':>18}")
    for function in FUNCTIONS:
        rounds = [uvloop.run(measure(function, items)) for _ in range(chosen.rounds)]
        rate, cpu, late = (statistics.median(values) for values in zip(*rounds, strict=True))
        print(f"{function.__name__:20} {rate:>9,.0f} {cpu:>12.2f} {late:>18.2f}")


if __name__ == "__main__":
    main()

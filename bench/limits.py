"""Limits that are found out, against the best that are fixed: of slots and of rates that only a mock upstream knows.

    python -m bench.limits [--capacities 11 50 150] [--workers 1 4] [--rates 2 50 1000] [--tokens 60000] [--quick]

Slots: `penstock run` works a file off for a minute, and is then measured for half a minute: tokens a second and the
95th percentile of latency, as parts of what a client with a fixed number of calls in flight gets (the best of a sweep).
Then the capacity is halved, and after another minute measured again; then doubled, and so on.

Rates, of calls a second and of tokens a minute: the part of the allowance that is used, and the part of calls refused,
with rate-limit headers, with Retry-After alone and with a bare 429, after half a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from penstock.config import DispatchLimits
from penstock.dispatch.http.client import HttpClient
from tests.support.cli import PENSTOCK, write_requests
from tests.support.mock_process import MockProcess, start_mock_process

_VLLM = ("--tokens", "20..60", "--token-time", "10ms", "--slowdown", "2")
_BODY = b'{"model": "small", "messages": [{"role": "user", "content": "question %d"}]}'
_SWEEP = (0.8, 1.0, 1.2)
_TOLD_BY = ("full", "retry-after", "none")
_TOKENS_OUT = 100
_TOKENS = _TOKENS_OUT + 3  # the mock counts three for "question 1"


def ask(mock: MockProcess, path: str, body: Any = None) -> Any:
    request = Request(f"{mock.origin}{path}", data=None if body is None else json.dumps(body).encode())
    with urlopen(request, timeout=30) as answer:
        return json.load(answer)


def measure(mock: MockProcess, seconds: float) -> tuple[float, float]:
    """Tokens a second, and the 95th percentile of latency in seconds, from now on."""
    ask(mock, "/mock/reset", {})
    time.sleep(seconds)
    stats = ask(mock, "/mock/stats")
    return stats["completion_tokens"] / stats["elapsed_s"], (stats["latency_p95_ms"] or 0) / 1000


def fixed(capacity: int, seconds: float) -> tuple[float, float]:
    """The best of some fixed numbers of calls in flight, around the slots that there are."""
    found = []
    for part in _SWEEP:
        with start_mock_process(*_VLLM, "--capacity", str(capacity)) as mock:
            client = asyncio.to_thread(measure, mock, seconds)
            found.append(asyncio.run(_fixed(mock, max(1, round(part * capacity)), client)))
    return max(found, key=lambda figures: figures[0])


async def _fixed(mock: MockProcess, calls: int, measuring: Any) -> tuple[float, float]:
    client = HttpClient(DispatchLimits(), {"content-type": "application/json"})
    numbers = count(1)  # questions differ, and so do the tokens of their answers

    async def call() -> None:
        while True:
            await client.request("POST", f"{mock.base_url}/chat/completions", {}, _BODY % next(numbers))

    tasks = [asyncio.create_task(call()) for _ in range(calls)]
    await asyncio.sleep(3)
    try:
        figures: tuple[float, float] = await measuring
        return figures
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.close()


@contextmanager
def running(mock: MockProcess, lines: int, *options: str) -> Iterator[None]:
    """`penstock run` against the mock, for the length of the block, from its first call on."""
    with tempfile.TemporaryDirectory() as directory:
        path = write_requests(Path(directory) / "in.jsonl", lines)
        command = ("run", path, "-o", Path(directory) / "out.jsonl", "--base-url", mock.base_url)
        arguments = [*PENSTOCK, *map(str, command), "--data-dir", f"{directory}/data", *options]
        process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while not ask(mock, "/mock/stats")["calls"]:
                time.sleep(0.05)
            yield
        finally:
            process.terminate()
            process.wait()


def of_slots(capacities: Sequence[int], workers: Sequence[int], settle_s: float, measure_s: float) -> None:
    print("| slots | workers | work | p95 | slots halved: work | p95 | doubled again: work | p95 |")
    print("|---|---|---|---|---|---|---|---|")
    for capacity in capacities:
        halved = max(1, capacity // 2)
        best, best_halved = fixed(capacity, measure_s), fixed(halved, measure_s)
        for number in workers:
            lines = int(4 * capacity * 3 * (settle_s + measure_s))
            parts = []
            with (
                start_mock_process(*_VLLM, "--capacity", str(capacity)) as mock,
                running(mock, lines, "--workers", str(number)),
            ):
                for slots, against in ((capacity, best), (halved, best_halved), (capacity, best)):
                    ask(mock, "/mock/set", {"capacity": slots})
                    time.sleep(settle_s)
                    found = measure(mock, measure_s)
                    parts += [f"{value / bound:.2f}" for value, bound in zip(found, against, strict=True)]
            print(f"| {capacity} | {number} | {' | '.join(parts)} |", flush=True)


def _token_limit(per_minute: int) -> tuple[str, ...]:
    return ("--token-limit", f"{per_minute}/m", "--burst", "1s", "--tokens", str(_TOKENS_OUT))


def of_rates(
    rates: Sequence[float], tokens_a_minute: Sequence[int], told_by: Sequence[str], settle_s: float, measure_s: float
) -> None:
    print("\n| limit | told by | allowance used | refused | most calls in 100 ms |\n|---|---|---|---|---|")
    limits: list[tuple[str, tuple[str, ...], float]] = [
        *((f"{per_s:g} calls a second", ("--rate-limit", f"{per_s:g}/s"), per_s) for per_s in rates),
        *((f"{each} tokens a minute", _token_limit(each), each / 60 / _TOKENS) for each in tokens_a_minute),
    ]
    for label, options, per_s in limits:
        for headers in told_by:
            mocked = start_mock_process(*options, "--limit-headers", headers, "--latency", "30ms")
            with mocked as mock, running(mock, int(3 * per_s * (settle_s + measure_s)) + 500):
                time.sleep(settle_s)
                before = ask(mock, "/mock/stats")
                time.sleep(measure_s)
                after = ask(mock, "/mock/stats")
                intervals = ask(mock, "/mock/rate")
            statuses = {
                status: after["by_status"].get(status, 0) - before["by_status"].get(status, 0)
                for status in ("200", "429")
            }
            seconds = after["elapsed_s"] - before["elapsed_s"]
            refused = statuses["429"] / max(1, sum(statuses.values()))
            late = [each["calls"] for each in intervals if each["at_ms"] >= 1000 * before["elapsed_s"]]
            used = statuses["200"] / (per_s * seconds)
            print(f"| {label} | {headers} | {used:.2f} | {refused:.2%} | {max(late, default=0)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capacities", type=int, nargs="*", default=[11, 50, 150])
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--rates", type=float, nargs="*", default=[2, 50, 1000])
    parser.add_argument("--tokens", type=int, nargs="*", default=[60_000], help="limits of tokens a minute")
    parser.add_argument("--told-by", choices=_TOLD_BY, nargs="*", default=list(_TOLD_BY))
    parser.add_argument("--quick", action="store_true")
    chosen = parser.parse_args()
    if chosen.quick:
        of_slots([10], [1], 3, 3)
        of_rates([50], [60_000], ["full"], 3, 3)
        return
    of_slots(chosen.capacities, chosen.workers, 60, 30)
    of_rates(chosen.rates, chosen.tokens, chosen.told_by, 30, 60)


if __name__ == "__main__":
    main()

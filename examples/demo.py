"""`make demo`: 2,000 requests against a mock upstream that fails and limits, killed half-way; and a table's rows."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parent
PENSTOCK = [sys.executable, "-m", "penstock.cli.main"]
MODELS = ("penstock-small", "penstock-large")
TOPICS = ("rivers", "turbines", "gates", "reservoirs", "valves", "spillways")
KILL_WITHIN_S = 120
STOP_WITHIN_S = 15
INTERRUPTED = 130


def write_requests(path: Path, count: int) -> None:
    rng = random.Random(7)
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            question = f"In one sentence, what should I know about {rng.choice(TOPICS)}? ({number})"
            request = {
                "custom_id": f"demo-{number:05d}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {"model": MODELS[number % 2], "messages": [{"role": "user", "content": question}]},
            }
            file.write(json.dumps(request) + "\n")


@contextlib.contextmanager
def start(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start `penstock run`, and show its command. What is left of it when the block ends is stopped."""
    print(f"$ penstock run {shlex.join(arguments)}", flush=True)
    with subprocess.Popen([*PENSTOCK, "run", *arguments], start_new_session=True) as process:
        try:
            yield process
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Let calls in flight end, as Ctrl-C does; kill what does not end in time, or at the next Ctrl-C."""
    try:
        send(process, signal.SIGINT)
        process.wait(STOP_WITHIN_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        send(process, signal.SIGKILL)


def send(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to all processes of the run, if it has not ended."""
    if process.poll() is None:
        os.killpg(process.pid, number)


def run(*arguments: str) -> int:
    """Run `penstock run` to its end. Its exit code; 0 where some inputs were refused, as the mock does."""
    with start(*arguments) as process:
        code = process.wait()
    # Refused inputs are part of the demo: exit code 3 says that some rows failed, and where they are.
    return 0 if code == 3 else code


def kill_half_way(stats_url: str, calls: int, *arguments: str) -> None:
    """Run `penstock run`, and kill all of its processes after so many calls."""
    with start(*arguments) as process:
        deadline = time.monotonic() + KILL_WITHIN_S
        while process.poll() is None and read_calls(stats_url) < calls and time.monotonic() < deadline:
            time.sleep(0.05)
        send(process, signal.SIGKILL)
        process.wait()
    print(
        f"\n*** kill -9 after {read_calls(stats_url):,} calls. Everything it had is stored: the same command goes on.\n"
    )


def read_stats(stats_url: str) -> Any:
    with urllib.request.urlopen(stats_url) as answer:
        return json.load(answer)


def read_calls(stats_url: str) -> int:
    calls: int = read_stats(stats_url)["calls"]
    return calls


@contextlib.contextmanager
def mock_upstream() -> Iterator[str]:
    options = ["--latency", "20ms..120ms", "--error-rate", "5%", "--reject-rate", "0.5%", "--rate-limit", "150/s"]
    process = subprocess.Popen(
        [*PENSTOCK, "mock", "--json", "--seed", "7", "--max-seconds", "600", *options],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for this program, which ends the mock last
    )
    try:
        assert process.stdout is not None
        base_url: str = json.loads(process.stdout.readline())["base_url"]
        yield base_url
    finally:
        process.terminate()
        process.wait()


def show_answer(answers: Path, source: Path) -> None:
    """Show one question and its answer."""
    line = json.loads(answers.open(encoding="utf-8").readline())
    asked = next(request for text in source.open(encoding="utf-8") if (request := json.loads(text)))
    print(f"\none of the answers, {line['custom_id']}:")
    print(f"  asked     {asked['body']['messages'][0]['content']}")
    print(f"  answered  {line['response']['body']['choices'][0]['message']['content']}")


def explain_calls(stats: Any, requests: int) -> None:
    """Say why there were more calls than requests. Only calls count here, not what else the mock was asked."""
    calls, by_status = stats["calls"], dict(stats["by_status"])
    by_status["200"] = calls - sum(count for status, count in by_status.items() if status != "200")
    print(f"\nthe upstream saw {calls:,} calls for {requests:,} inputs:")
    why = {
        "200": "answered; what was in flight at the kill was asked again, and every answer is recorded once",
        "400": "inputs it refuses every time: they are in the errors file, with its words",
        "429": "over its limit of 150 calls a second: tried again later, which costs no attempt",
        "500": "errors that pass, as it was told to make: tried again after a pause",
    }
    for status, count in sorted(by_status.items()):
        print(f"  {count:>6,} x HTTP {status}  {why.get(status, '')}".rstrip())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--directory", type=Path, default=Path("demo-out"))
    arguments = parser.parse_args()
    directory: Path = arguments.directory
    directory.mkdir(parents=True, exist_ok=True)
    source, answers, sheet = (directory / name for name in ("requests.jsonl", "answers.jsonl", "products.xlsx"))
    write_requests(source, arguments.requests)
    table, schema = (os.path.relpath(EXAMPLES / name) for name in ("products.csv", "category.json"))
    ask = ("--model", MODELS[0], "--prompt", "Which category is {{ product_title }}?", "--schema", schema)

    with mock_upstream() as base_url:
        stats_url = f"{base_url.removesuffix('/v1')}/mock/stats"
        print(f"mock upstream at {base_url}: 5% errors, 0.5% refused inputs, 150 calls/s")
        here = ("--base-url", base_url, "--data-dir", str(directory / "data"))
        words = (str(source), "-o", str(answers), *here, "--concurrency", "32")
        kill_half_way(stats_url, arguments.requests // 2, *words, "--new")
        code = run(*words)
        if code == 0:
            explain_calls(read_stats(stats_url), arguments.requests)
            show_answer(answers, source)
            print("\nRows of a table go the same way:")
            code = run(table, *ask, "-o", str(sheet), *here, "--new")
    if code == 0:
        print(f"\nanswers, one a line:  {answers}\na sheet to open:      {sheet}")
        # A server needs an upstream; with nothing left to run, it does not call it.
        serve = f"penstock serve --data-dir {directory / 'data'} --base-url http://127.0.0.1:8089/v1"
        print(f"both in the console:  {os.path.relpath(Path(sys.executable).parent)}/{serve}")
        print("                      then open http://127.0.0.1:8080/console/ in a browser")
        print("                      (penstock run --console shows a run while it goes on)")
    return code


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a script starts behind `&` would ignore it
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\ninterrupted: nothing of the demo is running any more", file=sys.stderr)
        sys.exit(INTERRUPTED)

"""`make demo`: 2,000 requests over two models, against a mock upstream that fails and limits."""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

PENSTOCK = [sys.executable, "-m", "penstock.cli.main"]
MODELS = ("penstock-small", "penstock-large")
TOPICS = ("rivers", "turbines", "gates", "reservoirs", "valves", "spillways")


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
def mock_upstream() -> Iterator[str]:
    options = ["--latency", "20ms..120ms", "--error-rate", "5%", "--reject-rate", "0.5%", "--rate-limit", "150/s"]
    process = subprocess.Popen(
        [*PENSTOCK, "mock", "--json", "--seed", "7", "--max-seconds", "600", *options],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        base_url: str = json.loads(process.stdout.readline())["base_url"]
        yield base_url
    finally:
        process.terminate()
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--directory", type=Path, default=Path("demo-out"))
    arguments = parser.parse_args()
    directory: Path = arguments.directory
    directory.mkdir(parents=True, exist_ok=True)
    source = directory / "requests.jsonl"
    write_requests(source, arguments.requests)

    with mock_upstream() as base_url:
        print(f"mock upstream at {base_url}: 5% errors, 0.5% refused inputs, 150 calls/s")
        command = [
            *PENSTOCK, "run", str(source), "--base-url", base_url, "-o", str(directory / "answers.jsonl"),
            "--data-dir", str(directory / "data"), "--concurrency", "32", "--new",
        ]  # fmt: skip
        print(f"$ penstock {' '.join(command[3:])}", flush=True)
        code = subprocess.run(command, check=False).returncode
        with urllib.request.urlopen(f"{base_url.removesuffix('/v1')}/mock/stats") as answer:
            stats = json.load(answer)
    print(f"the upstream saw {sum(stats['by_status'].values()):,} calls: {stats['by_status']}")
    # Refused inputs are part of the demo: exit code 3 says that some rows failed, and where they are.
    return 0 if code in (0, 3) else code


if __name__ == "__main__":
    sys.exit(main())

"""`make demo`: 2,000 requests over two models and a table's rows, against a mock upstream that fails and limits."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

EXAMPLES = Path(__file__).parent
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


def run(*arguments: str) -> int:
    """Run `penstock run` and show its command. Its exit code; 0 where some inputs were refused, as the mock does."""
    print(f"$ penstock run {shlex.join(arguments)}", flush=True)
    code = subprocess.run([*PENSTOCK, "run", *arguments], check=False).returncode
    # Refused inputs are part of the demo: exit code 3 says that some rows failed, and where they are.
    return 0 if code == 3 else code


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
    source, answers, sheet = (directory / name for name in ("requests.jsonl", "answers.jsonl", "products.xlsx"))
    write_requests(source, arguments.requests)
    table, schema = (os.path.relpath(EXAMPLES / name) for name in ("products.csv", "category.json"))
    ask = ("--model", MODELS[0], "--prompt", "Which category is {{ product_title }}?", "--schema", schema)

    with mock_upstream() as base_url:
        print(f"mock upstream at {base_url}: 5% errors, 0.5% refused inputs, 150 calls/s")
        here = ("--base-url", base_url, "--data-dir", str(directory / "data"), "--new")
        code = run(str(source), "-o", str(answers), *here, "--concurrency", "32")
        if code == 0:
            print("\nRows of a table go the same way:")
            code = run(table, *ask, "-o", str(sheet), *here)
        with urllib.request.urlopen(f"{base_url.removesuffix('/v1')}/mock/stats") as answer:
            stats = json.load(answer)
    print(f"\nthe upstream saw {sum(stats['by_status'].values()):,} calls: {stats['by_status']}")
    if code == 0:
        print(f"answers, one a line:  {answers}\na sheet to open:      {sheet}")
    return code


if __name__ == "__main__":
    sys.exit(main())

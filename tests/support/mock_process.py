"""`penstock mock` as a process of its own."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.request import urlopen

START_DEADLINE_S = 20.0
STOP_DEADLINE_S = 10.0
_PROGRAM = "from penstock.cli.mock import mock; mock()"


@dataclass(frozen=True, slots=True)
class MockProcess:
    process: subprocess.Popen[bytes]
    base_url: str
    origin: str
    port: int

    def stats(self) -> dict[str, object]:
        with urlopen(f"{self.origin}/mock/stats", timeout=10) as answer:
            stats: dict[str, object] = json.load(answer)
        return stats

    def set(self, **options: object) -> None:
        """Change options while it serves: `set(error_rate=1)`."""
        body = json.dumps({name.replace("_", "-"): value for name, value in options.items()}).encode()
        with urlopen(f"{self.origin}/mock/set", body, timeout=10) as answer:
            assert answer.status == 200


def spawn_mock(*args: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _PROGRAM, *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@contextmanager
def start_mock_process(*args: str) -> Iterator[MockProcess]:
    """Serves for the length of the block; `args` are the options of `penstock mock`."""
    with spawn_mock("--json", *args) as process:
        try:
            ready = json.loads(_first_line(process))
            yield MockProcess(process, ready["base_url"], ready["origin"], ready["port"])
        finally:
            process.terminate()
            try:
                process.communicate(timeout=STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


def _first_line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    end = time.monotonic() + START_DEADLINE_S
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(end - time.monotonic()):
                raise AssertionError(f"the mock did not announce itself within {START_DEADLINE_S:g} s")
            # Past the buffer of process.stdout, which the selector cannot see into.
            data = os.read(descriptor, 4_096)
            if not data:
                _, errors = process.communicate(timeout=STOP_DEADLINE_S)
                raise AssertionError(f"the mock ended with {process.returncode}: {errors.decode()}")
            line += data
    return line

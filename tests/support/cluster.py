"""A PostgreSQL cluster of the test's own, on a port of loopback: it may be stopped, replaced by a backup, and followed.

with OwnCluster(tmp_path / "primary") as primary:
    backup = primary.copy(tmp_path / "backup")
    ...
    primary.put_back(backup)
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from types import TracebackType
from typing import Self

import psycopg
from psycopg.conninfo import make_conninfo

from penstock.db.embedded.cluster import ROLE, Cluster, run, spawn
from penstock.db.embedded.postgres import bundled_bin_dir
from tests.support.tcp_server import bind
from tests.support.wait import wait_until

DEADLINE_S = 60.0
_SETTINGS = ("fsync=off", "full_page_writes=off", "wal_level=replica", "max_wal_senders=4", "unix_socket_directories=")


class OwnCluster:
    """Runs for the length of the block."""

    def __init__(self, directory: Path, bin_dir: Path | None = None, *, backup: Path | None = None) -> None:
        """A new cluster, or one that begins as a backup."""
        directory.mkdir()
        self._cluster = Cluster(str(directory), str(bin_dir or bundled_bin_dir()))
        self._pgdata = Path(self._cluster.pgdata)
        self._log = directory / "postgres.log"
        self._pid: int | None = None
        if backup is None:
            self._cluster.make()
        else:
            backup.rename(self._pgdata)
        # Bound and never listening: it keeps the port ours while there is no server. PostgreSQL shares it.
        self._reserved = bind()
        self.port: int = self._reserved.getsockname()[1]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._reserved.close()

    @property
    def conninfo(self) -> str:
        return make_conninfo(host="127.0.0.1", port=self.port, user=ROLE, dbname=ROLE)

    def start(self) -> None:
        settings = [part for one in (*_SETTINGS, f"port={self.port}") for part in ("-c", one)]
        command = [f"{self._cluster.bin_dir}/postgres", "-D", str(self._pgdata), *settings]
        log = os.open(self._log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self._pid = spawn(command, self._cluster.identity, output=log)
        os.close(log)
        wait_until(self._answers, DEADLINE_S)

    def stop(self) -> None:
        """As if it had crashed."""
        if self._pid is not None:
            os.kill(self._pid, signal.SIGQUIT)
            os.waitpid(self._pid, 0)
            self._pid = None

    def copy(self, name: str, *, standby: bool = False) -> Path:
        """A backup of the running cluster, beside it; for a standby, one that will follow it."""
        target = self._pgdata.with_name(name)
        command = [f"{self._cluster.bin_dir}/pg_basebackup", "-D", str(target), "-d", self.conninfo, "-c", "fast"]
        target.mkdir(mode=0o700)
        os.chown(target, *self._cluster.identity.owner)
        status, said = run([*command, *(["-R"] if standby else [])], self._cluster.identity)
        assert status == 0, said
        return target

    def put_back(self, backup: Path) -> None:
        """The cluster crashes, and comes back as it was at the time of the backup."""
        self.stop()
        shutil.rmtree(self._pgdata)
        backup.rename(self._pgdata)
        self.start()

    def unfollow(self) -> None:
        """From now on, this standby hears no more of its primary."""
        with psycopg.connect(self.conninfo, autocommit=True) as connection:
            wait_until(lambda: _count(connection, "pg_stat_wal_receiver WHERE status = 'streaming'") == 1, DEADLINE_S)
            connection.execute("ALTER SYSTEM SET primary_conninfo = ''")
            connection.execute("SELECT pg_reload_conf()")
            wait_until(lambda: _count(connection, "pg_stat_wal_receiver") == 0, DEADLINE_S)

    def promote(self) -> None:
        with psycopg.connect(self.conninfo, autocommit=True) as connection:
            assert connection.execute("SELECT pg_promote(true, 60)").fetchone() == (True,)

    def _answers(self) -> bool:
        assert self._pid is not None
        assert os.waitpid(self._pid, os.WNOHANG) == (0, 0), self._log.read_text()
        try:
            psycopg.connect(self.conninfo, connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True


def _count(connection: psycopg.Connection, rows: str) -> int:
    row = connection.execute(f"SELECT count(*) FROM {rows}".encode()).fetchone()
    assert row is not None
    return int(row[0])

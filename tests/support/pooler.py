"""PgBouncer in transaction mode, in front of a server."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.support.postgres_proxy import PostgresProxy
from tests.support.tcp_server import bind
from tests.support.wait import wait_until

PGBOUNCER = "/usr/sbin/pgbouncer"


@contextmanager
def pooled(server: str) -> Iterator[str]:
    """The conninfo of a pooler that gives every transaction whichever of its server connections is free."""
    user = conninfo_to_dict(server)["user"]
    # The proxy makes the server's socket, which only its owner may reach, a port that the pooler can.
    # Bound and never listening, which the pooler shares: nobody else gets the port.
    with (
        PostgresProxy(server) as proxy,
        tempfile.TemporaryDirectory(prefix="pooler") as place,
        bind() as reserved,
    ):
        behind = conninfo_to_dict(proxy.proxied(server))
        directory = Path(place)
        directory.chmod(0o755)
        port = reserved.getsockname()[1]
        (directory / "users.txt").write_text(f'"{user}" ""\n')
        (directory / "pgbouncer.ini").write_text(
            f"[databases]\n* = host={behind['host']} port={behind['port']} user={user}\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n"
            f"auth_type = trust\nauth_file = {directory / 'users.txt'}\n"
            "pool_mode = transaction\ndefault_pool_size = 8\nmax_client_conn = 200\nserver_idle_timeout = 5\n"
        )
        conninfo = make_conninfo(host="127.0.0.1", port=port, user=user, dbname="penstock")
        process = subprocess.Popen(
            _command(directory / "pgbouncer.ini"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            wait_until(lambda: _answers(conninfo), 30)
            yield conninfo
        finally:
            process.terminate()
            process.wait()


def _command(configuration: Path) -> list[str]:
    command = [shutil.which("pgbouncer") or PGBOUNCER, str(configuration)]
    # It refuses to be root, and takes another user's place.
    return [*command[:1], "-u", "nobody", *command[1:]] if os.geteuid() == 0 else command


def _answers(conninfo: str) -> bool:
    try:
        psycopg.connect(conninfo, connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True

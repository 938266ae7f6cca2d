"""R13: packets between a worker and PostgreSQL are dropped, and nobody hangs up.

PostgreSQL is in a network namespace of its own, at the other end of a cable: one address for the worker that will be
cut off, and one for everybody else. nftables drops what arrives. Root may make such a network, and so may anybody
whose kernel grants user namespaces; a container needs `--cap-add SYS_ADMIN --cap-add NET_ADMIN`. The same between two
sockets, where no network is needed, is in `tests/faults/test_database_faults.py`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from penstock.db.embedded.cluster import PGDATA, ROLE, Cluster
from penstock.db.embedded.postgres import bundled_bin_dir
from penstock.db.migrate import migrate
from tests.support.processes import Process, Processes
from tests.support.proxy_link import Way
from tests.support.thorough import as_thorough
from tests.support.wait import wait_until
from tests.support.workbench import (
    CONCURRENCY,
    DEADLINE_S,
    HELD,
    Bench,
    calls_of,
    in_flight,
    leave,
    taking,
    until_said,
    workbench,
)

PORT = 5432
OURS, CUT, CLEAR = "10.77.0.1", "10.77.0.2", "10.77.0.3"
# A margin for busy machines: a worker ends its calls after eight tenths of the grace.
GRACE_S = 3.0
LIVENESS = {"heartbeat_interval_s": 0.3, "heartbeat_grace_s": GRACE_S}
LINES = 60
# `db.pool.KEEPALIVE` says half a minute, and the kernel looks at its timers when they fire.
NOTICED_S = 45.0
BOTH = (Way.UP, Way.DOWN)

_ROOT = Path(__file__).parents[2]
_INSIDE = "A_NETWORK_OF_ITS_OWN"


def networking(test: Callable[..., None]) -> Callable[..., None]:
    """Have a test run where the network is its own to change, and gone when it ends."""

    @wraps(test)
    def run(tmp_path: Path, **given: Any) -> None:
        if _INSIDE in os.environ:
            test(tmp_path=tmp_path, **given)
            return
        namespace = ["unshare", "--net"]
        if subprocess.run([*namespace, "true"], check=False, capture_output=True).returncode != 0:
            namespace.append("--map-root-user")
        this = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
        pytest_once = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'in'}"]
        done = subprocess.run(
            [*namespace, *pytest_once, *as_thorough(), this],
            cwd=_ROOT,
            env={**os.environ, _INSIDE: "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    return run


@dataclass(frozen=True, slots=True)
class Network:
    """The cable between the test's namespace and the server's."""

    server: Process

    def lay(self) -> None:
        wait_until(lambda: _network_of(self.server.pid) != _network_of(os.getpid()), DEADLINE_S)
        _run(f"ip link add here type veth peer name there netns {self.server.pid}")
        for command in ("ip link set lo up", f"ip address add {OURS}/24 dev here", "ip link set here up"):
            _run(command)
        for command in (
            *(f"ip address add {address}/24 dev there" for address in (CUT, CLEAR)),
            "ip link set there up",
        ):
            self._run_there(command)
        for run in (_run, self._run_there):
            run("nft add table inet cut")
            run("nft add chain inet cut arrivals { type filter hook input priority 0 ; }")

    def cut(self, ways: tuple[Way, ...] = BOTH) -> None:
        if Way.UP in ways:
            self._run_there(f"nft add rule inet cut arrivals ip daddr {CUT} counter drop")
        if Way.DOWN in ways:
            _run(f"nft add rule inet cut arrivals ip saddr {CUT} counter drop")

    def heal(self) -> None:
        """Packets must have been lost; not both ways, as what hears nothing may have nothing to say."""
        rules = "nft list chain inet cut arrivals"
        dropping = [
            rule for said in (_run(rules), self._run_there(rules)) for rule in said.splitlines() if "drop" in rule
        ]
        assert any("packets 0 " not in rule for rule in dropping), dropping
        for run in (_run, self._run_there):
            run("nft flush chain inet cut arrivals")

    def _run_there(self, command: str) -> str:
        return _run(f"nsenter --net=/proc/{self.server.pid}/ns/net {command}")


def _run(command: str) -> str:
    done = subprocess.run(command.split(), check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def _network_of(pid: int) -> str:
    return str(Path(f"/proc/{pid}/ns/net").readlink())


@contextmanager
def served(directory: Path) -> Iterator[Network]:
    """A migrated PostgreSQL at the other end of a cable."""
    with Processes(directory / "server") as processes:
        command = ["unshare", "--net", sys.executable, "-m", "tests.faults.test_partition", str(directory / "data")]
        network = Network(processes.start("server", command, cwd=_ROOT))
        network.lay()
        wait_until(lambda: _answers(network.server), DEADLINE_S)
        migrate(conninfo(CLEAR))
        yield network
        os.kill(network.server.pid, signal.SIGINT)
        network.server.wait(DEADLINE_S)


def conninfo(address: str) -> str:
    return make_conninfo(host=address, port=PORT, user=ROLE, dbname=ROLE)


def _answers(server: Process) -> bool:
    assert server.alive, server.tail()
    try:
        psycopg.connect(conninfo(CLEAR), connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True


def until_reborn(bench: Bench, worker: Process, old: set[UUID]) -> None:
    until_said(worker, "going on under a new identity")
    wait_until(lambda: bench.worker_ids(worker) - old, DEADLINE_S)


def said_at(worker: Process, words: str) -> datetime:
    """When it first logged some words."""
    line = next(line for line in worker.log.read_text().splitlines() if words in line)
    return datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").astimezone()


def beaten_at(bench: Bench) -> datetime:
    """When the server last heard of the only worker."""
    with psycopg.connect(bench.conninfo) as connection:
        ((last,),) = connection.execute("SELECT heartbeat_at FROM penstock.workers").fetchall()
    beaten: datetime = last
    return beaten


def taken_at(bench: Bench) -> datetime:
    """When the others first took something back."""
    with psycopg.connect(bench.conninfo) as connection:
        row = connection.execute("SELECT min(reclaimed_at) FROM penstock.reclaims").fetchone()
    assert row is not None
    first: datetime = row[0]
    return first


def connections(worker: Process) -> set[int]:
    """Its connections to the server that stand, by the port at its own end."""
    return {
        link.laddr.port
        for link in psutil.Process(worker.pid).net_connections("tcp")
        if link.raddr == (CUT, PORT) and link.status == psutil.CONN_ESTABLISHED
    }


@pytest.mark.parametrize(
    "ways",
    [
        pytest.param(BOTH, id="both ways", marks=pytest.mark.again),
        pytest.param((Way.UP,), id="up"),
        pytest.param((Way.DOWN,), id="down", marks=pytest.mark.again),
    ],
)
@networking
def test_its_calls_are_cut_before_others_have_its_work(tmp_path: Path, ways: tuple[Way, ...]) -> None:
    with served(tmp_path) as network, workbench(tmp_path, conninfo(CLEAR), lines=LINES) as bench:
        held = bench.upstream("held", HELD)
        first = bench.worker("first", held, LIVENESS, conninfo=conninfo(CUT))
        wait_until(lambda: in_flight(held) == CONCURRENCY, DEADLINE_S)
        old = bench.worker_ids(first)
        network.cut(ways)
        until_said(first, "dropped")
        assert (said_at(first, "dropped") - beaten_at(bench)).total_seconds() < GRACE_S
        second = bench.worker("second", bench.upstream("prompt"), LIVENESS)
        bench.until_completed()
        assert bench.ask("SELECT count(*) FROM penstock.reclaims") > 0
        before = bench.outcomes()
        network.heal()
        until_reborn(bench, first, old)
        leave(first)
        # A check-in that was under way all the time may still arrive: the lost identity dies once more.
        bench.until("SELECT (count(*) = 1)::int FROM penstock.workers")
        leave(second)
        assert bench.outcomes() == before
        bench.check()
        assert bench.calls() == LINES + CONCURRENCY


@pytest.mark.slow
@networking
def test_nobody_waits_for_an_answer_that_cannot_come(tmp_path: Path) -> None:
    """Cut off in the middle of claims and flushes: both sides let go of the connections, long before the cut heals."""
    lines = 1_000
    with served(tmp_path) as network, workbench(tmp_path, conninfo(CLEAR), lines=lines) as bench:
        # Half a minute goes by in which there is nothing to claim.
        settings = {**LIVENESS, "claim_poll_s": 0.5}
        upstream = bench.upstream("upstream", taking(0.5))
        first = bench.worker("first", upstream, settings, conninfo=conninfo(CUT))
        wait_until(lambda: calls_of(upstream) > 3 * CONCURRENCY, DEADLINE_S)
        second = bench.worker("second", bench.upstream("faster", taking(0.05)), settings)
        bench.until("SELECT (count(DISTINCT worker_id) = 2)::int FROM penstock.leases")
        old, before = bench.worker_ids(first), connections(first)
        assert len(before) > 1
        network.cut()
        bench.until_completed()
        assert said_at(first, "dropped") < taken_at(bench)
        wait_until(lambda: not connections(first) & before, NOTICED_S)
        ours = f"client_addr = '{OURS}' AND client_port IN ({', '.join(map(str, before))})"
        bench.until(f"SELECT (count(*) = 0)::int FROM pg_stat_activity WHERE {ours}", NOTICED_S)
        network.heal()
        until_reborn(bench, first, old)
        told = [leave(worker) for worker in (first, second)]
        assert told[0]["lost"] == 1
        bench.check()


@networking
def test_it_can_be_stopped_while_it_is_cut_off(tmp_path: Path) -> None:
    with served(tmp_path) as network, workbench(tmp_path, conninfo(CLEAR), lines=LINES) as bench:
        held = bench.upstream("held", HELD)
        first = bench.worker("first", held, LIVENESS, conninfo=conninfo(CUT))
        wait_until(lambda: in_flight(held) == CONCURRENCY, DEADLINE_S)
        network.cut()
        until_said(first, "dropped")
        first.terminate()
        assert first.wait(NOTICED_S) == 0, first.tail()
        network.heal()
        second = bench.worker("second", bench.upstream("prompt"), LIVENESS)
        bench.until_completed()
        leave(second)
        bench.check()


def main(arguments: list[str]) -> None:
    """Become a PostgreSQL that listens on every address, with its data in a new directory."""
    directory = Path(arguments[0])
    directory.mkdir()
    cluster = Cluster(str(directory), str(bundled_bin_dir()))
    cluster.make()
    with (directory / PGDATA / "pg_hba.conf").open("a") as allowed:
        allowed.write("host all all 10.77.0.0/24 trust\n")
    cluster.identity.become()
    settings = ["-c", "listen_addresses=*", "-c", f"port={PORT}", "-c", "unix_socket_directories="]
    os.execv(f"{cluster.bin_dir}/postgres", [f"{cluster.bin_dir}/postgres", "-D", cluster.pgdata, *settings])


if __name__ == "__main__":
    main(sys.argv[1:])

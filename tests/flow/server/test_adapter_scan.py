"""Scans of adapters: each version of a file makes one job, whichever servers see it and whichever of them dies."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from tests.support.adapters import PRICE, adapter, adapters_server, ingested, python_path, scan, write_config
from tests.support.cli import ask
from tests.support.file_servers import FileServer, Folder, FtpServer, ftp_server, s3_server
from tests.support.jobs import job_of, table, until_state
from tests.support.processes import Processes
from tests.support.server import ServerProcess, start_server
from tests.support.wait import wait_until

DEADLINE_S = 60.0


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    root = tmp_path / "drop"
    root.mkdir()
    return Folder(root)


@pytest.fixture
def ftp(tmp_path: Path) -> Iterator[FtpServer]:
    with ftp_server(tmp_path / "ftp") as server:
        yield server


def replicas(
    stack: ExitStack, directory: Path, database: str, places: dict[str, FileServer], **fields: Any
) -> list[ServerProcess]:
    """Three servers on one database, which scan often."""
    entries = [
        adapter(place, name, scan_every_s=0.3, **({} if name == "store" else {"settled_s": 0.1}), **fields)
        for name, place in places.items()
    ]
    return [
        stack.enter_context(adapters_server(directory, database, places, *entries, name=f"replica{number}"))
        for number in range(3)
    ]


def test_one_job_of_each_file_whichever_replica_sees_it(tmp_path: Path, folder: Folder, database_18: str) -> None:
    with ExitStack() as stack:
        places: dict[str, FileServer] = {
            "drop": folder,
            "ftp": stack.enter_context(ftp_server(tmp_path / "ftp")),
            "store": stack.enter_context(s3_server()),
        }
        first, second, third = replicas(stack, tmp_path, database_18, places)
        for words in ("processor price  ", f"adapter   drop  {folder.root}  for local", "adapter   store  s3://"):
            assert words in first.log
        for number, place in enumerate(places.values(), 1):
            place.put("rows.csv", table(number))
        wait_until(lambda: len(ingested(third)) == 3, DEADLINE_S)
        first.process.kill()
        for number, place in enumerate(places.values(), 4):
            place.put("2024/more.csv", table(number))
        wait_until(lambda: len(ingested(third)) == 6, DEADLINE_S)
        # Every replica has looked once more, and found nothing.
        for server in (second, third):
            assert [found["taken"] for found in scan(server).values()] == [[], [], []]
        files = ingested(second, page_size=2)
        assert {(file["adapter"], file["path"]) for file in files} == {
            (name, path) for name in places for path in ("rows.csv", "2024/more.csv")
        }
        jobs = second.ask("GET", "/api/jobs?pageSize=100").json["jobs"]
        assert {job["id"] for job in jobs} == {file["jobId"] for file in files}
        assert len(jobs) == 6
        for file in files:
            job = until_state(second, file["jobId"], "QUEUED")
            assert job["client"] == f"adapter {file['adapter']}"
            assert (job["owner"], job["jobType"], job["filename"]) == ("local", "prices", file["path"].split("/")[-1])
        assert sorted(job_of(second, file["jobId"])["total"] for file in files) == [1, 2, 3, 4, 5, 6]


def test_a_scan_that_dies_is_taken_over_at_once(tmp_path: Path, ftp: FtpServer, database_18: str) -> None:
    """Killed in the middle of a file: another server has the lead, and makes the one job there is."""

    def reads(server: ServerProcess) -> bool:
        ends = psutil.Process(server.process.pid).net_connections("tcp")
        return any(ftp.port in tuple(end.raddr) for end in ends)

    with ExitStack() as stack:
        servers = replicas(stack, tmp_path, database_18, {"ftp": ftp})
        ftp.gate.close()
        ftp.put("rows.csv", table(40))
        wait_until(ftp.gate.reached.is_set, DEADLINE_S)
        with psycopg.connect(database_18, autocommit=True) as connection:
            leads = (
                "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database"
                " WHERE l.locktype = 'advisory' AND l.granted AND d.datname = current_database()"
            )
            assert ask(connection, leads) == 1
            (leader,) = [server for server in servers if reads(server)]
            others = [server for server in servers if server is not leader]
            assert ingested(others[0]) == []
            ftp.gate.reached.clear()
            leader.process.kill()
            # Another has the lead and is at the same file; the rest leave it to that one.
            wait_until(ftp.gate.reached.is_set, DEADLINE_S)
            assert ask(connection, leads) == 1
            ftp.gate.open()
            wait_until(lambda: len(ingested(others[0])) == 1, DEADLINE_S)
            (file,) = ingested(others[1])
            assert until_state(others[1], file["jobId"], "QUEUED")["total"] == 40
            assert ask(connection, "SELECT count(*) FROM penstock.jobs") == 1


def test_many_files_and_scans_at_once(tmp_path: Path, folder: Folder, database_18: str) -> None:
    for number in range(1, 13):
        folder.put(f"{number}.csv", table(number))
    with ExitStack() as stack:
        servers = replicas(stack, tmp_path, database_18, {"drop": folder})
        with ThreadPoolExecutor(len(servers)) as threads:
            list(threads.map(scan, servers))
        wait_until(lambda: len(ingested(servers[0])) == 12, DEADLINE_S)
        jobs = servers[0].ask("GET", "/api/jobs?pageSize=100").json["jobs"]
        assert len(jobs) == 12


def test_a_changed_folder_is_scanned(tmp_path: Path, folder: Folder, database_18: str) -> None:
    """No scan is due for a day."""
    entry = adapter(folder, "drop", settled_s=0)
    with adapters_server(tmp_path, database_18, {}, entry) as server:
        number = 0

        def arrives() -> bool:
            nonlocal number
            number += 1  # the watch begins some time after the server
            folder.put(f"{number}.csv", table(1))
            return bool(ingested(server))

        wait_until(arrives, DEADLINE_S)


def test_a_file_that_still_grows_is_not_taken(tmp_path: Path, ftp: FtpServer, database_18: str) -> None:
    entry = adapter(ftp, "ftp", settled_s=3_600)
    ftp.put("first.csv", table(1))
    with (
        adapters_server(tmp_path, database_18, {"ftp": ftp}, entry) as server,
        psycopg.connect(database_18, autocommit=True) as connection,
    ):

        def let_hours_pass() -> None:
            connection.execute("UPDATE penstock.sighted_files SET since = since - interval '2 hours'")

        # The scan with which the server begins is over: from here on there are those that are asked for.
        wait_until(lambda: ask(connection, "SELECT count(*) FROM penstock.sighted_files") == 1, DEADLINE_S)
        (ftp.root / "first.csv").unlink()
        for rows in (1, 2, 3):
            ftp.put("rows.csv", table(rows))
            found = scan(server)["ftp"]
            assert (found["found"], found["settling"], found["taken"]) == (1, 1, [])
            assert scan(server)["ftp"]["settling"] == 1
            let_hours_pass()
        (taken,) = scan(server)["ftp"]["taken"]
        assert until_state(server, taken["jobId"], "QUEUED")["total"] == 3
        # A file that is taken away before it has settled is forgotten.
        ftp.put("gone.csv", table(1))
        assert scan(server)["ftp"]["settling"] == 1
        (ftp.root / "gone.csv").unlink()
        assert scan(server)["ftp"]["settling"] == 0
        assert ask(connection, "SELECT count(*) FROM penstock.sighted_files") == 0


def test_a_refused_file_is_set_aside_and_the_others_go_on(tmp_path: Path, folder: Folder, database_18: str) -> None:
    away = FtpServer(tmp_path, port=1)
    entries = [adapter(folder, "drop", settled_s=0), adapter(away, "away")]
    folder.put("a.csv", table(1))
    folder.put("bad.csv", b"a,b\n1,2\n3\n")
    folder.put("empty.csv", b"")
    folder.put("z.csv", table(2))
    with adapters_server(tmp_path, database_18, {"away": away}, *entries) as server:
        wait_until(lambda: len(ingested(server)) == 4, DEADLINE_S)
        found = scan(server)
        assert found["away"]["problem"].startswith("the server cannot be read")
        assert (found["drop"]["found"], found["drop"]["taken"], found["drop"]["setAside"]) == (4, [], [])
        reasons = {file["path"]: file["reason"] for file in ingested(server)}
        assert reasons["a.csv"] is reasons["z.csv"] is None
        assert reasons["bad.csv"].startswith("bad.csv: row 2 (line 3): 1 cell; the header has 2. Give every row")
        assert "empty.csv" in reasons["empty.csv"]
        # Another version is another try.
        folder.put("bad.csv", b"a,b\n1,2\n3,4\n")
        wait_until(lambda: len(ingested(server)) == 5, DEADLINE_S)
        assert ingested(server)[0]["path"] == "bad.csv"
        assert ingested(server)[0]["jobId"] is not None


def test_a_file_that_a_source_cannot_send_keeps_no_other_waiting(
    tmp_path: Path, ftp: FtpServer, database_18: str
) -> None:
    entry = adapter(ftp, "ftp", settled_s=0)
    ftp.put("first.csv", table(1))
    with adapters_server(tmp_path, database_18, {"ftp": ftp}, entry) as server:
        wait_until(lambda: len(ingested(server)) == 1, DEADLINE_S)  # the scan with which the server begins is over
        ftp.gate.close("stuck.csv")
        for name in ("a.csv", "stuck.csv", "z.csv"):
            ftp.put(name, table(1))
        found = scan(server)["ftp"]
        assert {taken["path"] for taken in found["taken"]} == {"a.csv", "z.csv"}
        assert found["problem"] == "stuck.csv cannot be read: the server does not answer in time"
        ftp.gate.open()
        (taken,) = scan(server)["ftp"]["taken"]
        assert taken["path"] == "stuck.csv"


@pytest.mark.parametrize(
    ("changed", "missing", "words"),
    [
        ({}, "watchfiles", "adapter 'drop': the package watchfiles is not installed"),
        ({"spec": {**PRICE, "processor": "nobody"}}, None, "adapter 'drop': spec: there is no processor 'nobody'"),
        ({"root": "drop"}, None, "adapters: entry 1 (drop): root: 'drop' is not an absolute path"),
    ],
)
def test_a_server_whose_adapters_cannot_work_does_not_start(
    tmp_path: Path, folder: Folder, database_18: str, changed: dict[str, Any], missing: str | None, words: str
) -> None:
    config = write_config(tmp_path, {**adapter(folder, "drop"), **changed})
    if missing is not None:
        (tmp_path / f"{missing}.py").write_text(f"raise ImportError('there is no {missing}')")
    env = {"PYTHONPATH": python_path(tmp_path)}
    with Processes(tmp_path) as processes:
        process = start_server(processes, tmp_path, "--config", config, database=database_18, workers=0, env=env)
        assert process.wait(DEADLINE_S) == 2
        said = process.log.read_text()
    assert words in said
    if missing is not None:
        assert "pip install 'penstock[folder]'" in said

"""Jobs whose processor finds more rows: all of them once, however many workers find the same and whatever dies."""

from __future__ import annotations

import csv
from pathlib import Path

import psutil
import psycopg

from tests.support.cli import ask, check_agreement, run_cli
from tests.support.jobs import items_of, job_of, jobs_server, start_job, until_state
from tests.support.wait import wait_until

# Every page links to two others, among them those that others link to.
PAGES = 800
PROCESSORS = f"""
def crawl(item):
    page = item.body["page"]
    links = [link for link in (2 * page, 2 * page + 1, page + 1) if link <= {PAGES}]
    for link in links:
        item.add(str(link), {{"page": link, "from": page}})
    return {{"links": len(links)}}
"""
CONFIG = """
[[processors]]
name = "crawl"
function = "processors_of_tests:crawl"
concurrency = 4
"""


def test_a_run_follows_what_its_function_finds(tmp_path: Path) -> None:
    (tmp_path / "pages.py").write_text(PROCESSORS.replace(str(PAGES), "300"))
    (tmp_path / "start.csv").write_text("page\n1\n")
    command = ("run", "start.csv", "--processor", "pages:crawl", "-o", "out.csv")
    for _ in range(2):  # run again, it writes the same
        finished = run_cli(*command, cwd=tmp_path)
        assert finished.code == 0, finished.stderr
        with (tmp_path / "out.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert rows[0] == {"page": "1", "from": "", "links": "3", "status": "DONE", "attempts": "1", "error": ""}
        assert sorted(int(row["page"]) for row in rows[1:]) == list(range(2, 301))
        assert {row["status"] for row in rows} == {"DONE"}


def test_a_job_ends_when_what_was_found_is_worked_off(tmp_path: Path, database_18: str) -> None:
    liveness = ("--set", "heartbeat_interval_s=0.3", "--set", "heartbeat_grace_s=2")
    with (
        psycopg.connect(database_18, autocommit=True) as connection,
        jobs_server(
            tmp_path, *liveness, database=database_18, workers=2, processors=PROCESSORS, config_text=CONFIG
        ) as server,
    ):
        name = start_job(server, b"page\n1\n", {"processor": "crawl", "maxConcurrency": 20})
        wait_until(lambda: job_of(server, name)["total"] > PAGES // 10, 60)
        for pid in server.worker_pids:
            psutil.Process(pid).kill()
        job = until_state(server, name, "DONE")
        assert (job["total"], job["processed"], job["failed"]) == (PAGES, PAGES, 0)
        assert job["columns"] == ["page", "from"]
        items = items_of(server, name)
        assert [item["row"] for item in items] == list(range(1, PAGES + 1))
        assert sorted(item["input"]["page"] for item in items) == list(range(1, PAGES + 1))
        assert ask(connection, "SELECT count(*) FROM penstock.row_keys") == PAGES - 1
        assert ask(connection, "SELECT busy FROM penstock.lanes") == 0
        check_agreement(connection)

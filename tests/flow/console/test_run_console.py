"""`penstock run --console`: the run, live, in a browser on this machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from tests.support.batch_api import jsonl
from tests.support.mock_process import start_mock_process
from tests.support.processes import Processes
from tests.support.wait import wait_until

DEADLINE_S = 60.0


def get(address: str, **headers: str) -> bytes:
    with urlopen(Request(address, headers=headers), timeout=30) as answer:
        content: bytes = answer.read()
        return content


def test_a_run_is_seen_while_it_lasts(tmp_path: Path, database_18: str) -> None:
    source, answers = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    source.write_bytes(jsonl(40))
    with start_mock_process("--latency", "300ms..300ms") as upstream, Processes(tmp_path) as processes:
        where = ("--base-url", upstream.base_url, "--database-url", database_18, "--concurrency", "1")
        process = processes.penstock("run", "run", source, "-o", answers, *where, "--console", "--json")
        address = ""

        def told() -> bool:
            nonlocal address
            found = re.search(r"console at (http://127\.0\.0\.1:\d+/console/)", process.log.read_text())
            address = found[1] if found else ""
            return bool(address)

        wait_until(told, DEADLINE_S)
        assert b"Penstock" in get(address)
        api = address.replace("/console/", "/api")

        def work() -> Any:
            return json.loads(get(f"{api}/work"))["work"]

        wait_until(lambda: bool(work()) and work()[0]["state"] == "RUNNING", DEADLINE_S)
        run = work()[0]
        assert (run["kind"], run["total"]) == ("batch", 40)
        assert len(json.loads(get(f"{api}/jobs/{run['id']}/items?pageSize=10"))["items"]) == 10
        assert process.wait(DEADLINE_S) == 0
    assert len(answers.read_bytes().splitlines()) == 40

"""Servers and workers on one database keep to one limit of a provider, counted by the upstream itself."""

from __future__ import annotations

from pathlib import Path

import openai
import psutil

from tests.support.batch_api import jsonl, submit
from tests.support.mock_process import MockProcess, start_mock_process
from tests.support.processes import Processes
from tests.support.server import ServerProcess, served
from tests.support.wait import wait_until

CAP = 12
FAST = ("--set", "heartbeat_interval_s=0.5", "--set", "heartbeat_grace_s=2")
CALL = {"model": "small", "messages": [{"role": "user", "content": "hello"}]}


def figure(mock: MockProcess, name: str) -> int:
    value = mock.stats()[name]
    assert isinstance(value, int)
    return value


def begin_batch(server: ServerProcess, lines: int) -> None:
    submit(server.closing(openai.OpenAI(base_url=server.base_url, api_key="none")), jsonl(lines))


def test_never_more_calls_than_the_limit_and_soon_as_many_again(tmp_path: Path, database_18: str) -> None:
    config = tmp_path / "penstock.toml"
    with start_mock_process("--latency", "200ms") as mock, Processes(tmp_path) as processes:
        config.write_text(
            f'[[providers]]\nname = "main"\nbase_url = "{mock.base_url}"\nmodels = ["*"]\nmax_concurrency = {CAP}\n'
        )
        options = ("--config", str(config), *FAST)
        with (
            served(tmp_path / "a", *options, database=database_18) as first,
            served(tmp_path / "b", *options, database=database_18) as second,
        ):
            worker = processes.penstock("worker", "worker", *options, "--workers", "2", "--database-url", database_18)
            begin_batch(first, 3_000)
            begin_batch(second, 3_000)
            wait_until(lambda: figure(mock, "in_flight") >= CAP - 1, 30)
            # A process that dies takes its slots along, until its grace is over.
            wait_until(lambda: len(psutil.Process(worker.pid).children()) == 2, 30)
            for child in psutil.Process(worker.pid).children():
                child.kill()
            worker.kill()
            wait_until(lambda: figure(mock, "in_flight") >= CAP - 1, 30)
            # A call that is passed on gets its turn beside them.
            assert first.ask("POST", "/v1/chat/completions", CALL).status == 200
            assert figure(mock, "max_in_flight") <= CAP


def test_a_wait_that_one_call_is_told_is_kept_by_all(tmp_path: Path, database_18: str) -> None:
    """Retry-After, by a call passed on: batches and sessions wait too, also those of a server started since."""
    with start_mock_process("--rate-limit", "1/m", "--retry-after", "40s", "--limit-headers", "retry-after") as mock:
        options = ("--base-url", mock.base_url, *FAST)
        with served(tmp_path / "a", *options, database=database_18) as server:
            assert server.ask("POST", "/v1/chat/completions", CALL).status == 200
            refused = server.ask("POST", "/v1/chat/completions", CALL)
            assert (refused.status, refused.json["error"]["code"]) == (429, "rate_limit_exceeded")
            calls = figure(mock, "calls")
            begin_batch(server, 20)
            asked = {"endpoint": "/v1/chat/completions", "body": CALL}
            queued = server.ask("POST", "/v1/sessions/s/requests", asked, headers={"prefer": "respond-async"})
            assert queued.status == 202
            held = server.ask("POST", "/v1/chat/completions", CALL)
            assert held.json["error"]["code"] == "provider_busy"
            assert 30 <= int(held.headers["retry-after"]) <= 40
        with served(tmp_path / "b", *options, database=database_18) as again:
            wait_until(lambda: again.ask("GET", "/v1/providers").json["data"][0]["gates"], 20)
            held = again.ask("POST", "/v1/chat/completions", CALL)
            assert held.json["error"]["code"] == "provider_busy"
        assert figure(mock, "calls") == calls

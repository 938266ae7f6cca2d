"""Providers in an operator's hands: keys that are mended, names that change, calls that are too many."""

from __future__ import annotations

import asyncio
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import Any
from uuid import uuid4

import openai
import psycopg
import pytest

from penstock.batches.unserved import list_unserved, move_lanes
from penstock.claim import claim as claims
from penstock.claim import gates, liveness
from penstock.config import Config, LivenessLimits
from penstock.db.pool import Connection
from penstock.dispatch.providers import Provider, Providers
from penstock.model import Again
from penstock.server.background import BackgroundDuties
from penstock.settle.write import Changes, settle
from tests.support import sessions
from tests.support.certificates import authority, local_tls
from tests.support.cli import run_cli
from tests.support.db import connected, one, pooled, with_connection
from tests.support.engine import claim_due, make_batch
from tests.support.forward_proxy import ForwardProxy
from tests.support.hostile import GOOD_BODY, Upstream
from tests.support.mock_process import start_mock_process
from tests.support.recorder import recording
from tests.support.server import ServerProcess, served
from tests.support.session_api import asking, client
from tests.support.tcp_server import LoopThread
from tests.support.wait import wait_until

GRACE_S = 0.2
NEW = Provider("new", "http://127.0.0.1:9/v1", ("model-0",))
_POOLS = "SELECT array_agg(DISTINCT pool ORDER BY pool) FROM penstock."


def ask(server: ServerProcess, text: str, *, stream: bool = False) -> None:
    messages: list[Any] = [{"role": "user", "content": text}]
    with client(server) as caller:
        if not stream:
            caller.chat.completions.create(model="small", messages=messages)
            return
        with caller.chat.completions.create(model="small", messages=messages, stream=True) as answer:
            list(answer)


# -- keys and gates


def test_a_mended_key_is_used_once_the_provider_is_resumed(tmp_path: Path, database_18: str) -> None:
    key, config = tmp_path / "key", tmp_path / "penstock.toml"
    key.write_text("sk-the-wrong-key")
    with start_mock_process("--require-key", "sk-the-right-key") as mock:
        config.write_text(
            f'[[providers]]\nname = "main"\nbase_url = "{mock.base_url}"\nmodels = ["*"]\napi_key_file = "{key}"\n'
        )
        with served(tmp_path, "--config", config, database=database_18) as server:
            for stream in (False, True):
                with pytest.raises(openai.InternalServerError, match="It is not your API key") as refused:
                    ask(server, "direct", stream=stream)
                assert (refused.value.status_code, refused.value.code) == (502, "provider_refused")
                # The official clients would try a 502 twice more.
                assert refused.value.response.headers["x-should-retry"] == "false"
                # Without keys the one user is the operator, who is told what the provider says.
                assert "(invalid_api_key: " in str(refused.value)
            assert "provider main refuses calls of small that are passed on: HTTP 401 invalid_api_key\n" in server.log
            queued = server.ask(
                "POST", "/v1/sessions/s/requests", asking("queued"), headers={"prefer": "respond-async"}
            ).json
            wait_until(lambda: "is halted" in server.log, 30)
            (line,) = [line for line in server.log.splitlines() if "is halted" in line]
            assert "provider main (session:main): route small is halted: HTTP 401" in line
            assert "`penstock providers resume main` or POST /v1/providers/main/resume" in line
            wait_until(lambda: server.ask("GET", "/v1/providers").json["data"][0]["gates"], 30)
            listed = run_cli("providers", "--server", server.url, cwd=tmp_path).expect(0)
            assert "main  halted" in listed.stdout
            assert "small  halted for every owner: " in listed.stdout

            def told() -> str:
                waited = server.ask("POST", "/v1/sessions/s/requests?wait=0.05", asking("waited"))
                assert (waited.status, waited.json["error"]["code"]) == (503, "wait_timeout")
                return str(waited.json["error"]["message"])

            # While the database is slow, a caller gets its answer without the reason.
            reason = "'main' refuses calls of small (invalid_api_key), so nobody's are made until an operator"
            wait_until(lambda: reason in told(), 30)

            key.write_text("sk-the-right-key")
            resumed = run_cli("providers", "resume", "main", "--json", "--server", server.url, cwd=tmp_path).expect(0)
            assert (resumed.summary["name"], resumed.summary["gates"]) == ("main", [])
            answer = server.ask("GET", f"/v1/sessions/s/requests/{queued['id']}?wait=30").json
            assert answer["status"] == "completed"
            ask(server, "direct")
            run_cli("providers", "resume", "nobody", "--server", server.url, cwd=tmp_path).expect(1)
            assert "sk-the" not in server.log


def test_what_needs_a_person_is_shown_before_what_waits(tmp_path: Path, database_18: str) -> None:
    async def close(connection: Connection) -> None:
        await gates.close(connection, "serve:default", "a", 1_000, "rate_limit", "slower")
        await gates.halt(connection, "session:default", "a", "invalid_api_key", "no")
        await gates.halt(connection, "serve:default", "b", "invalid_api_key", "no")
        await gates.close(connection, "session:default", "b", 1_000, "rate_limit", "slower")

    with served(tmp_path, "--base-url", "http://127.0.0.1:9/v1", database=database_18, workers=0) as server:
        with_connection(database_18, close)
        (provider,) = server.ask("GET", "/v1/providers").json["data"]
        assert {gate["model"]: gate["state"] for gate in provider["gates"]} == {"a": "halted", "b": "halted"}


# -- calls that are passed on at once


@pytest.mark.parametrize("stream", [False, True])
def test_direct_calls_are_bounded_too(tmp_path: Path, database_18: str, stream: bool) -> None:
    with recording() as upstream, ThreadPoolExecutor(1) as threads:
        config = tmp_path / "penstock.toml"
        config.write_text(
            f'[[providers]]\nname = "main"\nbase_url = "{upstream.base_url}"\nmodels = ["*"]\nmax_concurrency = 1\n'
        )
        with served(tmp_path, "--config", config, database=database_18, workers=0) as server:
            first = threads.submit(ask, server, "hold one", stream=stream)
            upstream.wait_called("hold one")
            began = monotonic()
            with pytest.raises(openai.RateLimitError) as caught:
                ask(server, "two", stream=stream)
            assert monotonic() - began < 10
            assert (caught.value.code, caught.value.response.headers["retry-after"]) == ("provider_busy", "1")
            upstream.release("one")
            first.result()
            for _ in range(3):  # a place is given back, whatever became of the call
                with pytest.raises(openai.UnprocessableEntityError):
                    ask(server, "fail 422", stream=stream)
            ask(server, "three", stream=stream)
            assert "two" not in upstream.texts


# -- how they are reached


def test_a_provider_is_reached_over_tls_and_through_its_proxy(tmp_path: Path, database_18: str) -> None:
    config = tmp_path / "penstock.toml"
    with (
        LoopThread("upstream") as thread,
        thread.entered(Upstream(tls=local_tls())) as upstream,
        thread.entered(ForwardProxy()) as proxy,
    ):
        config.write_text(
            f'[[providers]]\nname = "main"\nbase_url = "{upstream.base_url}"\nmodels = ["*"]\n'
            f'ca_file = "{authority().file}"\nproxy = "http://user:pass-word@{proxy.authority}"\n'
        )
        with served(tmp_path, "--config", config, database=database_18) as server:
            direct = server.ask("POST", "/v1/chat/completions", {"model": "small", "messages": []})
            assert (direct.status, direct.content) == (200, GOOD_BODY)
            waited = server.ask("POST", "/v1/sessions/s/requests?wait=30", asking("queued"))
            assert waited.json["status"] == "completed"
            assert "pass-word" not in server.log
        assert len(upstream.received) == 2
        assert all(head.startswith(f"CONNECT 127.0.0.1:{upstream.port} ") for head in proxy.heads)


# -- providers that are gone


def test_work_of_a_provider_that_is_gone_goes_to_the_one_that_serves_its_model(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = dataclasses.replace(Config(), liveness=LivenessLimits(heartbeat_interval_s=0.1, heartbeat_grace_s=GRACE_S))

    async def run() -> None:
        async with connected(database) as connection, pooled(database) as pool:
            await make_batch(connection, [5, 3], pool="serve:old")  # model-0 and model-1
            await sessions.send(connection, "s", "s", pool="session:old")
            await make_batch(connection, [5], pool="run:other")
            async with BackgroundDuties(config, database, pool, Providers([NEW])) as caretaker, asyncio.timeout(30):
                while await one(connection, f"{_POOLS}lanes") != (
                    ["run:other", "serve:new", "serve:old", "session:new"],
                ):
                    caretaker.wake("reroute")
                    await asyncio.sleep(0.02)
            assert await one(connection, f"{_POOLS}session_requests") == (["session:new"],)
            assert await list_unserved(connection, ["serve:new", "session:new"], GRACE_S) == {"serve:old": ["model-1"]}

    asyncio.run(run())
    assert "serve:old has unfinished work and no provider or worker: configure a provider for model-1" in caplog.text
    assert caplog.text.count("serve:old has unfinished work") == 1


def test_work_that_somebody_has_is_not_moved(database: str) -> None:
    async def body(connection: Connection) -> None:
        async def move() -> int:
            return await move_lanes(connection, "serve:old", "model-0", "serve:new", GRACE_S)

        await make_batch(connection, [5], pool="serve:old")
        worker = uuid4()
        await liveness.register(connection, worker, "serve:old")
        assert await list_unserved(connection, [], 60) == {}
        assert await move_lanes(connection, "serve:old", "model-0", "serve:new", 60) == 0
        leases = await claim_due(connection, pool="serve:old", wants={"model-0": 2}, worker_id=worker)
        await liveness.unregister(connection, worker)
        assert await list_unserved(connection, [], GRACE_S) == {"serve:old": ["model-0"]}
        assert await list_unserved(connection, ["serve:old"], GRACE_S) == {}
        assert await move() == 0

        items = await claims.read_bodies(connection, leases[0], leases[0].ranges, max_rows=9, max_bytes=1 << 20)
        changes = Changes()
        for item in items:
            changes.decide(item, Again("busy", "later", 100, True, 500, 1))
        assert (await settle(connection, worker, changes)).retries == len(items) > 0
        assert await move() == 1
        assert await one(connection, f"{_POOLS}lanes") == (["serve:new"],)
        assert await one(connection, f"{_POOLS}deferrals") == (["serve:new"],)
        assert await move() == 0

    with_connection(database, body)


def test_rows_of_jobs_are_never_moved(database: str) -> None:
    async def body(connection: Connection) -> None:
        for pool in ("serve:rows", "serve:retried"):
            await make_batch(connection, [5], pool=pool)
        await connection.execute("UPDATE penstock.lanes SET endpoint = 'rows'")
        worker = uuid4()
        await liveness.register(connection, worker, "serve:retried")
        [lease] = await claim_due(connection, pool="serve:retried", wants={"model-0": 5}, worker_id=worker)
        items = await claims.read_bodies(connection, lease, lease.ranges, max_rows=9, max_bytes=1 << 20)
        changes = Changes()
        for item in items:
            changes.decide(item, Again("busy", "later", 100, True, 500, 1))
        assert (await settle(connection, worker, changes)).retries == len(items) > 0
        await liveness.unregister(connection, worker)
        for pool in ("serve:rows", "serve:retried"):
            assert await move_lanes(connection, pool, "model-0", "serve:new", GRACE_S) == 0
        # The operator is told of them all the same.
        unserved = {"serve:retried": ["model-0"], "serve:rows": ["model-0"]}
        assert await list_unserved(connection, ["serve:new"], GRACE_S) == unserved
        assert await one(connection, f"{_POOLS}lanes") == (["serve:retried", "serve:rows"],)
        assert await one(connection, f"{_POOLS}deferrals") == (["serve:retried"],)

    with_connection(database, body)


def test_a_renamed_provider_takes_its_work_along(tmp_path: Path, database_18: str) -> None:
    config = tmp_path / "penstock.toml"
    settings = "heartbeat_interval_s = 0.5\nheartbeat_grace_s = 1\n"
    with start_mock_process() as mock:
        named = f'{settings}[[providers]]\nname = "{{}}"\nbase_url = "{mock.base_url}"\nmodels = ["{{}}"]\n'
        config.write_text(named.format("old", "small"))
        with served(tmp_path, "--config", config, database=database_18, workers=0) as server:
            for number in range(2):
                sent = server.ask(
                    "POST", "/v1/sessions/s/requests", asking(str(number)), headers={"prefer": "respond-async"}
                )
            assert server.stop() == 0
        config.write_text(named.format("other", "large"))
        with served(tmp_path, "--config", config, database=database_18, workers=0) as server:
            assert server.ask("GET", "/v1/providers").json["unserved"] == [{"pool": "session:old", "models": ["small"]}]
            listed = run_cli("providers", "list", "--server", server.url, cwd=tmp_path).expect(0)
            assert "session:old  unserved" in listed.stdout
            wait_until(lambda: "configure a provider for small" in server.log, 30)
            assert server.stop() == 0
        config.write_text(named.format("new", "small"))
        with served(tmp_path, "--config", config, database=database_18) as server:
            answer = server.ask("GET", f"/v1/sessions/s/requests/{sent.json['id']}?wait=30").json
            assert answer["status"] == "completed"
            assert server.ask("GET", "/v1/providers").json["unserved"] == []
    with psycopg.connect(database_18) as connection:
        assert connection.execute("SELECT DISTINCT pool FROM penstock.session_requests").fetchall() == [
            ("session:new",)
        ]

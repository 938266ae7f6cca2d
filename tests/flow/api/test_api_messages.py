"""Message batches through the official Anthropic client: every call it has, and every answer it can get."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import anthropic
import psycopg
import pytest
from anthropic.types.messages import MessageBatch
from anthropic.types.messages.batch_create_params import Request

from penstock.model import new_id
from tests.support.mock_process import MockProcess, start_mock_process
from tests.support.server import ServerProcess, served
from tests.support.wait import wait_until

MODEL = "llama-test"


@pytest.fixture(scope="module")
def ground(server_18: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, MockProcess]]:
    """One server for the tests that leave others' batches alone."""
    with fresh_server(tmp_path_factory.mktemp("messages"), database_of(server_18, "messages")) as both:
        yield both


def database_of(server: str, name: str) -> str:
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE template_penstock")
    return psycopg.conninfo.make_conninfo(server, dbname=name)


@contextmanager
def fresh_server(
    directory: Path, database: str, *args: str, mock: tuple[str, ...] = (), env: dict[str, str] | None = None
) -> Iterator[tuple[ServerProcess, MockProcess]]:
    with ExitStack() as stack:
        upstream = stack.enter_context(start_mock_process(*mock))
        config = directory / "penstock.toml"
        config.write_text(f'[[providers]]\nname = "mock"\nbase_url = "{upstream.base_url}"\nmodels = ["llama-*"]\n')
        options: tuple[str | Path, ...] = ("--config", config, *args)
        server = stack.enter_context(served(directory, *options, database=database, env=env))
        yield server, upstream


@pytest.fixture
def client(ground: tuple[ServerProcess, MockProcess]) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=ground[0].url, api_key="none", max_retries=0) as made:
        yield made


def requests(count: int, *, start: int = 0, **params: Any) -> list[Request]:
    return [
        {
            "custom_id": f"request-{number}",
            "params": {
                "model": MODEL,
                "max_tokens": 16,
                "messages": [{"role": "user", "content": f"question {number}"}],
                **params,  # type: ignore[typeddict-item]
            },
        }
        for number in range(start, start + count)
    ]


def ended(client: anthropic.Anthropic, batch_id: str) -> MessageBatch:
    wait_until(lambda: client.messages.batches.retrieve(batch_id).processing_status == "ended", 60)
    return client.messages.batches.retrieve(batch_id)


def test_a_batch_from_creation_to_results(client: anthropic.Anthropic) -> None:
    batch = client.messages.batches.create(requests=requests(5))
    assert batch.id.startswith("msgbatch_")
    assert batch.type == "message_batch"
    assert batch.processing_status in ("in_progress", "ended")
    assert batch.expires_at - batch.created_at == timedelta(hours=24)
    assert batch.created_at.tzinfo is not None
    done = ended(client, batch.id)
    assert done.request_counts.to_dict() == {
        "processing": 0,
        "succeeded": 5,
        "errored": 0,
        "canceled": 0,
        "expired": 0,
    }
    assert done.ended_at is not None
    assert (done.cancel_initiated_at, done.archived_at) == (None, None)
    assert done.results_url == f"/v1/messages/batches/{batch.id}/results"
    results = list(client.messages.batches.results(batch.id))
    assert [result.custom_id for result in results] == [f"request-{number}" for number in range(5)]
    for number, result in enumerate(results):
        assert result.result.type == "succeeded"
        message = result.result.message
        assert message.type == "message"
        assert message.content[0].type == "text"
        assert message.content[0].text.startswith(f"echo: question {number} ")
        assert message.usage.output_tokens > 0
    deleted = client.messages.batches.delete(batch.id)
    assert (deleted.id, deleted.type) == (batch.id, "message_batch_deleted")
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.retrieve(batch.id)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.delete(batch.id)


def test_the_asynchronous_and_the_beta_client(ground: tuple[ServerProcess, MockProcess]) -> None:
    async def run() -> None:
        async with anthropic.AsyncAnthropic(base_url=ground[0].url, api_key="none", max_retries=0) as client:
            for batches in (client.messages.batches, client.beta.messages.batches):
                batch = await batches.create(requests=requests(3))  # type: ignore[arg-type]
                while (await batches.retrieve(batch.id)).processing_status != "ended":
                    await asyncio.sleep(0.05)
                results = [result.custom_id async for result in await batches.results(batch.id)]
                assert results == ["request-0", "request-1", "request-2"]
                listed = [found.id async for found in await batches.list(limit=1)]
                assert batch.id in listed
                assert (await batches.delete(batch.id)).id == batch.id

    asyncio.run(run())


def test_lists_go_both_ways(client: anthropic.Anthropic) -> None:
    made = [client.messages.batches.create(requests=requests(1)).id for _ in range(7)]
    newest_first = made[::-1]
    everything = [batch.id for batch in client.messages.batches.list(limit=2)]
    assert everything[:7] == newest_first
    assert len(set(everything)) == len(everything)
    page = client.messages.batches.list(limit=3, after_id=newest_first[1])
    assert [batch.id for batch in page.data] == newest_first[2:5]
    assert page.has_more
    assert (page.first_id, page.last_id) == (newest_first[2], newest_first[4])
    page = client.messages.batches.list(limit=2, before_id=newest_first[5])
    assert [batch.id for batch in page.data] == newest_first[3:5]
    assert page.has_more
    # Going back page by page, each page newest first.
    back = [
        batch.id
        for page in client.messages.batches.list(limit=2, before_id=made[0]).iter_pages()
        for batch in page.data
    ]
    assert sorted(back) == sorted(made[1:])
    page = client.messages.batches.list(limit=10, before_id=newest_first[3])
    assert [batch.id for batch in page.data] == newest_first[:3]
    assert not page.has_more
    # A cursor outlives its batch.
    ended(client, newest_first[1])
    client.messages.batches.delete(newest_first[1])
    page = client.messages.batches.list(limit=3, after_id=newest_first[1])
    assert [batch.id for batch in page.data] == newest_first[2:5]


@pytest.mark.parametrize(
    "query",
    [{"limit": 0}, {"limit": 1001}, {"after_id": "batch_1"}, {"before_id": "x"}, {"after_id": "a", "before_id": "b"}],
)
def test_bad_queries(client: anthropic.Anthropic, query: dict[str, Any]) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.batches.list(**query)
    check_error(caught.value, "invalid_request_error")


def check_error(error: anthropic.APIStatusError, kind: str) -> str:
    """Every error has the shape its class is made from; its message."""
    body: Any = error.body
    assert body["type"] == "error"
    assert body["error"]["type"] == kind
    assert error.request_id == body["request_id"] == error.response.headers["request-id"]
    message: str = body["error"]["message"]
    assert message
    return message


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "requests"),
        ([], ""),
        ({"requests": []}, "requests"),
        ({"requests": {}}, "requests"),
        ({"requests": [5]}, "requests.0"),
        ({"requests": [{"params": {"model": MODEL}}]}, "requests.0.custom_id"),
        ({"requests": [{"custom_id": "a"}]}, "requests.0.params"),
        ({"requests": [{"custom_id": 1, "params": {"model": MODEL}}]}, "requests.0.custom_id"),
        ({"requests": [{"custom_id": "a", "params": 5}]}, "requests.0.params"),
        ({"requests": [{"custom_id": "a", "params": {}}]}, "requests.0.params.model"),
        ({"requests": [{"custom_id": "a", "params": {"model": 5}}]}, "requests.0.params.model"),
        ({"requests": requests(3) + requests(1, start=1)}, "requests.3.custom_id"),
        ({"requests": requests(2) + requests(1, start=2, model="gpt-unknown")}, "requests.2.params.model"),
    ],
)
def test_a_body_that_cannot_run_is_refused_by_place(
    ground: tuple[ServerProcess, MockProcess], client: anthropic.Anthropic, given: Any, named: str
) -> None:
    before = files_and_batches(ground[0])
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.post("/v1/messages/batches", body=given, cast_to=object)
    message = check_error(caught.value, "invalid_request_error")
    assert named in message
    assert files_and_batches(ground[0]) == before


def files_and_batches(server: ServerProcess) -> tuple[int, int]:
    files = server.ask("GET", "/v1/files").json["data"]
    batches = server.ask("GET", "/v1/messages/batches?limit=1000").json["data"]
    return len(files), len(batches)


@pytest.mark.parametrize("body", [b"", b"{", b'{"requests": [', b"\xff", b"[[[[", b'{"requests": [{"custom_id": "a"'])
def test_what_is_no_json_is_refused(ground: tuple[ServerProcess, MockProcess], body: bytes) -> None:
    answer = ground[0].ask("POST", "/v1/messages/batches", body, headers={"content-type": "application/json"})
    assert answer.status == 400
    assert answer.json["error"]["type"] == "invalid_request_error"


def test_any_version_and_beta_header_will_do(ground: tuple[ServerProcess, MockProcess]) -> None:
    for version in ("2023-06-01", "2026-10-21", "whatever"):
        headers = {"anthropic-version": version, "anthropic-beta": "message-batches-2024-09-24", "x-api-key": "none"}
        body = {"requests": requests(1, temperature=0.5, top_p=0.9, top_k=5)}
        assert ground[0].ask("POST", "/v1/messages/batches", body, headers=headers).status == 200


def test_missing_things_are_not_found(client: anthropic.Anthropic) -> None:
    for name in ("msgbatch_" + "0" * 32, "msgbatch_x", "batch_" + "0" * 32, "nothing"):
        for call in (
            client.messages.batches.retrieve,
            client.messages.batches.cancel,
            client.messages.batches.delete,
            client.messages.batches.results,
        ):
            with pytest.raises(anthropic.NotFoundError) as caught:
                call(name)
            check_error(caught.value, "not_found_error")


def test_upstream_errors_are_results(database_18: str, tmp_path: Path) -> None:
    with fresh_server(tmp_path, database_18, mock=("--reject-rate", "0.5")) as (server, _):
        client = server.closing(anthropic.Anthropic(base_url=server.url, api_key="none"))
        batch = client.messages.batches.create(requests=requests(40))
        done = ended(client, batch.id)
        results = list(client.messages.batches.results(batch.id))
        errored = [result.result for result in results if result.result.type == "errored"]
        assert 0 < len(errored) < 40
        assert done.request_counts.errored == len(errored)
        assert done.request_counts.succeeded == 40 - len(errored)
        for result in errored:
            assert result.error.type == "error"
            assert result.error.error.type == "invalid_request_error"
            assert result.error.error.message


def test_cancel_and_the_rules_while_it_runs(database_18: str, tmp_path: Path) -> None:
    with fresh_server(tmp_path, database_18, mock=("--latency", "0.5s", "--capacity", "16")) as (server, mock):
        client = server.closing(anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0))
        total = 3000
        batch = client.messages.batches.create(requests=requests(total))
        assert batch.request_counts.processing == total
        wait_until(lambda: int(str(mock.stats()["calls"])) > 2, 30)
        running = client.messages.batches.retrieve(batch.id)
        assert running.processing_status == "in_progress"
        assert running.request_counts.to_dict() == {
            "processing": total,
            "succeeded": 0,
            "errored": 0,
            "canceled": 0,
            "expired": 0,
        }
        assert running.results_url is None
        with pytest.raises(anthropic.AnthropicError, match="results_url"):
            client.messages.batches.results(batch.id)
        assert server.ask("GET", f"/v1/messages/batches/{batch.id}/results").status == 404
        with pytest.raises(anthropic.BadRequestError, match="has not ended"):
            client.messages.batches.delete(batch.id)
        with server.frozen_workers():  # it does not end between the two calls
            cancelled = client.messages.batches.cancel(batch.id)
            assert cancelled.cancel_initiated_at is not None
            assert cancelled.processing_status in ("canceling", "ended")
            if cancelled.processing_status == "canceling":
                again = client.messages.batches.cancel(batch.id)
                assert again.cancel_initiated_at == cancelled.cancel_initiated_at
        done = ended(client, batch.id)
        counts = done.request_counts
        assert counts.processing == 0
        assert counts.canceled > 0
        assert counts.succeeded + counts.errored + counts.canceled == total
        kinds = [result.result.type for result in client.messages.batches.results(batch.id)]
        assert len(kinds) == total
        assert kinds.count("canceled") == counts.canceled
        assert kinds.count("succeeded") == counts.succeeded
        with pytest.raises(anthropic.BadRequestError, match="cannot be canceled"):
            client.messages.batches.cancel(batch.id)


def test_owners_and_both_headers(database_18: str, tmp_path: Path) -> None:
    with fresh_server(tmp_path, database_18, env={"PENSTOCK_KEY_CACHE_S": "0"}) as (server, _):
        admin = server.ask("POST", "/v1/keys", {"owner": "root", "name": "n", "role": "admin"}).json["key"]
        alice, bob = (
            server.ask("POST", "/v1/keys", {"owner": owner, "name": "n", "role": "user"}, key=admin).json["key"]
            for owner in ("alice", "bob")
        )
        new = server.closing(anthropic.Anthropic(base_url=server.url, api_key=alice, max_retries=0))
        batch = new.messages.batches.create(requests=requests(1))
        ended(new, batch.id)
        old = server.ask("GET", f"/v1/messages/batches/{batch.id}", headers={"x-api-key": alice})
        assert old.status == 200
        stranger = server.closing(anthropic.Anthropic(base_url=server.url, api_key=bob, max_retries=0))
        assert [found.id for found in stranger.messages.batches.list()] == []
        for call in (
            stranger.messages.batches.retrieve,
            stranger.messages.batches.cancel,
            stranger.messages.batches.delete,
            stranger.messages.batches.results,
        ):
            with pytest.raises(anthropic.NotFoundError) as caught:
                call(batch.id)
            assert check_error(caught.value, "not_found_error") == f"No such MessageBatch object: {batch.id}"
        for key in ("wrong", alice + "x"):
            nobody = server.closing(anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0))
            with pytest.raises(anthropic.AuthenticationError) as refused:
                nobody.messages.batches.list()
            check_error(refused.value, "authentication_error")
        assert new.messages.batches.delete(batch.id).id == batch.id


def test_limits_are_told_with_413(database_18: str, tmp_path: Path) -> None:
    env = {"PENSTOCK_MAX_MESSAGE_BATCH_BYTES": "20000", "PENSTOCK_MAX_MESSAGE_BATCH_REQUESTS": "10"}
    with fresh_server(tmp_path, database_18, env=env) as (server, _):
        client = server.closing(anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0))
        client.messages.batches.create(requests=requests(10))
        with pytest.raises(anthropic.APIStatusError) as caught:
            client.messages.batches.create(requests=requests(11))
        assert caught.value.status_code in (400, 413)
        with pytest.raises(anthropic.RequestTooLargeError) as too_large:
            client.messages.batches.create(requests=requests(5, system="x" * 20_000))
        check_error(too_large.value, "request_too_large")


def test_an_idempotency_key_makes_one_batch(client: anthropic.Anthropic) -> None:
    headers = {"Idempotency-Key": "message-batch-1"}
    first = client.messages.batches.create(requests=requests(2), extra_headers=headers)
    again = client.messages.batches.create(requests=requests(2), extra_headers=headers)
    assert again.id == first.id
    with pytest.raises(anthropic.ConflictError) as caught:
        client.messages.batches.create(requests=requests(3), extra_headers=headers)
    check_error(caught.value, "invalid_request_error")
    assert caught.value.response.headers["x-should-retry"] == "false"


def test_requests_are_no_file_and_go_with_the_results(database_18: str, tmp_path: Path) -> None:
    with (
        fresh_server(tmp_path, database_18) as (server, _),
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client,
        psycopg.connect(database_18, autocommit=True) as connection,
    ):
        batch = client.messages.batches.create(requests=requests(3))
        counts = ended(client, batch.id).request_counts
        (file_id,) = connection.execute("SELECT id FROM penstock.files").fetchall()[0]
        for query in ("", "?purpose=message_batch", "?purpose=batch", "?order=asc"):
            assert server.ask("GET", f"/v1/files{query}").json["data"] == []
        path = f"/v1/files/file-{file_id.hex}"
        asked = [server.ask(*way).status for way in (("GET", path), ("GET", f"{path}/content"), ("DELETE", path))]
        assert asked == [404, 404, 404]
        wish = {"input_file_id": f"file-{file_id.hex}", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        assert server.ask("POST", "/v1/batches", wish).status == 404

        connection.execute("UPDATE penstock.batches SET created_at = created_at - interval '29 days'")
        left = "SELECT (SELECT count(*) FROM penstock.outcomes) + (SELECT count(*) FROM penstock.templates)"
        wait_until(lambda: connection.execute(left).fetchone() == (0,), 60)
        archived = client.messages.batches.retrieve(batch.id)
        assert (archived.archived_at is not None, archived.results_url, archived.request_counts) == (True, None, counts)
        with pytest.raises(anthropic.AnthropicError):
            client.messages.batches.results(batch.id)
        client.messages.batches.delete(batch.id)
        reports = {entry["kind"]: entry["object_id"] for entry in server.ask("GET", "/v1/erasures").json["data"]}
        assert reports == {
            "message_batch_results": batch.id,
            "message_batch": batch.id,
        }
        server.ask("PUT", "/v1/sessions/dialogue", {})
        session = server.ask("DELETE", "/v1/sessions/dialogue").json["id"]
        newest = server.ask("GET", "/v1/erasures?limit=1").json["data"][0]
        assert (newest["kind"], newest["object_id"]) == ("session", session)


def test_one_that_is_cancelled_before_it_was_looked_at_knows_its_requests(database_18: str, tmp_path: Path) -> None:
    with (
        fresh_server(tmp_path, database_18) as (server, _),
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client,
        psycopg.connect(database_18, autocommit=True) as connection,
    ):
        ended(client, client.messages.batches.create(requests=requests(3)).id)
        batch_id = new_id()
        connection.execute(
            "INSERT INTO penstock.batches (id, owner, file_id, pool, dialect, endpoint, deadline, total, created_at)"
            " SELECT %s, owner, file_id, pool, dialect, endpoint, deadline, 0, now() FROM penstock.batches",
            [batch_id],
        )
        client.messages.batches.cancel(f"msgbatch_{batch_id.hex}")
        counts = ended(client, f"msgbatch_{batch_id.hex}").request_counts
        assert counts.canceled + counts.succeeded == 3


def test_results_url_below_a_path(database_18: str, tmp_path: Path) -> None:
    """The client puts it behind its base url, so it must not hold the prefix a second time."""
    with fresh_server(tmp_path, database_18, "--root-path", "/llm/batch") as (server, _):
        assert server.url.endswith("/llm/batch")
        client = server.closing(anthropic.Anthropic(base_url=server.url, api_key="none"))
        batch = client.messages.batches.create(requests=requests(2))
        ended(client, batch.id)
        assert len(list(client.messages.batches.results(batch.id))) == 2


def test_openai_batches_and_message_batches_do_not_mix(ground: tuple[ServerProcess, MockProcess]) -> None:
    server = ground[0]
    made = server.ask("POST", "/v1/messages/batches", {"requests": requests(1)}).json["id"]
    listed = server.ask("GET", "/v1/batches?limit=100").json["data"]
    assert made.removeprefix("msgbatch_") not in json.dumps(listed)
    assert server.ask("GET", f"/v1/batches/{made.removeprefix('msg')}").status == 404

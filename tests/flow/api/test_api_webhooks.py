"""Webhook endpoints through the official OpenAI client, and events from a real batch to a real receiver."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import openai
import psycopg
import pytest
from openai.types.webhooks import BatchCompletedWebhookEvent

from tests.support.mock_process import start_mock_process
from tests.support.receiver import Receiver, background_receiver, receiving, status
from tests.support.server import ServerProcess, served
from tests.support.wait import wait_until

ALLOW = {"PENSTOCK_WEBHOOK_ALLOW": "127.0.0.1/32, hooks.internal"}


@pytest.fixture(scope="module")
def server(server_18: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with psycopg.connect(server_18, autocommit=True) as connection:
        connection.execute("CREATE DATABASE webhooks TEMPLATE template_penstock")
    database = psycopg.conninfo.make_conninfo(server_18, dbname="webhooks")
    with (
        start_mock_process() as mock,
        served(
            tmp_path_factory.mktemp("webhooks"), "--base-url", mock.base_url, database=database, env=ALLOW
        ) as running,
    ):
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0) as made:
        yield made


def test_every_call_the_client_has(client: openai.OpenAI) -> None:
    assert client.webhooks.event_types.list().data == [
        "batch.completed",
        "batch.failed",
        "batch.expired",
        "batch.cancelled",
    ]
    with background_receiver() as receiver:
        made = client.webhooks.create(
            name="first", url=receiver.url, event_types=["batch.completed", "batch.failed", "batch.completed"]
        )
        assert made.object == "webhook_endpoint"
        assert made.event_types == ["batch.completed", "batch.failed"]
        assert made.signing_secret.startswith("whsec_")
        assert made.signing_secret_hint
        assert made.signing_secret_hint.endswith(made.signing_secret[-4:])
        found = client.webhooks.retrieve(made.id)
        assert (found.name, found.url, found.created_at) == ("first", receiver.url, made.created_at)
        assert "signing_secret" not in found.to_dict()
        assert made.signing_secret not in found.to_json()

        same = client.webhooks.update(made.id, name="first")
        assert same.updated_at == made.updated_at
        changed = client.webhooks.update(made.id, name="renamed", event_types=["batch.expired"])
        assert (changed.name, changed.url, changed.event_types) == ("renamed", receiver.url, ["batch.expired"])

        tested = client.webhooks.test(made.id, event_type="batch.completed")
        assert (tested.object, tested.status_code, tested.success) == ("webhook_endpoint.test", 200, True)
        message = receiver.messages[-1]
        event = client.webhooks.unwrap(message.body, message.headers, secret=made.signing_secret)
        assert isinstance(event, BatchCompletedWebhookEvent)

        receiver.answer = lambda _: status(503)
        assert client.webhooks.test(made.id, event_type="batch.failed").status_code == 503
        receiver.answer = lambda _: b""
        with pytest.raises(openai.BadRequestError, match="closed without an answer"):
            client.webhooks.test(made.id, event_type="batch.failed")
        receiver.answer = lambda _: status(204)

        kept = client.webhooks.rotate_secret(made.id, keep_old_secret_active_for_24_hours=True)
        assert kept.signing_secret != made.signing_secret
        client.webhooks.test(made.id, event_type="batch.completed")
        message = receiver.messages[-1]
        for secret in (made.signing_secret, kept.signing_secret):
            client.webhooks.unwrap(message.body, message.headers, secret=secret)
        dropped = client.webhooks.rotate_secret(made.id)
        client.webhooks.test(made.id, event_type="batch.completed")
        message = receiver.messages[-1]
        client.webhooks.unwrap(message.body, message.headers, secret=dropped.signing_secret)
        with pytest.raises(openai.InvalidWebhookSignatureError):
            client.webhooks.unwrap(message.body, message.headers, secret=kept.signing_secret)

        gone = client.webhooks.delete(made.id)
        assert (gone.id, gone.deleted, gone.object) == (made.id, True, "webhook_endpoint.deleted")
        for call in (client.webhooks.retrieve, client.webhooks.delete, client.webhooks.rotate_secret):
            with pytest.raises(openai.NotFoundError, match=f"No such WebhookEndpoint object: {made.id}"):
                call(made.id)


def test_the_asynchronous_client(server: ServerProcess) -> None:
    async def run() -> None:
        async with (
            openai.AsyncOpenAI(base_url=server.base_url, api_key="none") as client,
            receiving(Receiver()) as receiver,
        ):
            made = await client.webhooks.create(name="n", url=receiver.url, event_types=["batch.completed"])
            assert (await client.webhooks.test(made.id, event_type="batch.completed")).status_code == 200
            assert made.id in [found.id async for found in client.webhooks.list()]
            assert (await client.webhooks.delete(made.id)).deleted

    asyncio.run(run())


def test_lists_are_walked_to_the_end(client: openai.OpenAI) -> None:
    made = [
        client.webhooks.create(name=str(number), url="http://127.0.0.1:1/", event_types=["batch.completed"]).id
        for number in range(5)
    ]
    found = [endpoint.id for endpoint in client.webhooks.list(limit=2)]
    assert [name for name in found if name in made] == made[::-1]
    page = client.webhooks.list(limit=2, after=made[3])
    assert [endpoint.id for endpoint in page.data] == [made[2], made[1]]
    client.webhooks.delete(made[3])
    assert [endpoint.id for endpoint in client.webhooks.list(limit=2, after=made[3]).data] == [made[2], made[1]]
    for name in made:
        with contextlib.suppress(openai.NotFoundError):
            client.webhooks.delete(name)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.2/",
        "http://127.1/",
        "http://0x7f000001/",
        "http://2130706433/",
        "http://0177.0.0.1/",
        "http://0/",
        "http://[::1]/",
        "http://[::ffff:169.254.169.254]/",
        "http://[64:ff9b::7f00:1]/",
        "http://[2002:7f00:1::]/",
        "http://100.64.0.1/",
        "http://224.0.0.1/",
        "http://[fe80::1]/",
        "http://[fd00:ec2::254]/",
        "http://8.8.8.8:22/",
        "file:///etc/passwd",
        "https://user:secret@8.8.8.8/",
        "https://8.8.8.8/\\",
        "https://8.8.8.8/#x",
        "https://exämple.com/",
    ],
)
def test_urls_that_may_not_be_called_are_refused(client: openai.OpenAI, url: str) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        client.webhooks.create(name="n", url=url, event_types=["batch.completed"])
    assert (caught.value.param, caught.value.code) == ("url", "url_not_allowed")
    good = client.webhooks.create(name="n", url="http://127.0.0.1:1/", event_types=["batch.completed"])
    with pytest.raises(openai.UnprocessableEntityError):
        client.webhooks.update(good.id, url=url)
    assert client.webhooks.retrieve(good.id).url == "http://127.0.0.1:1/"
    client.webhooks.delete(good.id)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"name": "n", "url": "http://127.0.0.1:1/"}, 400),
        ({"name": "n", "url": "http://127.0.0.1:1/", "event_types": []}, 400),
        ({"name": "n", "url": "http://127.0.0.1:1/", "event_types": ["response.completed"]}, 400),
        ({"name": "", "url": "http://127.0.0.1:1/", "event_types": ["batch.failed"]}, 400),
        ({"name": "a\x00b", "url": "http://127.0.0.1:1/", "event_types": ["batch.failed"]}, 422),
        ({"name": "n", "url": "http://127.0.0.1:1/", "event_types": ["batch.failed"], "owner": "x"}, 422),
        ({"name": "n", "url": "http://127.0.0.1:1/", "event_types": ["batch.failed"], "secret": "x"}, 422),
    ],
)
def test_bad_bodies(server: ServerProcess, body: object, code: int) -> None:
    answer = server.ask("POST", "/v1/webhook_endpoints", body)
    assert answer.status == code
    assert set(answer.json["error"]) == {"message", "type", "param", "code"}


def run_batch(client: openai.OpenAI, lines: int = 3) -> str:
    source = b"".join(
        json.dumps(
            {
                "custom_id": f"c{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {"model": "m", "messages": [{"role": "user", "content": "x"}]},
            }
        ).encode()
        + b"\n"
        for number in range(lines)
    )
    file = client.files.create(file=source, purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h").id


def test_the_end_of_a_batch_is_told_once_and_recorded(server: ServerProcess, client: openai.OpenAI) -> None:
    with background_receiver() as receiver, background_receiver() as other:
        made = client.webhooks.create(name="n", url=receiver.url, event_types=["batch.completed", "batch.cancelled"])
        deaf = client.webhooks.create(name="n", url=other.url, event_types=["batch.expired"])
        batch = run_batch(client)
        wait_until(lambda: receiver.messages, 60)
        (message,) = receiver.messages
        event = client.webhooks.unwrap(message.body, message.headers, secret=made.signing_secret)
        assert isinstance(event, BatchCompletedWebhookEvent)
        assert event.data.id == batch
        assert client.batches.retrieve(batch).status == "completed"
        path = f"/v1/webhook_endpoints/{made.id}/deliveries"
        wait_until(lambda: server.ask("GET", path).json["data"][0]["status"] == "delivered", 30)
        (delivery,) = server.ask("GET", path).json["data"]
        assert delivery["event_id"] == event.id
        assert (delivery["event_type"], delivery["batch_id"]) == ("batch.completed", batch)
        assert (delivery["attempts"], delivery["status_code"], delivery["error"]) == (1, 200, None)
        assert other.messages == []
        for endpoint in (made, deaf):
            client.webhooks.delete(endpoint.id)


def test_a_failed_batch_is_told_too(client: openai.OpenAI) -> None:
    with background_receiver() as receiver:
        made = client.webhooks.create(name="n", url=receiver.url, event_types=["batch.failed"])
        file = client.files.create(file=b"not json\n", purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        wait_until(lambda: receiver.messages, 60)
        event = json.loads(receiver.messages[0].body)
        assert (event["type"], event["data"]["id"]) == ("batch.failed", batch.id)
        client.webhooks.delete(made.id)


def test_message_batches_have_no_events(server: ServerProcess, client: openai.OpenAI) -> None:
    with background_receiver() as receiver:
        made = client.webhooks.create(name="n", url=receiver.url, event_types=["batch.completed"])
        params = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
        batch = server.ask("POST", "/v1/messages/batches", {"requests": [{"custom_id": "a", "params": params}]}).json
        path = f"/v1/messages/batches/{batch['id']}"
        wait_until(lambda: server.ask("GET", path).json["processing_status"] == "ended", 60)
        told = run_batch(client, 1)
        wait_until(lambda: receiver.messages, 60)
        assert json.loads(receiver.messages[0].body)["data"] == {"id": told}
        assert len(server.ask("GET", f"/v1/webhook_endpoints/{made.id}/deliveries").json["data"]) == 1
        client.webhooks.delete(made.id)


def test_a_cancelled_batch_is_told_too(client: openai.OpenAI) -> None:
    with background_receiver() as receiver:
        made = client.webhooks.create(name="n", url=receiver.url, event_types=["batch.cancelled", "batch.completed"])
        batch = client.batches.cancel(run_batch(client, 2000))
        wait_until(lambda: receiver.messages, 60)
        assert json.loads(receiver.messages[0].body)["data"] == {"id": batch.id}
        assert receiver.messages[0].headers["webhook-id"].startswith("evt_")
        client.webhooks.delete(made.id)


def test_deliveries_are_listed_in_pages(server: ServerProcess, client: openai.OpenAI) -> None:
    with background_receiver() as receiver:
        made = client.webhooks.create(name="n", url=receiver.url, event_types=["batch.completed"])
        batches = [run_batch(client, 1) for _ in range(3)]
        wait_until(lambda: len(receiver.messages) == 3, 60)
        path = f"/v1/webhook_endpoints/{made.id}/deliveries"
        page = server.ask("GET", f"{path}?limit=2").json
        rest = server.ask("GET", f"{path}?limit=2&after={page['last_id']}").json
        assert (page["has_more"], rest["has_more"]) == (True, False)
        assert {entry["batch_id"] for entry in page["data"] + rest["data"]} == set(batches)
        for after in ("whd_x", "whd_" + "f" * 16, "evt_1"):
            assert server.ask("GET", f"{path}?after={after}").status == 400
        client.webhooks.delete(made.id)
        assert server.ask("GET", path).status == 404


def test_nothing_of_an_endpoint_is_logged(server: ServerProcess, client: openai.OpenAI) -> None:
    made = client.webhooks.create(
        name="canary-name", url="http://127.0.0.1:1/?token=canary-query", event_types=["batch.completed"]
    )
    with pytest.raises(openai.BadRequestError) as caught:
        client.webhooks.test(made.id, event_type="batch.completed")
    assert "Connection refused" in caught.value.message
    run_batch(client, 1)
    path = f"/v1/webhook_endpoints/{made.id}/deliveries"
    wait_until(lambda: any(entry["error"] for entry in server.ask("GET", path).json["data"]), 60)
    for secret in ("canary", made.signing_secret):
        assert secret not in server.log
        assert secret not in caught.value.message
        assert secret not in server.ask("GET", path).content.decode()
    client.webhooks.delete(made.id)


def test_an_unwilling_receiver_is_tried_again(tmp_path: Path, database_18: str) -> None:
    env = {**ALLOW, "PENSTOCK_WEBHOOK_RETRY_BASE_S": "0.1"}
    with (
        start_mock_process() as mock,
        served(tmp_path, "--base-url", mock.base_url, database=database_18, env=env) as server,
        background_receiver() as receiver,
        openai.OpenAI(base_url=server.base_url, api_key="none") as client,
    ):
        receiver.answer = lambda _: status(500) if len(receiver.messages) < 3 else status(202)
        made = client.webhooks.create(name="n", url=receiver.url, event_types=["batch.completed"])
        run_batch(client)
        path = f"/v1/webhook_endpoints/{made.id}/deliveries"
        wait_until(lambda: any(entry["status"] == "delivered" for entry in server.ask("GET", path).json["data"]), 60)
        (delivery,) = server.ask("GET", path).json["data"]
        assert (delivery["attempts"], delivery["status_code"]) == (3, 202)
        assert len({message.headers["webhook-id"] for message in receiver.messages}) == 1


def test_a_wrong_allowance_stops_the_server_from_starting(tmp_path: Path, database_18: str) -> None:
    env = {"PENSTOCK_WEBHOOK_ALLOW": "10.0.0.1/8"}
    with (
        pytest.raises(AssertionError, match=r"webhook_allow: '10\.0\.0\.1/8' is neither a network nor a host name"),
        served(tmp_path, "--base-url", "http://127.0.0.1:1/v1", database=database_18, env=env),
    ):
        pass

"""Deliveries on their way: signed, retried, recorded, taken once, and never led astray (S3, S4, S17, R15)."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import openai
import pytest

from penstock.config import Config, WebhookLimits
from penstock.db.pool import Connection, Pool
from penstock.deliver import endpoints, rounds, signing, webhooks
from penstock.deliver.addresses import Policy, parse_url
from penstock.deliver.endpoints import WebhookEndpoint
from penstock.deliver.post import PostError, post
from penstock.deliver.sealing import SecretBox
from penstock.deliver.webhooks import Sender, deliver_due
from penstock.model import public_id
from tests.support.certificates import make_certificate
from tests.support.db import connected, one, pooled
from tests.support.receiver import OK, Message, Receiver, receiving, status

BOX = SecretBox(lambda: [b"k" * 32])
CLIENT = openai.OpenAI(api_key="none", base_url="http://127.0.0.1:1/v1")


@dataclass
class Bench:
    connection: Connection
    pool: Pool
    config: Config

    async def endpoint(self, url: str, owner: str = "alice") -> WebhookEndpoint:
        made = await endpoints.create_endpoint(
            self.connection, BOX, owner=owner, name="n", url=url, event_types=["batch.completed"]
        )
        assert made
        return made

    async def event(self, endpoint: WebhookEndpoint, *, age_s: float = 0, event_id: UUID | None = None) -> int:
        (found,) = await one(
            self.connection,
            """INSERT INTO penstock.webhook_deliveries (event_id, endpoint_id, owner, type, batch_id, event_at, due_at)
               VALUES (%s, %s, %s, 'batch.completed', %s, now() - make_interval(secs => %s), now()) RETURNING id""",
            [event_id or uuid4(), endpoint.id, endpoint.owner, uuid4(), age_s],
        )
        return int(found)

    @property
    def sender(self) -> Sender:
        return Sender(Policy(["127.0.0.0/8", "localhost"]), self.config.webhooks.webhook_timeout_s)

    async def deliver(self, **changes: Any) -> int:
        return await deliver_due(self.pool, self.config, sender=replace(self.sender, **changes), box=BOX)

    async def row(self, delivery: int) -> dict[str, Any]:
        names = "attempts, status_code, error, delivered_at, given_up_at, due_at > now() AS later"
        values = await one(
            self.connection, f"SELECT {names} FROM penstock.webhook_deliveries WHERE id = %s", [delivery]
        )
        return dict(
            zip(("attempts", "status_code", "error", "delivered_at", "given_up_at", "later"), values, strict=True)
        )

    async def make_due(self) -> None:
        await self.connection.execute("UPDATE penstock.webhook_deliveries SET due_at = now()")


def on_bench(database: str, body: Callable[[Bench], Awaitable[None]], **limits: Any) -> None:
    async def run() -> None:
        async with AsyncExitStack() as stack:
            connection = await stack.enter_async_context(connected(database))
            pool = await stack.enter_async_context(pooled(database))
            await body(Bench(connection, pool, Config(webhooks=WebhookLimits(**limits))))

    asyncio.run(run())


def test_what_a_receiver_gets_passes_the_official_check(database: str) -> None:
    async def body(bench: Bench) -> None:
        async with receiving(Receiver()) as receiver:
            endpoint = await bench.endpoint(receiver.url + "?a=b")
            delivery = await bench.event(endpoint)
            assert await bench.deliver() == 1
            (message,) = receiver.messages
            assert message.path == "/hook?a=b"
            assert message.headers["host"] == f"127.0.0.1:{receiver.port}"
            assert message.headers["content-type"] == "application/json"
            secret = signing.encode_secret(endpoint.secret)
            event = CLIENT.webhooks.unwrap(message.body, message.headers, secret=secret)
            assert isinstance(event, openai.types.webhooks.BatchCompletedWebhookEvent)
            batch_id, event_id = await one(
                bench.connection, "SELECT batch_id, event_id FROM penstock.webhook_deliveries"
            )
            assert event.data.id == public_id("batch", batch_id)
            assert event.id == message.headers["webhook-id"] == public_id("event", event_id)
            with pytest.raises(openai.InvalidWebhookSignatureError):
                CLIENT.webhooks.unwrap(message.body + b" ", message.headers, secret=secret)
            row = await bench.row(delivery)
            assert row["delivered_at"]
            assert (row["attempts"], row["status_code"], row["error"]) == (1, 200, None)
            assert await bench.deliver() == 0

    on_bench(database, body)


def test_both_secrets_sign_while_a_rotation_lasts(database_18: str) -> None:
    async def body(bench: Bench) -> None:
        async with receiving(Receiver()) as receiver:
            old = await bench.endpoint(receiver.url)
            new = await endpoints.rotate_secret(bench.connection, BOX, old.id, "alice", keep_s=3600)
            assert new
            await bench.event(old)
            await bench.deliver()
            message = receiver.messages[-1]
            assert len(message.headers["webhook-signature"].split()) == 2
            for endpoint in (old, new):
                CLIENT.webhooks.unwrap(message.body, message.headers, secret=signing.encode_secret(endpoint.secret))
            newest = await endpoints.rotate_secret(bench.connection, BOX, old.id, "alice", keep_s=0)
            assert newest
            await bench.event(old)
            await bench.deliver()
            message = receiver.messages[-1]
            CLIENT.webhooks.unwrap(message.body, message.headers, secret=signing.encode_secret(newest.secret))
            with pytest.raises(openai.InvalidWebhookSignatureError):
                CLIENT.webhooks.unwrap(message.body, message.headers, secret=signing.encode_secret(new.secret))

    on_bench(database_18, body)


def test_failures_are_retried_later_under_the_same_id(database: str) -> None:
    answers = [status(500), status(404), b"garbage\r\n\r\n", b"", OK]

    async def body(bench: Bench) -> None:
        async with receiving(Receiver(answer=lambda _: answers.pop(0))) as receiver:
            delivery = await bench.event(await bench.endpoint(receiver.url))
            seen = []
            for _ in range(5):
                assert await bench.deliver() == 1
                assert await bench.deliver() == 0  # not before its time
                seen.append(await bench.row(delivery))
                await bench.make_due()
            assert [row["status_code"] for row in seen] == [500, 404, None, None, 200]
            assert [row["error"] for row in seen] == [
                "answered 500",
                "answered 404",
                "the answer is not HTTP/1.1",
                "the connection was closed without an answer",
                None,
            ]
            assert [row["attempts"] for row in seen] == [1, 2, 3, 4, 5]
            assert len({message.headers["webhook-id"] for message in receiver.messages}) == 1
            assert await bench.deliver() == 0

    on_bench(database, body)


def test_an_old_event_is_given_up(database: str) -> None:
    async def body(bench: Bench) -> None:
        async with receiving(Receiver(answer=lambda _: status(500))) as receiver:
            endpoint = await bench.endpoint(receiver.url)
            delivery = await bench.event(endpoint, age_s=3601)
            last_chance = await bench.event(endpoint, age_s=3400)
            await bench.deliver()
            row = await bench.row(delivery)
            assert row["given_up_at"]
            assert row["status_code"] == 500
            assert not (await bench.row(last_chance))["given_up_at"]
            (due_s,) = await one(
                bench.connection,
                "SELECT extract(epoch FROM due_at - event_at)::float8 FROM penstock.webhook_deliveries WHERE id = %s",
                [last_chance],
            )
            assert due_s == 3600  # sooner than its backoff: the last try is at the very end

    on_bench(database, body, webhook_give_up_s=3600, webhook_retry_base_s=600)


def test_waits_grow_to_the_cap() -> None:
    limits = WebhookLimits()
    for attempt in range(1, 80):
        longest = min(21_600, 5 * 2 ** (attempt - 1))
        assert longest / 2 <= rounds.backoff_s(limits, attempt) <= longest


def test_a_redirect_is_an_answer(database_18: str) -> None:
    async def body(bench: Bench) -> None:
        async with receiving(Receiver()) as elsewhere, receiving(Receiver()) as receiver:
            for code in (301, 302, 303, 307, 308):
                receiver.answer = lambda _, code=code: status(code, f"location: {elsewhere.url}\r\n")  # type: ignore[misc]
                delivery = await bench.event(await bench.endpoint(receiver.url))
                await bench.deliver()
                row = await bench.row(delivery)
                assert (row["status_code"], row["error"], row["delivered_at"]) == (code, "redirect: not followed", None)
            assert elsewhere.messages == []

    on_bench(database_18, body)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 100_000 + b"\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 20_000,
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"\x16\x03\x01\x00\xa5\x01" + b"\x00" * 200,
    ],
    ids=["silence", "endless header", "flood of interim answers", "odd status", "not http"],
)
def test_a_hostile_receiver_costs_one_time_out(database_18: str, answer: bytes | None) -> None:
    async def body(bench: Bench) -> None:
        async with receiving(Receiver(answer=lambda _: answer)) as receiver:
            endpoint = await bench.endpoint(receiver.url)
            first, second = await bench.event(endpoint), await bench.event(endpoint)
            await bench.deliver()
            row = await bench.row(first)
            assert row["status_code"] is None
            assert row["error"]
            # The other one was not sent, and not charged for it.
            assert len(receiver.messages) == 1
            assert (await bench.row(second))["attempts"] == 0
            assert (await bench.row(second))["later"]

    on_bench(database_18, body, webhook_timeout_s=0.5)


def test_an_endless_body_does_not_undo_the_answer(database_18: str) -> None:
    endless = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + (b"4000\r\n" + b"x" * 0x4000 + b"\r\n") * 64

    async def body(bench: Bench) -> None:
        async with receiving(Receiver(answer=lambda _: endless)) as receiver:
            delivery = await bench.event(await bench.endpoint(receiver.url))
            await bench.deliver()
            assert (await bench.row(delivery))["delivered_at"]

    on_bench(database_18, body)


def test_a_dead_receiver_does_not_hold_up_the_others(database_18: str) -> None:
    async def body(bench: Bench) -> None:
        async with receiving(Receiver(answer=lambda _: None)) as dead, receiving(Receiver()) as living:
            blocked = await bench.endpoint(dead.url)
            for _ in range(20):
                await bench.event(blocked)
            fine = await bench.endpoint(living.url)
            for _ in range(20):
                await bench.event(fine)
            assert await bench.deliver() == 40
            assert len(living.messages) == 20
            assert len(dead.messages) == 1

    on_bench(database_18, body, webhook_timeout_s=0.5)


def test_a_slow_receiver_does_not_hold_up_what_comes_after(database_18: str) -> None:
    """Both are served by one round that began before the second event was there."""

    async def body(bench: Bench) -> None:
        arrived = asyncio.Event()

        def hear(_: Message) -> bytes:
            arrived.set()
            return OK

        async with receiving(Receiver(answer=lambda _: None)) as slow, receiving(Receiver(answer=hear)) as living:
            await bench.event(await bench.endpoint(slow.url))
            later = await bench.endpoint(living.url)
            round_ = asyncio.create_task(bench.deliver())
            while not slow.messages:
                await asyncio.sleep(0.01)
            await bench.event(later)
            await asyncio.wait_for(arrived.wait(), 30)
            assert not round_.done()
            round_.cancel()
            with pytest.raises(asyncio.CancelledError):
                await round_

    on_bench(database_18, body, webhook_timeout_s=60)


def test_a_crowd_is_taken_in_portions(database_18: str) -> None:
    async def body(bench: Bench) -> None:
        async with receiving(Receiver()) as receiver:
            endpoint = await bench.endpoint(receiver.url)
            for _ in range(30):
                await bench.event(endpoint)
            assert await bench.deliver() == 30
            assert len(receiver.messages) == 30

    on_bench(database_18, body, webhook_batch=4)


def test_many_replicas_send_each_event_once(database: str) -> None:
    async def body(bench: Bench) -> None:
        async with receiving(Receiver()) as receiver:
            made = [await bench.endpoint(receiver.url) for _ in range(10)]
            for number in range(200):
                await bench.event(made[number % 10])
            while sum(await asyncio.gather(*(bench.deliver() for _ in range(4)))):
                pass
            ids = [message.headers["webhook-id"] for message in receiver.messages]
            assert len(ids) == 200
            assert len(set(ids)) == 200

    on_bench(database, body, webhook_batch=16)


def test_what_a_dead_process_had_taken_comes_due_again(database: str) -> None:
    """Taken and never recorded: held for a while, then anybody's; a late record of the first taker changes nothing."""

    async def body(bench: Bench) -> None:
        async with receiving(Receiver()) as receiver:
            delivery = await bench.event(await bench.endpoint(receiver.url))
            mail = webhooks.Webhooks(bench.pool, bench.config.webhooks, bench.sender, BOX)
            (lost,) = await mail.take(10)
            assert await bench.deliver() == 0
            await bench.make_due()
            assert await bench.deliver() == 1
            row = await bench.row(delivery)
            assert (row["attempts"], row["status_code"]) == (2, 200)
            await mail.record(lost, rounds.SendResult(500, "late"), 1, final=False)
            assert await bench.row(delivery) == row

    on_bench(database, body)


def test_a_deleted_endpoint_gets_nothing(database_18: str) -> None:
    async def body(bench: Bench) -> None:
        async with receiving(Receiver()) as receiver:
            endpoint = await bench.endpoint(receiver.url)
            await bench.event(endpoint)
            assert not await endpoints.delete_endpoint(bench.connection, endpoint.id, "mallory")
            assert await endpoints.delete_endpoint(bench.connection, endpoint.id, "alice")
            assert await bench.deliver() == 0
            late = await bench.event(endpoint)  # by a batch that ended at the same moment
            assert await bench.deliver() == 1
            assert (await bench.row(late))["given_up_at"]
            assert receiver.messages == []

    on_bench(database_18, body)


def test_deliveries_are_forgotten_when_they_are_old(database_18: str) -> None:
    async def body(bench: Bench) -> None:
        async with receiving(Receiver()) as receiver:
            endpoint = await bench.endpoint(receiver.url)
            for age_s in (8000, 8000, 10):
                await bench.event(endpoint, age_s=age_s)
            assert await webhooks.forget_old(bench.pool, bench.config) == 0  # not before they are decided
            await bench.deliver()
            assert await webhooks.forget_old(bench.pool, bench.config) == 2
            assert await webhooks.forget_old(bench.pool, bench.config) == 0

    on_bench(database_18, body, webhook_keep_s=7200)


def test_tls_is_checked_against_the_name(database_18: str, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "hooks.test")
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(certificate, key)
    names: list[str | None] = []
    serving.sni_callback = lambda _socket, name, _context: names.append(name)
    trusting = ssl.create_default_context(cafile=str(certificate))

    async def resolver(_host: str, _port: int) -> list[str]:
        return ["127.0.0.1"]

    policy = Policy(["127.0.0.1"], resolver=resolver)

    async def body(bench: Bench) -> None:
        async with receiving(Receiver(), serving) as receiver:
            good = await bench.event(await bench.endpoint(f"https://hooks.test:{receiver.port}/"))
            await bench.deliver(policy=policy, tls=trusting)
            assert (await bench.row(good))["delivered_at"]
            assert names == ["hooks.test"]
            for url, tls in (
                (f"https://other.test:{receiver.port}/", trusting),
                (f"https://hooks.test:{receiver.port}/", None),
                (f"https://127.0.0.1:{receiver.port}/", trusting),
            ):
                bad = await bench.event(await bench.endpoint(url))
                await bench.deliver(policy=policy, tls=tls)
                assert str((await bench.row(bad))["error"]).startswith("certificate refused: ")
            assert len(receiver.messages) == 1

    on_bench(database_18, body)


def test_nothing_that_is_stored_or_raised_names_a_secret(database_18: str) -> None:
    """S17: not the url's query, not the address, not the signing secret."""

    async def body(bench: Bench) -> None:
        for url in (
            "http://127.0.0.1:1/hook?token=canary",
            "http://10.9.8.7/hook?token=canary",
            "http://localhost:1/hook?token=canary",
        ):
            endpoint = await bench.endpoint(url)
            delivery = await bench.event(endpoint)
            await bench.deliver()
            error = json.dumps(await bench.row(delivery), default=str)
            for secret in ("canary", "127.0.0.1", "10.9.8.7", base64.b64encode(endpoint.secret).decode()):
                assert secret not in error

    on_bench(database_18, body)


def test_headers_of_a_message_are_ours_alone(database_18: str) -> None:
    async def body(bench: Bench) -> None:
        async with receiving(Receiver()) as receiver:
            await bench.event(await bench.endpoint(receiver.url))
            await bench.deliver()
            message: Message = receiver.messages[0]
            assert set(message.headers) == {
                "host",
                "content-length",
                "content-type",
                "connection",
                "user-agent",
                "webhook-id",
                "webhook-timestamp",
                "webhook-signature",
            }

    on_bench(database_18, body)


def test_a_header_that_would_break_the_request_is_not_sent() -> None:
    async def scenario() -> None:
        async with receiving(Receiver()) as receiver:
            for headers in ({"x-a": "b\r\nx-c: d"}, {"x-a\nx-c": "d"}, {"x-a": "\u00e9"}):
                with pytest.raises(PostError, match="a header contains a line break"):
                    await post(parse_url(receiver.url), [IPv4Address("127.0.0.1")], headers, b"", timeout_s=5)
            assert receiver.messages == []

    asyncio.run(scenario())


# -- S16


def test_secrets_are_sealed_for_their_row_and_sealed_anew(database: str) -> None:
    """Swapped between rows they sign nothing; an old key is replaced without a receiver noticing."""
    old_box, new_box = SecretBox(lambda: [b"o" * 32]), SecretBox(lambda: [b"k" * 32, b"o" * 32])

    async def body(bench: Bench) -> None:
        async with receiving(Receiver()) as receiver:
            bare = await bench.endpoint(receiver.url)  # as a version before has stored it
            plain = "UPDATE penstock.webhook_endpoints SET secret = %s WHERE id = %s"
            await bench.connection.execute(plain, [bare.secret, bare.id])
            sealed = await endpoints.create_endpoint(
                bench.connection, old_box, owner="bob", name="n", url=receiver.url, event_types=["batch.completed"]
            )
            assert sealed
            foreign = await bench.event(sealed)
            assert await bench.deliver() == 1
            assert "key that this process does not have" in (await bench.row(foreign))["error"]
            assert await endpoints.seal_all(bench.connection, BOX) == (1, 1)
            assert await endpoints.seal_all(bench.connection, new_box) == (1, 0)
            assert await endpoints.seal_all(bench.connection, new_box) == (0, 0)
            for endpoint in (bare, sealed):
                await bench.event(endpoint)
            await bench.make_due()
            assert await bench.deliver() == 3
            for message in receiver.messages:
                secrets = [signing.encode_secret(endpoint.secret) for endpoint in (bare, sealed)]
                assert any(_verifies(message, secret) for secret in secrets)
            swap = (
                "UPDATE penstock.webhook_endpoints e SET secret = o.secret FROM penstock.webhook_endpoints o"
                " WHERE e.id <> o.id"
            )
            await bench.connection.execute(swap)
            swapped = [await bench.event(endpoint) for endpoint in (bare, sealed)]
            assert await bench.deliver() == 2
            for delivery in swapped:
                assert "belongs to another row" in (await bench.row(delivery))["error"]
            assert len(receiver.messages) == 3

    on_bench(database, body)


def _verifies(message: Message, secret: str) -> bool:
    try:
        CLIENT.webhooks.unwrap(message.body, message.headers, secret=secret)
    except openai.InvalidWebhookSignatureError:
        return False
    return True

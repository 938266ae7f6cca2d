"""Webhooks: deliveries of events to endpoints. Any number of processes may send them at once.

A delivery is taken by moving its time ahead, so no transaction stays open while a receiver thinks, and a delivery taken
by a process that died comes due again. A receiver may therefore get an event twice: `webhook-id` is the same each time.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from time import monotonic
from uuid import UUID

import msgspec

from penstock import __version__
from penstock.config import Config, WebhookLimits
from penstock.db import sql
from penstock.db.pool import Lender, Pool, borrowed
from penstock.deliver import signing
from penstock.deliver.addresses import AddressRefused, Policy, parse_url, policy_for
from penstock.deliver.post import PostError, post
from penstock.deliver.rounds import DeliveryTable, SendResult, TakenDelivery, deliver_all
from penstock.deliver.sealing import SecretBox, SecretNotOpened, secret_box
from penstock.model import new_id, public_id

_SQL = sql.load("penstock.deliver", "deliver.sql")

_FORGET_ROWS = 1_000


@dataclass(frozen=True, slots=True)
class TakenWebhook(TakenDelivery):
    endpoint_id: UUID
    type: str
    batch_id: UUID | None
    url: str | None
    """None once the endpoint was deleted."""
    owner: str | None
    secret: bytes | None
    previous_secret: bytes | None


@dataclass(frozen=True, slots=True)
class Sender:
    """Sender of messages: to allowed addresses, within a time limit, with TLS trust settings."""

    policy: Policy
    timeout_s: float
    tls: ssl.SSLContext | None = None

    async def send(self, url: str, headers: dict[str, str], body: bytes) -> SendResult:
        """Make one attempt. The url is checked every time: names change their addresses."""
        begun = monotonic()
        try:
            target = parse_url(url)
            addresses = await self.policy.addresses(target)
            left_s = max(0.001, self.timeout_s - (monotonic() - begun))
            status = await post(target, addresses, headers, body, timeout_s=left_s, tls=self.tls)
        except AddressRefused as refusal:
            return SendResult(None, f"url {refusal}")
        except PostError as error:
            return SendResult(None, str(error))
        if 200 <= status < 300:
            return SendResult(status, None)
        return SendResult(status, "redirect: not followed" if 300 <= status < 400 else f"answered {status}")


def sender_for(config: Config) -> Sender:
    return Sender(policy_for(config.webhook_allow), config.webhooks.webhook_timeout_s)


async def deliver_due(
    database: Pool, config: Config, *, sender: Sender | None = None, box: SecretBox | None = None
) -> int:
    """Send the deliveries that are due or come due meanwhile, until none is. Returns how many were taken."""
    sender, box = sender or sender_for(config), box or secret_box(config)
    return await deliver_all(Webhooks(database, config.webhooks, sender, box))


class Webhooks(DeliveryTable[TakenWebhook]):
    """Deliveries of events to webhook endpoints."""

    take_if_due = "take_deliveries_if_due"
    record_if_held = "record_delivery_if_held"
    put_back_if_held = "put_back_deliveries_if_held"

    def __init__(self, database: Pool, limits: WebhookLimits, sender: Sender, box: SecretBox) -> None:
        super().__init__(database, limits)
        self._sender = sender
        self._box = box

    async def take(self, limit: int) -> list[TakenWebhook]:
        return await self.take_as(TakenWebhook, {"limit": limit})

    def queue_of(self, delivery: TakenWebhook) -> UUID:
        return delivery.endpoint_id

    async def deliver(self, delivery: TakenWebhook, wait_s: float) -> bool:
        result = await _attempt(self._sender, self._box, delivery)
        await self.record(delivery, result, wait_s, final=delivery.url is None)
        return result.status_code is not None


async def _attempt(sender: Sender, box: SecretBox, delivery: TakenWebhook) -> SendResult:
    if delivery.url is None or delivery.owner is None:
        return SendResult(None, "the endpoint was deleted")
    try:
        keys = _open_keys(box, delivery.owner, delivery.endpoint_id, delivery.secret, delivery.previous_secret)
    except SecretNotOpened as error:
        return SendResult(None, error.message)  # another server may have the key
    about = public_id("batch", delivery.batch_id or UUID(int=0))
    message_id = public_id("event", delivery.event_id)
    body = _event(message_id, delivery.type, int(delivery.event_at.timestamp()), about)
    headers = _headers(message_id, delivery.now_s, body, keys)
    return await sender.send(delivery.url, headers, body)


def _open_keys(box: SecretBox, owner: str, endpoint_id: UUID, *stored: bytes | None) -> list[bytes]:
    """Keys that sign a message. Raises SecretNotOpened."""
    return [box.open(each, owner, endpoint_id) for each in stored if each is not None]


def _event(message_id: str, type_: str, created_at: int, about: str) -> bytes:
    event = {"id": message_id, "object": "event", "created_at": created_at, "type": type_, "data": {"id": about}}
    return msgspec.json.encode(event)


def _headers(message_id: str, at_s: int, body: bytes, keys: list[bytes]) -> dict[str, str]:
    fixed = {"content-type": "application/json", "user-agent": f"penstock/{__version__}"}
    return fixed | signing.headers(message_id, at_s, body, keys)


async def send_sample(
    database: Lender, sender: Sender, box: SecretBox, endpoint_id: UUID, url: str, type_: str
) -> SendResult:
    """Send an event about a batch that does not exist, at once and without retries."""
    async with borrowed(database) as connection:
        cursor = await connection.execute(_SQL["read_signing_keys"], {"id": endpoint_id})
        row = await cursor.fetchone()
    if row is None:
        return SendResult(None, "the endpoint was deleted")
    owner, secret, previous_secret, now_s = row
    try:
        keys = _open_keys(box, owner, endpoint_id, secret, previous_secret)
    except SecretNotOpened as error:
        return SendResult(None, error.message)
    message_id = public_id("event", new_id())
    body = _event(message_id, type_, int(now_s), public_id("batch", UUID(int=0)))
    return await sender.send(url, _headers(message_id, int(now_s), body, keys), body)


async def forget_old(database: Pool, config: Config) -> int:
    """Delete deliveries older than `webhook_keep_s`, at most a thousand. Returns how many."""
    values = {"limit": _FORGET_ROWS, "keep_s": config.webhooks.webhook_keep_s}
    async with borrowed(database) as connection:
        cursor = await connection.execute(_SQL["forget_deliveries_if_old"], values)
        return cursor.rowcount

"""Deliveries: take what is due, send it, record what came back. Any number of processes may do so at once.

A delivery is taken by moving its time ahead, so no transaction stays open while a receiver thinks, and what a dead
process had taken comes due again. A receiver may therefore get an event twice: `webhook-id` is the same each time.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from datetime import datetime
from time import monotonic
from uuid import UUID

import msgspec

from penstock import __version__
from penstock.config import Config, WebhookLimits
from penstock.db import sql
from penstock.db.pool import Pool, borrowed
from penstock.deliver import signing
from penstock.deliver.addresses import AddressRefused, Policy, parse_url, policy_for
from penstock.deliver.post import PostError, post
from penstock.deliver.rounds import deliver_all, hold, start_within
from penstock.model import new_id, public_id

_SQL = sql.load("penstock.deliver", "deliver.sql")

_FORGET_ROWS = 1_000


@dataclass(frozen=True, slots=True)
class Taken:
    """A delivery in our hands."""

    taken_at: float
    """By this process's own clock, as is the next."""
    start_before: float
    id: int
    event_id: UUID
    endpoint_id: UUID
    type: str
    batch_id: UUID | None
    event_at: datetime
    attempt: int
    url: str | None
    """None once the endpoint was deleted."""
    secret: bytes | None
    previous_secret: bytes | None
    taken_at_s: float
    """The same moment by the database's clock: receivers refuse messages whose time is far from theirs."""

    @property
    def now_s(self) -> int:
        return int(self.taken_at_s + monotonic() - self.taken_at)


@dataclass(frozen=True, slots=True)
class Result:
    """What a receiver did with a message: its status, or why there is none."""

    status_code: int | None
    error: str | None

    @property
    def delivered(self) -> bool:
        return self.error is None


@dataclass(frozen=True, slots=True)
class Sender:
    """How messages leave: to which addresses, in which time, trusting whom."""

    policy: Policy
    timeout_s: float
    tls: ssl.SSLContext | None = None

    async def send(self, url: str, headers: dict[str, str], body: bytes) -> Result:
        """One attempt. The url is checked as if it had never been: names change their addresses."""
        begun = monotonic()
        try:
            target = parse_url(url)
            addresses = await self.policy.addresses(target)
            left_s = max(0.001, self.timeout_s - (monotonic() - begun))
            status = await post(target, addresses, headers, body, timeout_s=left_s, tls=self.tls)
        except AddressRefused as refusal:
            return Result(None, f"url {refusal}")
        except PostError as error:
            return Result(None, str(error))
        if 200 <= status < 300:
            return Result(status, None)
        return Result(status, "redirect: not followed" if 300 <= status < 400 else f"answered {status}")


def sender_for(config: Config) -> Sender:
    return Sender(policy_for(config.webhook_allow), config.webhooks.webhook_timeout_s)


async def deliver_due(database: Pool, config: Config, *, sender: Sender | None = None) -> int:
    """Send what is due, and what comes due meanwhile, until nothing is. Returns how many were taken.

    Each endpoint's messages go one after the other, those of different endpoints at once: a slow receiver holds up
    nobody else. The first message that does not arrive sends the endpoint's others back unsent, so that a dead
    receiver costs one time-out, however much waits for it.
    """
    return await deliver_all(_Webhooks(database, config.webhooks, sender or sender_for(config)), config.webhooks)


class _Webhooks:
    """What a round does with webhooks."""

    def __init__(self, database: Pool, limits: WebhookLimits, sender: Sender) -> None:
        self._database = database
        self._limits = limits
        self._sender = sender

    async def take(self, limit: int) -> list[Taken]:
        return await _take(self._database, self._limits, limit)

    def queue_of(self, delivery: Taken) -> UUID:
        return delivery.endpoint_id

    async def deliver(self, delivery: Taken, wait_s: float) -> bool:
        result = await _attempt(self._sender, delivery)
        await _record(self._database, self._limits, delivery, result, wait_s)
        return result.status_code is not None

    async def put_back(self, deliveries: list[Taken], wait_s: float) -> None:
        await _put_back(self._database, deliveries, wait_s)


async def _take(database: Pool, limits: WebhookLimits, limit: int) -> list[Taken]:
    start_within_s = start_within(limits)
    begun = monotonic()
    async with borrowed(database) as connection:
        values = {"limit": limit, "hold_s": hold(limits), "now": None}
        cursor = await connection.execute(_SQL["take_deliveries_if_due"], values)
        return [Taken(begun, begun + start_within_s, *row) for row in await cursor.fetchall()]


async def _attempt(sender: Sender, delivery: Taken) -> Result:
    if delivery.url is None or delivery.secret is None:
        return Result(None, "the endpoint was deleted")
    about = public_id("batch", delivery.batch_id or UUID(int=0))
    keys = [key for key in (delivery.secret, delivery.previous_secret) if key is not None]
    message_id = public_id("event", delivery.event_id)
    body = _event(message_id, delivery.type, int(delivery.event_at.timestamp()), about)
    headers = _headers(message_id, delivery.now_s, body, keys)
    return await sender.send(delivery.url, headers, body)


def _event(message_id: str, type_: str, created_at: int, about: str) -> bytes:
    event = {"id": message_id, "object": "event", "created_at": created_at, "type": type_, "data": {"id": about}}
    return msgspec.json.encode(event)


def _headers(message_id: str, at_s: int, body: bytes, keys: list[bytes]) -> dict[str, str]:
    fixed = {"content-type": "application/json", "user-agent": f"penstock/{__version__}"}
    return fixed | signing.headers(message_id, at_s, body, keys)


async def _record(database: Pool, limits: WebhookLimits, delivery: Taken, result: Result, wait_s: float) -> None:
    values = {
        "id": delivery.id,
        "attempt": delivery.attempt,
        "delivered": result.delivered,
        "final": delivery.url is None,
        "status_code": result.status_code,
        "error": result.error,
        "wait_s": wait_s,
        "give_up_s": limits.webhook_give_up_s,
        "now": None,
    }
    async with borrowed(database) as connection:
        await connection.execute(_SQL["record_delivery_if_held"], values)


async def _put_back(database: Pool, queue: list[Taken], wait_s: float) -> None:
    values = {
        "ids": [delivery.id for delivery in queue],
        "attempts": [delivery.attempt for delivery in queue],
        "wait_s": wait_s,
        "now": None,
    }
    async with borrowed(database) as connection:
        await connection.execute(_SQL["put_back_deliveries_if_held"], values)


async def send_sample(database: Pool, sender: Sender, endpoint_id: UUID, url: str, type_: str) -> Result:
    """An event about a batch that never was, sent at once and not repeated."""
    async with borrowed(database) as connection:
        cursor = await connection.execute(_SQL["read_signing_keys"], {"id": endpoint_id})
        row = await cursor.fetchone()
    if row is None:
        return Result(None, "the endpoint was deleted")
    secret, previous_secret, now_s = row
    message_id = public_id("event", new_id())
    body = _event(message_id, type_, int(now_s), public_id("batch", UUID(int=0)))
    keys = [key for key in (secret, previous_secret) if key is not None]
    return await sender.send(url, _headers(message_id, int(now_s), body, keys), body)


async def forget_old(database: Pool, config: Config) -> int:
    """Delete deliveries past their keep, at most a thousand. Returns how many."""
    values = {"limit": _FORGET_ROWS, "keep_s": config.webhooks.webhook_keep_s, "now": None}
    async with borrowed(database) as connection:
        cursor = await connection.execute(_SQL["forget_deliveries_if_old"], values)
        return cursor.rowcount

"""Answers of sessions sent to sinks as CloudEvents: signed, at least once, each event with an id of its own.

A request that a sink wants the answer of is marked when it is accepted. One statement turns marked answers into
deliveries and takes their marks away, so that a process that dies between the answer and its delivery loses nothing.
The answer is read when it is sent: a delivery holds no copy of it, and an erased answer is not sent.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from uuid import UUID

from psycopg.types.json import Jsonb

from penstock import __version__
from penstock.config import Config
from penstock.db import sql
from penstock.db.arrays import Int4Array, Int8Array
from penstock.db.pool import Connection, Pool, borrowed
from penstock.deliver import signing
from penstock.deliver.addresses import policy_for
from penstock.deliver.rounds import DeliveryTable, SendResult, TakenDelivery, deliver_all
from penstock.deliver.sink_config import REQUEST_TYPE, Sink
from penstock.deliver.webhooks import Sender
from penstock.model import public_id
from penstock.sessions.cloudevents import Event, rfc3339, write

_SQL = sql.load("penstock.deliver", "deliver.sql")

# Operators may name any host: it is their network. Only to the metadata services of clouds nothing is sent.
_ANYWHERE = ("0.0.0.0/0", "::/0")
_NO_SOURCE = "urn:penstock"
_LANES_AT_ONCE = 1_000
_ANSWERS_OF_A_LANE = 100
_FORGET_ROWS = 1_000
# Messages to one sink on their way at the same time. Those of one session go one after the other.
_QUEUES = 8


@dataclass(frozen=True, slots=True)
class Announcement:
    """Content of the event that announces an answer."""

    status: str
    """completed, failed or cancelled."""
    content: bytes
    """The request as the API shows it, JSON."""


Describe = Callable[[Connection, str, UUID], Awaitable[Announcement | None]]
"""Makes the announcement of a request from the key of its session and its id; None if the request is gone."""


@dataclass(frozen=True, slots=True)
class TakenAnswer(TakenDelivery):
    sink: str
    lane_id: int
    request_id: UUID
    session_key: str
    cause_source: str | None
    cause_id: str | None


def sender_for(config: Config) -> Sender:
    return Sender(policy_for(_ANYWHERE), config.webhooks.webhook_timeout_s)


async def announce(database: Pool, sinks: Sequence[Sink]) -> int:
    """Make deliveries of the marked requests that were answered. Returns how many answers there were."""
    wanted = Jsonb([_filter_of(sink) for sink in sinks])
    after, total = 0, 0
    while True:
        values = {"after": after, "lanes": _LANES_AT_ONCE, "most": _ANSWERS_OF_A_LANE}
        async with borrowed(database) as connection:
            found = await (await connection.execute(_SQL["list_to_announce"], values)).fetchall()
            # A session that has nothing to announce yet comes as a row without an ordinal.
            total += await announce_answered(connection, [row for row in found if row[1] is not None], wanted)
        lanes = {row[0] for row in found}
        if len(lanes) < _LANES_AT_ONCE:
            return total
        after = max(lanes)


async def announce_answered(connection: Connection, found: Sequence[Any], sinks: Jsonb) -> int:
    """Make deliveries of those of some requests that were answered. Returns how many."""
    if not found:
        return 0
    places = {"lanes": Int8Array([row[0] for row in found]), "ordinals": Int4Array([row[1] for row in found])}
    answers = await (await connection.execute(_SQL["read_answers"], places)).fetchall()
    answered = [found[n - 1] for n, _, _ in answers]
    values = {
        "ids": [request_id for _, _, request_id, *_ in answered],
        "lanes": Int8Array([row[0] for row in answered]),
        "owners": [owner for *_, owner, _, _ in answered],
        "session_keys": [key for *_, key, _ in answered],
        "from_events": [from_event for *_, from_event in answered],
        "times": [finished_at for _, finished_at, _ in answers],
        "statuses": [status for *_, status in answers],
        "sinks": sinks,
    }
    row = await (await connection.execute(_SQL["announce_if_marked"], values)).fetchone()
    return int(row[0]) if row else 0


def _filter_of(sink: Sink) -> dict[str, Any]:
    statuses = [type_.removeprefix(f"{REQUEST_TYPE}.") for type_ in sink.types]
    return {
        "name": sink.name,
        "everything": sink.requests == "all",
        "statuses": statuses,
        "owners": list(sink.owners),
    }


async def deliver_due(database: Pool, config: Config, describe: Describe, *, sender: Sender | None = None) -> int:
    """Send the deliveries that are due or come due meanwhile, until none is. Returns how many were taken."""
    return await deliver_all(_Answers(database, config, describe, sender or sender_for(config)))


async def forget_old(database: Pool, config: Config) -> int:
    """Delete deliveries and incoming events older than `webhook_keep_s`, at most a thousand of each. Returns how
    many."""
    values = {"limit": _FORGET_ROWS, "keep_s": config.webhooks.webhook_keep_s}
    async with borrowed(database) as connection:
        deliveries = await connection.execute(_SQL["forget_sink_deliveries_if_old"], values)
        known = await connection.execute(_SQL["forget_events_if_old"], values)
        return deliveries.rowcount + known.rowcount


class _Answers(DeliveryTable[TakenAnswer]):
    """Deliveries of answers to sinks."""

    take_if_due = "take_sink_deliveries_if_due"
    record_if_held = "record_sink_delivery_if_held"
    put_back_if_held = "put_back_sink_deliveries_if_held"

    def __init__(self, database: Pool, config: Config, describe: Describe, sender: Sender) -> None:
        super().__init__(database, config.webhooks)
        self._sinks = {sink.name: sink for sink in config.sinks}
        self._source = config.public_url or _NO_SOURCE
        self._describe = describe
        self._sender = sender

    async def take(self, limit: int) -> list[TakenAnswer]:
        values = {"sinks": list(self._sinks), "most": max(1, limit // max(1, len(self._sinks)))}
        return await self.take_as(TakenAnswer, values)

    def queue_of(self, delivery: TakenAnswer) -> tuple[str, int]:
        return delivery.sink, delivery.lane_id % _QUEUES

    async def deliver(self, delivery: TakenAnswer, wait_s: float) -> bool:
        async with borrowed(self.database) as connection:
            content = await self._describe(connection, delivery.session_key, delivery.request_id)
        gone = content is None
        result = SendResult(None, "the request was deleted") if content is None else await self._send(delivery, content)
        await self.record(delivery, result, wait_s, final=gone)
        return gone or result.status_code is not None

    async def _send(self, delivery: TakenAnswer, content: Announcement) -> SendResult:
        sink = self._sinks[delivery.sink]
        message_id = public_id("event", delivery.event_id)
        headers, body = write(self._event(sink, message_id, delivery, content), sink.mode)
        headers["user-agent"] = f"penstock/{__version__}"
        headers |= signing.headers(message_id, delivery.now_s, body, [_secret(sink)])
        return await self._sender.send(sink.url, headers, body)

    def _event(self, sink: Sink, message_id: str, delivery: TakenAnswer, content: Announcement) -> Event:
        causes = {"causeid": delivery.cause_id, "causesource": delivery.cause_source}
        return Event(
            message_id,
            sink.source or self._source,
            f"{REQUEST_TYPE}.{content.status}",
            delivery.session_key,
            rfc3339(delivery.event_at),
            "application/json",
            data=content.content,
            extensions={name: value for name, value in causes.items() if value is not None},
        )


@cache
def _secret(sink: Sink) -> bytes:
    """The sink's secret, read once: a server must be restarted to use another."""
    return sink.secret()

"""Answers of sessions told to sinks as CloudEvents: signed, at least once, each event with an id of its own.

A request whose answer is to be told is marked when it is accepted. One statement turns marked answers into deliveries
and takes their marks away, so that whatever dies between the answer and its delivery loses nothing. What is sent is
read when it is sent: a delivery holds no copy of the answer, and an erased answer is not told.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from time import monotonic
from typing import Any
from uuid import UUID

from psycopg.types.json import Jsonb

from penstock import __version__, events
from penstock.config import Config, WebhookLimits
from penstock.db import sql
from penstock.db.arrays import Int4Array, Int8Array
from penstock.db.pool import Connection, Now, Pool, borrowed
from penstock.deliver import signing
from penstock.deliver.addresses import policy_for
from penstock.deliver.rounds import deliver_all, hold, start_within
from penstock.deliver.webhooks import Result, Sender
from penstock.events import Event
from penstock.model import public_id
from penstock.sinks import ASKED, Sink

_SQL = sql.load("penstock.deliver", "deliver.sql")

# Operators may name any host: theirs to know. Only where clouds hand out credentials is nothing sent.
_ANYWHERE = ("0.0.0.0/0", "::/0")
_NO_SOURCE = "urn:penstock"
_LANES_AT_ONCE = 1_000
_ANSWERS_OF_A_LANE = 100
_FORGET_ROWS = 1_000
# Messages to one sink on their way at the same time. Those of one session go one after the other.
_QUEUES = 8


@dataclass(frozen=True, slots=True)
class Told:
    """What an event says of a request."""

    status: str
    """completed, failed or cancelled."""
    content: bytes
    """The request as the API shows it, JSON."""


Describe = Callable[[Connection, str, UUID], Awaitable[Told | None]]
"""What to say of a request, by the key of its session and its id; None if there is no such request any more."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A delivery in our hands."""

    taken_at: float
    """By this process's own clock, as is the next."""
    start_before: float
    id: int
    sink: str
    event_id: UUID
    lane_id: int
    request_id: UUID
    session_key: str
    event_at: datetime
    attempt: int
    cause_source: str | None
    cause_id: str | None
    taken_at_s: float
    """The same moment by the database's clock: receivers refuse messages whose time is far from theirs."""

    @property
    def now_s(self) -> int:
        return int(self.taken_at_s + monotonic() - self.taken_at)


def sender_for(config: Config) -> Sender:
    return Sender(policy_for(_ANYWHERE), config.webhooks.webhook_timeout_s)


async def announce(database: Pool, sinks: Sequence[Sink], *, now: Now = None) -> int:
    """Make deliveries of what was answered; how many answers there were."""
    wanted = Jsonb([_as_asked(sink) for sink in sinks])
    after, total = 0, 0
    while True:
        values = {"after": after, "lanes": _LANES_AT_ONCE, "most": _ANSWERS_OF_A_LANE}
        async with borrowed(database) as connection:
            found = await (await connection.execute(_SQL["list_to_announce"], values)).fetchall()
            # In a row of its own, a session that has nothing to tell yet.
            total += await announce_answered(connection, [row for row in found if row[1] is not None], wanted, now)
        lanes = {row[0] for row in found}
        if len(lanes) < _LANES_AT_ONCE:
            return total
        after = max(lanes)


async def announce_answered(connection: Connection, found: Sequence[Any], sinks: Jsonb, now: Now) -> int:
    """Tell of those of some requests that were answered: how many."""
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
        "now": now,
    }
    row = await (await connection.execute(_SQL["announce_if_marked"], values)).fetchone()
    return int(row[0]) if row else 0


def _as_asked(sink: Sink) -> dict[str, Any]:
    statuses = [type_.removeprefix(f"{ASKED}.") for type_ in sink.types]
    return {
        "name": sink.name,
        "everything": sink.requests == "all",
        "statuses": statuses,
        "owners": list(sink.owners),
    }


async def deliver_due(database: Pool, config: Config, describe: Describe, *, sender: Sender | None = None) -> int:
    """Send what is due, and what comes due meanwhile, until nothing is. Returns how many were taken."""
    return await deliver_all(_Answers(database, config, describe, sender or sender_for(config)), config.webhooks)


async def forget_old(database: Pool, config: Config, *, now: Now = None) -> int:
    """Delete deliveries and events past their keep, at most a thousand of each. Returns how many."""
    values = {"limit": _FORGET_ROWS, "keep_s": config.webhooks.webhook_keep_s, "now": now}
    async with borrowed(database) as connection:
        deliveries = await connection.execute(_SQL["forget_sink_deliveries_if_old"], values)
        known = await connection.execute(_SQL["forget_events_if_old"], values)
        return deliveries.rowcount + known.rowcount


class _Answers:
    """What a round does with them."""

    def __init__(self, database: Pool, config: Config, describe: Describe, sender: Sender) -> None:
        self._database = database
        self._limits: WebhookLimits = config.webhooks
        self._sinks = {sink.name: sink for sink in config.sinks}
        self._source = config.public_url or _NO_SOURCE
        self._describe = describe
        self._sender = sender

    async def take(self, limit: int) -> list[Taken]:
        begun = monotonic()
        values = {
            "sinks": list(self._sinks),
            "most": max(1, limit // max(1, len(self._sinks))),
            "hold_s": hold(self._limits),
            "now": None,
        }
        async with borrowed(self._database) as connection:
            cursor = await connection.execute(_SQL["take_sink_deliveries_if_due"], values)
            return [Taken(begun, begun + start_within(self._limits), *row) for row in await cursor.fetchall()]

    def queue_of(self, delivery: Taken) -> tuple[str, int]:
        return delivery.sink, delivery.lane_id % _QUEUES

    async def deliver(self, delivery: Taken, wait_s: float) -> bool:
        async with borrowed(self._database) as connection:
            told = await self._describe(connection, delivery.session_key, delivery.request_id)
        gone = told is None
        result = Result(None, "the request was deleted") if told is None else await self._send(delivery, told)
        await self._record(delivery, result, wait_s, final=gone)
        return gone or result.status_code is not None

    async def _send(self, delivery: Taken, told: Told) -> Result:
        sink = self._sinks[delivery.sink]
        message_id = public_id("event", delivery.event_id)
        headers, body = events.write(self._event(sink, message_id, delivery, told), sink.mode)
        headers["user-agent"] = f"penstock/{__version__}"
        headers |= signing.headers(message_id, delivery.now_s, body, [_secret(sink)])
        return await self._sender.send(sink.url, headers, body)

    def _event(self, sink: Sink, message_id: str, delivery: Taken, told: Told) -> Event:
        causes = {"causeid": delivery.cause_id, "causesource": delivery.cause_source}
        return Event(
            message_id,
            sink.source or self._source,
            f"{ASKED}.{told.status}",
            delivery.session_key,
            events.rfc3339(delivery.event_at),
            "application/json",
            data=told.content,
            extensions={name: value for name, value in causes.items() if value is not None},
        )

    async def _record(self, delivery: Taken, result: Result, wait_s: float, *, final: bool) -> None:
        values = {
            "id": delivery.id,
            "attempt": delivery.attempt,
            "delivered": result.delivered,
            "final": final,
            "status_code": result.status_code,
            "error": result.error,
            "wait_s": wait_s,
            "give_up_s": self._limits.webhook_give_up_s,
            "now": None,
        }
        async with borrowed(self._database) as connection:
            await connection.execute(_SQL["record_sink_delivery_if_held"], values)

    async def put_back(self, deliveries: list[Taken], wait_s: float) -> None:
        values = {
            "ids": [delivery.id for delivery in deliveries],
            "attempts": [delivery.attempt for delivery in deliveries],
            "wait_s": wait_s,
            "now": None,
        }
        async with borrowed(self._database) as connection:
            await connection.execute(_SQL["put_back_sink_deliveries_if_held"], values)


@cache
def _secret(sink: Sink) -> bytes:
    """Read once: a server is started anew to take another."""
    return sink.secret()

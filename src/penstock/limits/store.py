"""Limits in the database: reports of processes, limits that follow from them, shares of an operator's limit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

import msgspec

from penstock.adapt.concurrency import Concurrency, Totals
from penstock.adapt.rate import Rate
from penstock.db import sql
from penstock.db.pool import Connection, Now

_SQL = sql.load("penstock.limits", "limits.sql")

_KEEP_S = 7 * 86_400.0

Key = tuple[str, str]
"""A provider and a model."""


class Report(msgspec.Struct, frozen=True):
    """What a process has seen of a model's calls."""

    totals: Totals
    admitted: int
    refused: int
    stated_per_s: float | None = None
    tokens: float | None = None
    """Tokens of a call."""
    paced: bool = False
    """Calls wait for the rate."""
    halted: bool = False


class Reported(NamedTuple):
    process: UUID
    wanted: int
    in_flight: int
    report: Report


class LimitState(msgspec.Struct, frozen=True):
    """What the controllers of a model remember."""

    concurrency: Concurrency
    rate: Rate
    refused: int = 0
    """Refusals counted so far."""
    made: int = 0
    """Calls counted so far, those that were refused and those under way among them."""


class Limit(NamedTuple):
    state: LimitState | None
    version: int
    reason: str
    age_s: float
    """Seconds since it was adjusted."""


@dataclass(frozen=True, slots=True)
class LimitView:
    """A limit as people see it."""

    provider: str
    model: str
    calls: float
    floor: float
    ceiling: float
    per_s: float | None
    reason: str
    moved_at: datetime
    in_flight: int


_report = msgspec.json.Decoder(Report)
_state = msgspec.json.Decoder(LimitState)


async def report_and_list(
    connection: Connection,
    process: UUID,
    mine: dict[Key, Reported],
    providers: Sequence[str],
    grace_s: float,
    *,
    now: Now = None,
) -> dict[Key, list[Reported]]:
    """Record what this process has seen; returns what the others report, by provider and model."""
    cursor = await connection.execute(
        _SQL["report_and_list"],
        {
            "process": process,
            "providers": [provider for provider, _ in mine],
            "models": [model for _, model in mine],
            "wanted": [each.wanted for each in mine.values()],
            "in_flight": [each.in_flight for each in mine.values()],
            "reports": [msgspec.json.encode(each.report).decode() for each in mine.values()],
            "of": list(providers),
            "grace_s": grace_s,
            "now": now,
        },
    )
    others: dict[Key, list[Reported]] = {}
    for provider, model, other, wanted, in_flight, report in await cursor.fetchall():
        found = Reported(other, wanted, in_flight, msgspec.convert(report, Report))
        others.setdefault((provider, model), []).append(found)
    return others


async def list_limits(
    connection: Connection, providers: Sequence[str], *, now: Now = None
) -> tuple[dict[Key, Limit], float]:
    """List the limits of some providers; and the database's time, in seconds."""
    cursor = await connection.execute(_SQL["list_limits"], {"of": list(providers), "now": now})
    limits: dict[Key, Limit] = {}
    now_s: float | None = None
    for provider, model, state, version, reason, at_s, age_s in await cursor.fetchall():
        now_s = at_s
        limits[provider, model] = Limit(_known(state), version, reason, age_s)
    if now_s is None:
        row = await (await connection.execute(_SQL["now"], {"now": now})).fetchone()
        now_s = row[0] if row is not None else 0.0
    return limits, now_s


def _known(state: object) -> LimitState | None:
    """The state; None if it is one of another version of Penstock, which then begins anew."""
    try:
        return msgspec.convert(state, LimitState)
    except msgspec.ValidationError:
        return None


async def move_if_unchanged(
    connection: Connection,
    key: Key,
    version: int,
    state: LimitState,
    *,
    floor: float,
    ceiling: float,
    per_s: float | None,
    reason: str | None,
    now: Now = None,
) -> bool:
    """Record a limit. False if another process has moved it since it was read."""
    provider, model = key
    cursor = await connection.execute(
        _SQL["move_if_unchanged"],
        {
            "provider": provider,
            "model": model,
            "version": version,
            "calls": state.concurrency.level,
            "floor": floor,
            "ceiling": ceiling,
            "per_s": per_s,
            "state": msgspec.json.encode(state).decode(),
            "reason": reason,
            "now": now,
        },
    )
    return await cursor.fetchone() is not None


async def read_limits(
    connection: Connection, grace_s: float, providers: Sequence[str] | None = None, *, now: Now = None
) -> list[LimitView]:
    cursor = await connection.execute(
        _SQL["read_limits"], {"of": None if providers is None else list(providers), "grace_s": grace_s, "now": now}
    )
    return [LimitView(*row) for row in await cursor.fetchall()]


async def list_shares(
    connection: Connection, process: UUID, providers: Sequence[str], grace_s: float, *, now: Now = None
) -> dict[str, dict[UUID, int]]:
    """How many calls of each provider the other processes want."""
    cursor = await connection.execute(
        _SQL["list_shares"], {"process": process, "of": list(providers), "grace_s": grace_s, "now": now}
    )
    wants: dict[str, dict[UUID, int]] = {provider: {} for provider in providers}
    for provider, other, wanted in await cursor.fetchall():
        wants[provider][other] = wanted
    return wants


async def make_slots(connection: Connection, providers: Iterable[str]) -> None:
    await connection.execute(_SQL["make_slots"], {"of": sorted(providers)})


async def take_share_if_free(
    connection: Connection,
    process: UUID,
    provider: str,
    *,
    cap: int,
    target: int,
    wanted: int,
    grace_s: float,
    now: Now = None,
) -> int:
    """Take up to `target` of a provider's `cap` slots; returns how many this process has now."""
    cursor = await connection.execute(
        _SQL["take_share_if_free"],
        {
            "process": process,
            "provider": provider,
            "cap": cap,
            "target": target,
            "wanted": wanted,
            "grace_s": grace_s,
            "now": now,
        },
    )
    row = await cursor.fetchone()
    return 0 if row is None else int(row[0])


async def leave(connection: Connection, process: UUID, providers: Sequence[str]) -> None:
    """Free the slots of a process that ends."""
    await connection.execute(_SQL["leave"], {"process": process, "of": list(providers)})


async def remove_silent(connection: Connection, grace_s: float, *, now: Now = None) -> None:
    """Remove the reports of processes that are silent, and limits of models that were not called for a week."""
    await connection.execute(_SQL["remove_silent"], {"grace_s": grace_s, "keep_s": _KEEP_S, "now": now})

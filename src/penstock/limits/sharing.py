"""Limits of the providers that one process calls: reported, adjusted and shared out with the other processes.

Every half second a process that has work records what it has seen of each model's calls, reads what the others have,
and moves the limits that are due, unless another process was faster. Then it takes its shares: of each model's limit,
which is an estimate, the part that follows from what every process wants; of an operator's limit, slots that are
counted in the database, so that never more are given out than there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from time import monotonic
from uuid import UUID, uuid4

import psycopg
from psycopg_pool import PoolTimeout

from penstock.adapt.apportion import apportion, apportion_rate
from penstock.claim import gates
from penstock.config import Config
from penstock.db.pool import Connection, Pool, borrowed
from penstock.dispatch.http.vllm_metrics import VllmMetrics
from penstock.dispatch.providers import Provider
from penstock.dispatch.target import Target
from penstock.dispatch.throttle import Route, Throttle
from penstock.limits import store
from penstock.limits.decide import Ceilings, decide
from penstock.limits.store import Key, Limit, Report, Reported
from penstock.tasks import cancel_and_wait

_log = logging.getLogger("penstock.limits")

_TICK_S = 0.5
_SOONEST_S = 0.05
# A limit is adjusted by the first process that finds it so old.
_DUE_S = 0.4
# A process that has not reported for so long has no part of what was found out: rounds are many times as frequent. If
# it lives on, it has its part again with its next report. An operator's limit is kept to the letter, by the grace.
_SILENT_S = 5.0
# Of the grace, as for heartbeats: this process stops before another one takes its slots.
_USABLE_GRACE = 0.8
_SWEEP_S = 60.0
# A change of a limit that is worth a line in the log.
_WORTH_LOGGING = 0.2


@dataclass(slots=True)
class Limited:
    """One provider in this process."""

    throttle: Throttle
    gate_pool: str
    per_process: int
    cap: int | None = None
    per_minute: float | None = None
    tokens_per_minute: float | None = None
    metrics: VllmMetrics | None = None
    logged: dict[str, float] = field(default_factory=dict)


class ProviderLimits:
    """Limits of the providers that this process calls."""

    def __init__(self, config: Config, database: Pool) -> None:
        self.process: UUID = uuid4()
        self._config = config
        self._database = database
        self._grace_s = config.liveness.heartbeat_grace_s
        self._providers: dict[str, Limited] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._news = asyncio.Event()
        self._swept_at = monotonic()

    def add(
        self,
        name: str,
        gate_pool: str,
        *,
        cap: int | None = None,
        per_minute: float | None = None,
        tokens_per_minute: float | None = None,
    ) -> Throttle:
        """The throttle of a provider. With a `cap` over all processes, nothing may be called before the first round;
        until then, each keeps to the calls a minute that are allowed over all."""
        if (known := self._providers.get(name)) is not None:
            return known.throttle
        per_process = self._config.dispatch.most_calls
        throttle = Throttle(
            per_process if cap is None else 0,
            start=self._config.dispatch.concurrency_start,
            start_per_s=None if per_minute is None else per_minute / 60,
        )
        throttle.on_news = self._news.set
        limited = Limited(throttle, gate_pool, per_process, cap, per_minute, tokens_per_minute)
        self._providers[name] = limited
        self._news.set()
        return throttle

    def of_provider(self, provider: Provider) -> Throttle:
        """The throttle of a server's provider; its batches and sessions share it, and its gates."""
        throttle = self.add(
            provider.name,
            provider.pool,
            cap=provider.max_concurrency,
            per_minute=provider.max_rpm,
            tokens_per_minute=provider.max_tpm,
        )
        limited = self._providers[provider.name]
        if provider.metrics_url is not None and limited.metrics is None:
            limited.metrics = VllmMetrics(provider.metrics_url, self._config.dispatch, provider.options)
            self._tasks.append(asyncio.create_task(limited.metrics.run(), name="vllm metrics"))
        return throttle

    def of_run(self, target: Target, pool: str) -> Throttle | None:
        """The throttle of the endpoint that a run calls; None if it calls a function."""
        if target.base_url is None:
            return None
        return self.add(target.provider, pool, per_minute=target.max_rpm, tokens_per_minute=target.max_tpm)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the limits for as long as the context lasts."""
        self._tasks.append(asyncio.create_task(self._run(), name="limits"))
        try:
            yield
        finally:
            await cancel_and_wait(self._tasks)
            await self._leave()

    async def _run(self) -> None:
        while True:
            busy = False
            try:
                busy = await self.round()
            except (psycopg.Error, PoolTimeout) as error:
                _log.warning("limits could not be looked at, trying again: %s", error)
                busy = True
            await self._wait(_TICK_S if busy else self._config.liveness.heartbeat_interval_s / 2)

    async def _wait(self, seconds: float) -> None:
        await asyncio.sleep(_SOONEST_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds - _SOONEST_S):
                await self._news.wait()

    async def _leave(self) -> None:
        for limited in self._providers.values():
            limited.throttle.close()
        if self._providers:
            with contextlib.suppress(psycopg.Error, PoolTimeout):
                async with borrowed(self._database) as connection:
                    await store.leave(connection, self.process, sorted(self._providers))

    async def round(self) -> bool:
        """Report, adjust, take shares. Returns whether there is anything to do for this process."""
        self._news.clear()
        if not self._providers:
            return False
        names = sorted(self._providers)
        mine = {
            (name, model): self._report(limited.throttle, model, route)
            for name, limited in self._providers.items()
            for model, route in limited.throttle.routes.items()
            if route.in_flight or route.started > route.reported or limited.throttle.wanted(model)
        }
        async with borrowed(self._database) as connection:
            others = await store.report_and_list(connection, self.process, mine, names, min(_SILENT_S, self._grace_s))
            limits, now_s = await store.list_limits(connection, names)
            for name in names:
                await self._hold_gated(connection, name, now_s)
            for key, own in mine.items():
                await self._share(connection, key, own, others.get(key, []), limits.get(key), now_s)
            await self._take_slots(connection)
            if monotonic() - self._swept_at > _SWEEP_S:
                self._swept_at = monotonic()
                await store.remove_silent(connection, self._grace_s)
        for limited in self._providers.values():
            limited.throttle.nudge()
        return any(own.wanted for own in mine.values())

    @staticmethod
    def _report(throttle: Throttle, model: str, route: Route) -> Reported:
        route.count(monotonic())
        route.reported = route.started
        wanted = throttle.wanted(model)
        waits = route.per_s is not None and wanted > route.in_flight and route.in_flight < route.share
        report = Report(
            route.totals, route.admitted, route.refused, route.stated_per_s, route.tokens, waits, route.halted
        )
        return Reported(UUID(int=0), wanted, route.in_flight, report)

    async def _hold_gated(self, connection: Connection, name: str, now_s: float) -> None:
        limited = self._providers[name]
        for gate in await gates.list_closed(connection, limited.gate_pool):
            if gate.not_before is not None and (left_s := gate.not_before.timestamp() - now_s) > 0:
                limited.throttle.route(gate.route).hold(monotonic() + left_s)

    async def _share(
        self,
        connection: Connection,
        key: Key,
        own: Reported,
        others: list[Reported],
        limit: Limit | None,
        now_s: float,
    ) -> None:
        """Move a model's limit if it is due, and take this process's part of it."""
        name, model = key
        limited = self._providers[name]
        own = own._replace(process=self.process)
        reports = sorted([own, *others], key=lambda each: each.process)
        ceilings = self._ceilings(limited, len(reports))
        state = None if limit is None else limit.state
        held_s = limited.throttle.route(model).held_until - monotonic()
        due = limit is None or limit.age_s >= _DUE_S or own.report.refused > (state.refused if state else 0)
        if state is None or due:
            pressure = None if limited.metrics is None else limited.metrics.pressure
            open_at_s = now_s + max(0.0, held_s)
            moved, reason = decide(state, reports, now_s, ceilings, open_at_s=open_at_s, pressure=pressure)
            pace = ceilings.per_s(moved.rate.per_s, own.report.tokens)
            version = 0 if limit is None else limit.version
            if await store.move_if_unchanged(
                *(connection, key, version, moved),
                floor=ceilings.bounds.floor,
                ceiling=ceilings.bounds.ceiling,
                per_s=pace,
                reason=reason,
            ):
                state = moved
                self._log(limited, key, moved.concurrency.limit, pace, reason)
        if state is not None:
            self._take(limited, model, state, reports, ceilings)

    def _ceilings(self, limited: Limited, processes: int) -> Ceilings:
        most = limited.per_process * processes
        return Ceilings(
            most if limited.cap is None else min(most, limited.cap),
            self._config.dispatch.concurrency_start,
            limited.per_minute,
            limited.tokens_per_minute,
            2 * _TICK_S,
        )

    def _take(
        self, limited: Limited, model: str, state: store.LimitState, reports: list[Reported], ceilings: Ceilings
    ) -> None:
        wants = {each.process: each.wanted for each in reports}
        tokens = next((each.report.tokens for each in reports if each.report.tokens), None)
        per_s = ceilings.per_s(state.rate.per_s, tokens)
        share = apportion(round(state.concurrency.level), wants)[self.process]
        part = None if per_s is None else apportion_rate(per_s, wants)[self.process]
        limited.throttle.set_share(model, min(share, limited.per_process), part)

    async def _take_slots(self, connection: Connection) -> None:
        capped = {name: limited for name, limited in self._providers.items() if limited.cap is not None}
        if not capped:
            return
        began = monotonic()
        await store.make_slots(connection, capped)
        wants = await store.list_shares(connection, self.process, sorted(capped), self._grace_s)
        for name, limited in capped.items():
            throttle, cap = limited.throttle, limited.cap or 0
            wanted = sum(map(throttle.wanted, throttle.routes))
            everyone = dict(sorted({**wants[name], self.process: wanted}.items()))
            fair = min(apportion(cap, everyone)[self.process], limited.per_process)
            # Slots in use are given back as their calls end: nothing is started beyond the fair share meanwhile.
            target = max(fair, throttle.in_flight)
            throttle.capacity = min(throttle.capacity, fair)
            granted = await store.take_share_if_free(
                *(connection, self.process, name), cap=cap, target=target, wanted=wanted, grace_s=self._grace_s
            )
            throttle.capacity = min(granted, fair)
            throttle.open_until = began + _USABLE_GRACE * self._grace_s

    @staticmethod
    def _log(limited: Limited, key: Key, calls: float, per_s: float | None, reason: str | None) -> None:
        """Log a limit that has moved far since it was last logged."""
        name, model = key
        now = per_s or math.inf
        for kind, value in (("calls", calls), ("rate", now)):
            before = limited.logged.get(f"{kind} {model}")
            if before is None or abs(value - before) > _WORTH_LOGGING * before:
                limited.logged[f"{kind} {model}"] = value
                if before is not None and reason is not None:
                    rate = "" if per_s is None else f", {per_s:.3g} calls/s"
                    _log.info("limit of %s at %s: %.0f in flight%s: %s", model, name, calls, rate, reason)

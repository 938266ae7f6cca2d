"""What every server process does beside answering: validates, expires, sweeps, purges, delivers.

Each duty is a loop of its own that can be woken before its time and outlives every fault of the database. Most are done
by all servers at once; the statements see to it that none does another's work again. What a single server does well
enough is done by the one that leads, so that the others need not look.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from time import monotonic
from types import TracebackType
from typing import Self
from uuid import UUID, uuid4

import psycopg
from psycopg_pool import PoolTimeout

from penstock.claim import liveness
from penstock.claim.heart import Heart
from penstock.config import Config
from penstock.db.bell import WORK, ring
from penstock.db.leader import Leader
from penstock.db.pool import Pool, borrowed
from penstock.deliver import sinks, webhooks
from penstock.erase import erase
from penstock.housekeeping import BatchKeeper, take_turn
from penstock.intake import parts, sweep
from penstock.providers import POOL, Providers
from penstock.tasks import cancelled
from penstock.work import batches, pools

_log = logging.getLogger("penstock.caretaker")

_VALIDATE_EVERY_S = 5.0
_END_EVERY_S = 2.0
_REROUTE_EVERY_S = 5.0
_EXPIRE_EVERY_S = 10.0
_DELIVER_EVERY_S = 1.0
_FORGET_EVERY_S = 300.0
_EXPIRE_AT_ONCE = 100
_RETIRE_EVERY_S = 300.0
_RETIRE_AT_ONCE = 500
_RETIRE_REST_S = 0.1
_FIRST = UUID(int=0)
_FIRST_BACKOFF_S = 0.5
_LAST_BACKOFF_S = 30.0

Step = Callable[[], Awaitable[bool]]
"""One round; True if there is more to do right away."""


@dataclass(slots=True)
class _Duty:
    name: str
    step: Step
    every_s: float
    rest_s: float = 0.0
    """Between two rounds that follow each other at once."""
    led: bool = False
    """Whether only the leader does it in its time. Whoever is woken for it has a reason, and does it anyway."""
    woken: asyncio.Event = field(default_factory=asyncio.Event)


class Caretaker:
    """Runs the duties for as long as its context lasts."""

    def __init__(
        self,
        config: Config,
        conninfo: str,
        database: Pool,
        providers: Providers,
        *,
        describe: sinks.Describe | None = None,
    ) -> None:
        """`describe` says what sinks are told of a request; without it they are told nothing."""
        self._config = config
        self._conninfo = conninfo
        self._database = database
        self._providers = providers
        self._describe = describe
        erasing = config.erase
        self._duties = {
            duty.name: duty
            for duty in (
                _Duty("validate", self._validate, _VALIDATE_EVERY_S),
                _Duty("reroute", self._reroute, _REROUTE_EVERY_S),
                _Duty("end", self._end, _END_EVERY_S, led=True),
                _Duty("expire", self._expire, _EXPIRE_EVERY_S, led=True),
                _Duty("retire", self._retire, _RETIRE_EVERY_S, _RETIRE_REST_S, led=True),
                _Duty("sweep", self._sweep, config.liveness.heartbeat_grace_s, led=True),
                _Duty("purge", self._purge, erasing.purge_interval_ms / 1000, erasing.purge_throttle_ms / 1000),
                _Duty("webhooks", self._deliver, _DELIVER_EVERY_S),
                _Duty("forget", self._forget, _FORGET_EVERY_S, led=True),
            )
        }
        if config.sinks and describe is not None:
            self._duties["announce"] = _Duty("announce", self._announce, _DELIVER_EVERY_S, led=True)
            self._duties["sinks"] = _Duty("sinks", self._deliver_to_sinks, _DELIVER_EVERY_S)
        self._tasks: list[asyncio.Task[None]] = []
        self.leader = Leader(
            conninfo, "caretaker", grace_s=config.liveness.leader_grace_s, on_lead=self._wake_what_is_led
        )
        self._sender = webhooks.sender_for(config)
        self._unserved_since: dict[str, float] = {}
        self._retired_to = _FIRST
        self._batch_keeper = BatchKeeper(database)

    def wake(self, name: str) -> None:
        """There is something to do for this duty: do not wait for its time."""
        self._duties[name].woken.set()

    def _wake_what_is_led(self) -> None:
        for duty in self._duties.values():
            if duty.led:
                duty.woken.set()

    async def __aenter__(self) -> Self:
        await self.leader.__aenter__()
        self._tasks = [asyncio.create_task(self._keep(duty), name=duty.name) for duty in self._duties.values()]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await cancelled(self._tasks)
        await self.leader.__aexit__(None, None, None)

    async def _keep(self, duty: _Duty) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while True:
            woken = duty.woken.is_set()
            duty.woken.clear()
            try:
                more = await self._round(duty, woken=woken)
            except (psycopg.Error, PoolTimeout, OSError) as error:
                _log.warning("%s: trying again: %s", duty.name, type(error).__name__)
            except Exception as error:
                # A duty that ended would be missed by nobody until much later.
                _log.error("%s: failed: %s", duty.name, type(error).__name__)
            else:
                backoff_s = _FIRST_BACKOFF_S
                await self._rest(duty, duty.rest_s if more else duty.every_s, early=not more)
                continue
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1))  # noqa: S311 -- jitter
            backoff_s = min(2 * backoff_s, _LAST_BACKOFF_S)

    async def _round(self, duty: _Duty, *, woken: bool) -> bool:
        if woken or not duty.led:
            return await duty.step()
        async with self.leader.turn(duty.name) as turn:
            return turn.mine and await duty.step()

    @staticmethod
    async def _rest(duty: _Duty, seconds: float, *, early: bool) -> None:
        if not early:
            await asyncio.sleep(seconds)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds * random.uniform(0.75, 1)):  # noqa: S311 -- jitter
                await duty.woken.wait()

    # -- the duties

    async def _validate(self) -> bool:
        """Open or fail the batches that were asked for; without providers, somebody else has to."""
        if not len(self._providers):
            return False
        async with borrowed(self._database) as connection:
            waiting = await batches.unvalidated(connection)
            for batch_id in waiting:
                try:
                    await batches.validate_batch(connection, batch_id, self._providers.pool_of)
                except Exception as error:
                    # One that cannot be looked at must not keep the younger ones waiting.
                    if connection.closed:
                        raise
                    _log.error("validate: batch %s: failed: %s", batch_id, type(error).__name__)
            if waiting:
                await ring(connection, WORK, "")
        return False

    async def _reroute(self) -> bool:
        """What is left of providers that were renamed or removed goes to whoever serves its model now. Not at once:
        their workers may be with another server that is just being started again."""
        if not len(self._providers):
            return False
        grace_s, more = self._config.liveness.heartbeat_grace_s, False
        async with borrowed(self._database) as connection:
            found = await pools.unserved(connection, self._providers.pools, grace_s)
            since = {pool: self._unserved_since.get(pool, monotonic()) for pool in found}
            for pool in found.keys() - self._unserved_since.keys():
                self._warn_of(pool, found[pool])
            self._unserved_since = since
            for pool, models in found.items():
                for model in models:
                    new_pool = self._providers.pool_instead(pool, model)
                    if new_pool is None or monotonic() < since[pool] + grace_s:
                        continue
                    moved = await pools.move(connection, pool, model, new_pool, grace_s)
                    if moved:
                        _log.warning("%s: the work for %s (%d lanes) is now with %s", pool, model, moved, new_pool)
                        await ring(connection, WORK, new_pool)
                    more |= moved >= pools.MOVED_AT_ONCE
        return more

    def _warn_of(self, pool: str, models: list[str]) -> None:
        orphans = [model for model in models if self._providers.pool_instead(pool, model) is None]
        if orphans:
            remedy = f"configure a provider for {', '.join(orphans)}, or cancel what is left of them"
        else:
            remedy = "it goes to those that serve its models now, unless a worker for it appears"
        _log.warning("%s has unfinished work and no provider or worker: %s", pool, remedy)

    async def _end(self) -> bool:
        """Batches end in time even where no worker is left to end them."""
        if await take_turn(self._database, _END_EVERY_S):
            await self._batch_keeper.round()
        return False

    async def _expire(self) -> bool:
        async with borrowed(self._database) as connection:
            expired = await erase.expire_files(connection, _EXPIRE_AT_ONCE)
            archived = await erase.archive_batches(connection, _EXPIRE_AT_ONCE)
            await parts.expire_uploads(connection)
        if expired or archived:
            self.wake("purge")
        return max(expired, archived) >= _EXPIRE_AT_ONCE

    async def _retire(self) -> bool:
        """Delete sessions that nobody has used for long, a page of them at a time."""
        async with borrowed(self._database) as connection:
            kept_s = self._config.sessions.session_keep_s
            place, retired = await erase.expire_sessions(connection, kept_s, self._retired_to, _RETIRE_AT_ONCE)
        self._retired_to = place or _FIRST
        if retired:
            self.wake("purge")
        return place is not None

    async def _sweep(self) -> bool:
        """Remove what killed uploads left behind."""
        grace_s = self._config.liveness.heartbeat_grace_s
        throttle_s = self._config.erase.purge_throttle_ms / 1000
        await _in_thread(lambda: sweep.sweep_leftovers(self._conninfo, grace_s=grace_s, throttle_s=throttle_s))
        return False

    async def _purge(self) -> bool:
        async with borrowed(self._database) as connection:
            return await erase.purge_step(connection, self._config.erase.purge_batch_size) > 0

    async def _deliver(self) -> bool:
        return await webhooks.deliver_due(self._database, self._config, sender=self._sender) > 0

    async def _announce(self) -> bool:
        """Make deliveries of what was answered in sessions."""
        answers = await sinks.announce(self._database, self._config.sinks)
        if answers:
            self.wake("sinks")
        return answers > 0

    async def _deliver_to_sinks(self) -> bool:
        if self._describe is None:
            return False
        return await sinks.deliver_due(self._database, self._config, self._describe) > 0

    async def _forget(self) -> bool:
        forgotten = await webhooks.forget_old(self._database, self._config)
        return forgotten + await sinks.forget_old(self._database, self._config) > 0


async def _in_thread(call: Callable[[], object]) -> None:
    """Wait for a blocking call, in a thread that keeps no process from ending."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def end(error: Exception | None) -> None:
        if ended.done():
            return
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)

    def run() -> None:
        failure: Exception | None = None
        try:
            call()
        except Exception as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to hear it
            loop.call_soon_threadsafe(end, failure)

    threading.Thread(target=run, name="penstock-sweep", daemon=True).start()
    await ended


class Presence:
    """This process's registered, beating identity; a new one when the old was declared dead."""

    def __init__(self, config: Config, conninfo: str, database: Pool) -> None:
        self.worker_id: UUID = uuid4()
        self._config = config
        self._conninfo = conninfo
        self._database = database
        self._heart: Heart | None = None
        self._died = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.on_change: Callable[[UUID], None] = lambda _: None

    async def __aenter__(self) -> Self:
        await self._begin()
        self._task = asyncio.create_task(self._watch(), name="presence")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._heart is not None:
            self._heart.stop()
        with contextlib.suppress(psycopg.Error, PoolTimeout):
            async with borrowed(self._database) as connection:
                await liveness.unregister(connection, self.worker_id)

    async def _begin(self) -> None:
        async with borrowed(self._database) as connection:
            await liveness.register(connection, self.worker_id, POOL)
        loop = asyncio.get_running_loop()
        heart = Heart(self._conninfo, self.worker_id, self._config.liveness, on_beat=lambda: self._hear(loop))
        self._heart = heart
        heart.start()

    def _hear(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._heart is not None and self._heart.declared_dead:
            loop.call_soon_threadsafe(self._died.set)

    async def _watch(self) -> None:
        while True:
            await self._died.wait()
            _log.warning("server %s was declared dead: going on under a new identity", self.worker_id)
            while True:
                self._died.clear()
                self.worker_id = uuid4()
                try:
                    await self._begin()
                except (psycopg.Error, PoolTimeout):
                    await asyncio.sleep(_FIRST_BACKOFF_S)
                    continue
                self.on_change(self.worker_id)
                break

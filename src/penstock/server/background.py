"""Background duties of every server process: validate, ingest, reprocess, scan, expire, sweep, purge,
deliver.

Each duty is a loop of its own that can be woken before its time and outlives every fault of the database. Most are done
by all servers at once; the statements see to it that no work is done twice. A duty with a `turn` is done by the one
server that takes the turn, so that the others need not look.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Self
from uuid import UUID

import psycopg
from psycopg_pool import PoolTimeout

from penstock.adapters.config import Adapter
from penstock.backoff import Backoff, jittered
from penstock.batches import audit
from penstock.batches.unserved import MOVED_AT_ONCE, list_unserved, move_lanes
from penstock.batches.validate import list_unvalidated, validate_batch
from penstock.config import Config
from penstock.db.duties import take_turn
from penstock.db.embedded.reserve import do_with_reserve, keep_reserve
from penstock.db.notify import WORK, notify
from penstock.db.pool import Pool, borrowed
from penstock.deliver import sinks, webhooks
from penstock.dispatch.providers import Providers
from penstock.erase import erase, purge
from penstock.erase.leftovers import LeftoverWalk
from penstock.intake import parts, sweep
from penstock.server.adapter_scan import TAKE_AT_ONCE, AdapterScans, ScanReport
from penstock.server.job_ingest import JobIngest
from penstock.server.job_operations import JobOperations
from penstock.tasks import cancel_and_wait
from penstock.worker.maintenance import BatchMaintenance

_log = logging.getLogger("penstock.background")

_VALIDATE_EVERY_S = 5.0
_INGEST_EVERY_S = 2.0
_OPERATE_EVERY_S = 2.0
_END_EVERY_S = 2.0
_SCAN_REST_S = 1.0
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
    """Pause between two rounds while there is more to do."""
    turn: str | None = None
    """Turn that a server must take to do the duty, where one does it for all. A server that is woken does it without:
    it has a reason."""
    frees: bool = False
    """It deletes, so that it has the room kept for deletions."""
    unfinished: bool = False
    """The last round left something to do."""
    woken: asyncio.Event = field(default_factory=asyncio.Event)


class BackgroundDuties:
    """Background duties of one server, run for as long as the context lasts."""

    def __init__(
        self,
        config: Config,
        conninfo: str,
        database: Pool,
        providers: Providers,
        *,
        describe: sinks.Describe | None = None,
        scans: AdapterScans | None = None,
    ) -> None:
        """`describe` makes the event that sinks get of a request; without it they get none. `scans` has the adapters;
        without it there are none."""
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
                _Duty("ingest", self._ingest, _INGEST_EVERY_S),
                _Duty("operate", self._operate, _OPERATE_EVERY_S),
                _Duty("reroute", self._reroute, _REROUTE_EVERY_S),
                _Duty("end", self._end, _END_EVERY_S, turn="round"),
                _Duty("expire", self._expire, _EXPIRE_EVERY_S, turn="expire", frees=True),
                _Duty("retire", self._retire, _RETIRE_EVERY_S, _RETIRE_REST_S, turn="retire", frees=True),
                _Duty("sweep", self._sweep, config.liveness.heartbeat_grace_s, turn="sweep", frees=True),
                _Duty(
                    "purge", self._purge, erasing.purge_interval_ms / 1000, erasing.purge_throttle_ms / 1000, frees=True
                ),
                _Duty("webhooks", self._deliver, _DELIVER_EVERY_S),
                _Duty("forget", self._forget, _FORGET_EVERY_S, turn="forget"),
            )
        }
        if erasing.keep_s:
            name = "expire_batches"
            self._duties[name] = _Duty(
                name, self._expire_batches, _RETIRE_EVERY_S, _RETIRE_REST_S, turn=name, frees=True
            )
        if config.sinks and describe is not None:
            self._duties["announce"] = _Duty("announce", self._announce, _DELIVER_EVERY_S, turn="announce")
            self._duties["sinks"] = _Duty("sinks", self._deliver_to_sinks, _DELIVER_EVERY_S)
        self.scans = scans or AdapterScans(config, conninfo, database)
        for adapter in self.scans.scanned:
            name = _scan_duty(adapter.name)
            step = partial(self._scan, adapter.name)
            self._duties[name] = _Duty(name, step, adapter.scan_every_s, _SCAN_REST_S, turn=name)
        self._changed: set[str] = set()
        """Adapters whose files have changed since their last scan began."""
        self._next_scans: dict[str, asyncio.TimerHandle] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._sender = webhooks.sender_for(config)
        self._unserved_since: dict[str, float] = {}
        self._retired_to = self._expired_to = _FIRST
        self._leftovers = LeftoverWalk()
        self._batch_maintenance = BatchMaintenance(database)
        self._job_ingest = JobIngest(config, conninfo, database)
        self._job_ingest.on_room = partial(self.wake, "ingest")
        self._job_operations = JobOperations(config, database)
        self.worker_id: UUID | None = None
        """The server's registered identity, under which it reads the rows of jobs and does operations on them."""

    def wake(self, name: str) -> None:
        """Run this duty now: there is something to do for it."""
        self._duties[name].woken.set()

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._keep(duty), name=duty.name) for duty in self._duties.values()]
        for adapter in self.scans.scanned:
            if (changes := self.scans.changes(adapter.name)) is not None:
                self._tasks.append(asyncio.create_task(self._watch(adapter, changes), name=f"watch {adapter.name}"))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for timer in self._next_scans.values():
            timer.cancel()
        await cancel_and_wait(self._tasks)
        await self._job_ingest.close()

    async def _keep(self, duty: _Duty) -> None:
        backoff = Backoff(_FIRST_BACKOFF_S, _LAST_BACKOFF_S)
        while True:
            woken = duty.woken.is_set()
            duty.woken.clear()
            try:
                more = await self._round(duty, woken=woken)
            except (psycopg.Error, PoolTimeout, OSError) as error:
                _log.warning("%s: trying again: %s", duty.name, type(error).__name__)
            except Exception as error:
                # If the duty ended here, that would not be noticed until much later.
                _log.error("%s: failed: %s", duty.name, type(error).__name__)
            else:
                backoff.reset()
                await self._rest(duty, duty.rest_s if more else duty.every_s, early=not more)
                continue
            await backoff.wait()

    async def _round(self, duty: _Duty, *, woken: bool) -> bool:
        if duty.turn is not None and not (woken or duty.unfinished):
            async with borrowed(self._database) as connection:
                if not await take_turn(connection, duty.turn, duty.every_s):
                    return False
        # Not the turn: it is taken also where there is nothing to delete, and would use the room up.
        duty.unfinished = await (do_with_reserve(self._config.data_dir, duty.step) if duty.frees else duty.step())
        return duty.unfinished

    @staticmethod
    async def _rest(duty: _Duty, seconds: float, *, early: bool) -> None:
        if not early:
            await asyncio.sleep(seconds)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(jittered(seconds, 0.75)):
                await duty.woken.wait()

    # -- the duties

    async def _validate(self) -> bool:
        """Open or fail requested batches. A server without providers leaves them to the others."""
        if not len(self._providers):
            return False
        async with borrowed(self._database) as connection:
            waiting = await list_unvalidated(connection)
            for batch_id in waiting:
                try:
                    await validate_batch(connection, batch_id, self._providers.pool_of)
                except Exception as error:
                    # A batch that cannot be validated must not keep the younger ones waiting.
                    if connection.closed:
                        raise
                    _log.error("validate: batch %s: failed: %s", batch_id, type(error).__name__)
            if waiting:
                await notify(connection, WORK, "")
        return False

    async def _reroute(self) -> bool:
        """Move unfinished work of renamed or removed providers to the provider that serves its model now. Only after
        the grace: the old provider's workers may belong to another server that is just restarting."""
        if not len(self._providers):
            return False
        grace_s, more = self._config.liveness.heartbeat_grace_s, False
        async with borrowed(self._database) as connection:
            found = await list_unserved(connection, self._providers.pools, grace_s)
            since = {pool: self._unserved_since.get(pool, monotonic()) for pool in found}
            for pool in found.keys() - self._unserved_since.keys():
                self._warn_of(pool, found[pool])
            self._unserved_since = since
            for pool, models in found.items():
                for model in models:
                    new_pool = self._providers.pool_instead(pool, model)
                    if new_pool is None or monotonic() < since[pool] + grace_s:
                        continue
                    moved = await move_lanes(connection, pool, model, new_pool, grace_s)
                    if moved:
                        _log.warning("%s: the work for %s (%d lanes) is now with %s", pool, model, moved, new_pool)
                        await notify(connection, WORK, new_pool)
                    more |= moved >= MOVED_AT_ONCE
        return more

    def _warn_of(self, pool: str, models: list[str]) -> None:
        orphans = [model for model in models if self._providers.pool_instead(pool, model) is None]
        if orphans:
            remedy = f"configure a provider for {', '.join(orphans)}, or cancel what is left of them"
        else:
            remedy = (
                "it moves to the providers that serve its models now, unless a worker for it appears; rows of jobs "
                "stay until there is a provider of this name again"
            )
        _log.warning("%s has unfinished work and no provider or worker: %s", pool, remedy)

    async def _ingest(self) -> bool:
        """Store the rows of jobs."""
        return await self._job_ingest.step(self.worker_id) if self.worker_id is not None else False

    async def _operate(self) -> bool:
        """Run rows of jobs again."""
        return await self._job_operations.step(self.worker_id) if self.worker_id is not None else False

    async def scan(self, name: str, limit: int = TAKE_AT_ONCE) -> ScanReport | None:
        """Scan an adapter now; None if another server is scanning it."""
        if self.worker_id is None:
            raise AssertionError("a server that scans is registered")
        report = await self.scans.scan(name, self.worker_id, limit)
        if report is None:
            return None
        if report.taken:
            self.wake("ingest")
        again_s = 0.0 if report.more else report.settled_in_s
        if name in self._next_scans:
            self._next_scans.pop(name).cancel()
        if again_s is not None:
            loop = asyncio.get_running_loop()
            self._next_scans[name] = loop.call_later(again_s, self.wake, _scan_duty(name))
        return report

    async def _scan(self, name: str) -> bool:
        changed = name in self._changed
        self._changed.discard(name)
        if await self.scan(name) is None and changed:
            # The scan under way may have listed the files before they changed.
            self._changed.add(name)
            return True
        return False

    async def _watch(self, adapter: Adapter, changes: AsyncGenerator[None] | None) -> None:
        """Scan a folder when it changes. Where it cannot be watched, it is scanned every `scan_every_s`."""
        while changes is not None:
            try:
                async for _ in changes:
                    self._changed.add(adapter.name)
                    self.wake(_scan_duty(adapter.name))
            except (OSError, RuntimeError) as error:
                _log.warning("adapter %s: its folder cannot be watched now: %s", adapter.name, error)
            await asyncio.sleep(adapter.scan_every_s)
            changes = self.scans.changes(adapter.name)

    async def _end(self) -> bool:
        """Finish batches in time even where no worker is left to do it."""
        await self._batch_maintenance.round()
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
        """Delete sessions unused for `session_keep_s`, a page of them at a time."""
        async with borrowed(self._database) as connection:
            kept_s = self._config.sessions.session_keep_s
            place, retired = await erase.expire_sessions(connection, kept_s, self._retired_to, _RETIRE_AT_ONCE)
        self._retired_to = place or _FIRST
        if retired:
            self.wake("purge")
        return place is not None

    async def _expire_batches(self) -> bool:
        """Delete batches and jobs that ended longer than `keep_s` ago, a page of them at a time."""
        async with borrowed(self._database) as connection:
            kept_s = self._config.erase.keep_s
            place, expired = await erase.expire_batches(connection, kept_s, self._expired_to, _RETIRE_AT_ONCE)
        self._expired_to = place or _FIRST
        if expired:
            self.wake("purge")
        return place is not None

    async def _sweep(self) -> bool:
        """Remove leftovers of killed uploads, and keep room for deletions."""
        if self._config.database_url is None:
            await _in_thread(lambda: keep_reserve(self._config.data_dir, self._config.observe.min_free_bytes))
        grace_s = self._config.liveness.heartbeat_grace_s
        throttle_s = self._config.erase.purge_throttle_ms / 1000
        await _in_thread(lambda: sweep.sweep_leftovers(self._conninfo, grace_s=grace_s, throttle_s=throttle_s))
        return False

    async def _purge(self) -> bool:
        async with borrowed(self._database) as connection:
            return await purge.purge_step(connection, self._config.erase.purge_batch_size) > 0

    async def _deliver(self) -> bool:
        return await webhooks.deliver_due(self._database, self._config, sender=self._sender) > 0

    async def _announce(self) -> bool:
        """Make deliveries to sinks of answers given in sessions."""
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
        forgotten += await sinks.forget_old(self._database, self._config)
        limits = self._config.erase
        async with borrowed(self._database) as connection:
            forgotten += await audit.forget_old(connection, limits.audit_keep_s)
            return forgotten + await self._leftovers.step(connection, limits.purge_batch_size) > 0


def _scan_duty(adapter: str) -> str:
    return f"scan {adapter}"


async def _in_thread(call: Callable[[], object]) -> None:
    """Wait for a blocking call, in a daemon thread, which does not keep the process from ending."""
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
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(end, failure)

    threading.Thread(target=run, name="penstock-sweep", daemon=True).start()
    await ended

"""A worker: shifts, one after the other, until it is told to stop. The loop itself is in `shift`.

A worker that cannot check in for too long must assume that others have taken its work. It then cuts its calls short,
drops its results, and begins a new shift under a new identity.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable

import psycopg

from penstock.config import Config
from penstock.db.bell import WORK, Bell
from penstock.db.pool import Pool
from penstock.dispatch.pool import Dispatcher
from penstock.hand import Handing
from penstock.model import Halt, Item, Verdict
from penstock.settle.buffer import Answers, SettleBuffer
from penstock.shift import LostIdentityError, Shift

_log = logging.getLogger("penstock.worker")

_FIRST_BACKOFF_S = 0.1
_LAST_BACKOFF_S = 5.0


class Worker:
    """Works off one pool's lanes until stopped."""

    def __init__(
        self,
        config: Config,
        database: Pool,
        pool: str,
        dispatcher: Dispatcher,
        bell: Bell | None = None,
        on_answers: Callable[[Answers], None] | None = None,
    ) -> None:
        """With a bell, new work is begun at once; without, at the next poll. `on_answers` is called when answers of
        sessions that somebody waits for have been written, and rings for those who wait elsewhere."""
        self.halts: dict[str, Halt] = {}
        """Routes closed until a person acts, and why."""
        self.lost_identities = 0
        self._on_answers = on_answers
        self._config = config
        self._database = database
        self._pool = pool
        self._dispatcher = dispatcher
        self._bell = bell
        self._stopping = asyncio.Event()
        self._shift = self._next_shift()

    def _next_shift(self) -> Shift:
        stage = (self._config, self._database, self._pool, self._dispatcher)
        return Shift(*stage, self.halts, self._on_answers, self._is_told)

    def _is_told(self) -> bool:
        return self._bell is not None and self._bell.listening.is_set()

    async def run(self) -> None:
        """Work until `stop`. Raises when the database stays away for longer than it is worth waiting."""
        await self._dispatcher.start(self._receive)
        try:
            with self._bell.hears(WORK, self._wake) if self._bell else contextlib.nullcontext():
                await self._run_shifts()
        finally:
            await self._dispatcher.stop()

    async def _run_shifts(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                await self._shift.run()
            except LostIdentityError as error:
                self.lost_identities += 1
                _log.warning("worker %s is lost: %s; going on under a new identity", self._shift.id, error)
            except psycopg.OperationalError as error:
                # The first shift has to begin; later ones wait for the database as long as it takes.
                if not self.lost_identities:
                    raise
                _log.warning("no new identity yet: %s", error)
            else:
                return
            if await self._stopped_within(backoff_s * random.uniform(0.5, 1)):  # noqa: S311 -- jitter
                return
            backoff_s = min(2 * backoff_s, _LAST_BACKOFF_S)
            self._shift = self._next_shift()

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return False
        return True

    def _wake(self, pool: str) -> None:
        if pool in (self._pool, ""):
            self._shift.wake()

    def _receive(self, item: Item, verdict: Verdict) -> None:
        self._shift.receive(item, verdict)

    def stop(self) -> None:
        """Claim nothing more, let calls in flight end, then leave. A second call cuts them short."""
        self._stopping.set()
        self._shift.stop()

    def hand_in(self) -> Handing | None:
        """Before a statement that claims for this worker what it stores, if it can take anything."""
        return self._shift.hand_in()

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    @property
    def trouble(self) -> str:
        """What this worker struggles with right now, in a few words; empty if nothing."""
        return self._shift.buffer.trouble or self._shift.trouble

    @property
    def in_flight(self) -> int:
        """Calls that have begun and not ended."""
        return self._dispatcher.in_flight

    @property
    def buffer(self) -> SettleBuffer:
        return self._shift.buffer

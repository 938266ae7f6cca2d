"""Gates of a worker's routes: which must wait, which are halted, and which of that is not recorded yet."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from time import monotonic
from uuid import UUID

import msgspec
import psycopg

from penstock.claim import gates
from penstock.db.pool import Connection, Pool, borrowed
from penstock.dispatch.dispatcher import Dispatcher
from penstock.model import Again, Halt, batch_public_id
from penstock.observe.logs import RepeatedEvents, event, plain_code
from penstock.pools import is_session_pool, provider_in

_log = logging.getLogger("penstock.worker")

# A route that must wait longer than this gives its items back, so that other workers can claim them.
_KEEP_ITEMS_S = 10.0
# Retry-After arrives with every refused call; the database is told a few times a second at most.
_GATE_STEP_S = 0.25


class RouteGates:
    """Gates of one pool, as one worker sees and moves them."""

    def __init__(
        self, database: Pool, pool: str, dispatcher: Dispatcher, halts: dict[str, Halt], probe_s: float = 0.0
    ) -> None:
        """Halted routes are tried again every `probe_s`; 0 is never."""
        self._probe_s = probe_s
        self._database = database
        self._pool = pool
        self._dispatcher = dispatcher
        self._halts = halts
        self._recorded = set(halts)
        """Halted routes whose halt is in the database. Halts from before a worker registered anew count as recorded:
        at worst, one more call is refused."""
        self._unrecorded: set[str] = set()
        """Halted routes whose halt could not be written."""
        self._gated_until: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        said = "route %(route)s has to wait (%(count)d times): %(code)s"
        self._closed = RepeatedEvents(_log, logging.INFO, "gate_closed", said)

    def may_claim(self, route: str) -> bool:
        return route not in self._halts and self._gated_until.get(route, 0) <= monotonic()

    @property
    def closed(self) -> frozenset[str]:
        """Routes that may not be claimed now."""
        now = monotonic()
        return frozenset((*self._halts, *(route for route, until in self._gated_until.items() if until > now)))

    def hold(self, route: str, again: Again) -> bool:
        """Make the whole route wait. True if that is too long to keep its items here.

        Other workers are told by the gate in the database. If it cannot be written, each is refused itself.
        """
        self._dispatcher.hold(route, again.gate_s)
        until = monotonic() + again.gate_s
        if until <= self._gated_until.get(route, 0) + _GATE_STEP_S:
            return False
        self._gated_until[route] = until
        self._closed.note(route=route, code=plain_code(again.error_code), pool=self._pool)
        self._in_background(
            lambda connection: gates.close(
                connection, self._pool, route, again.gate_s, again.error_code, again.error_message
            )
        )
        return again.gate_s > _KEEP_ITEMS_S

    def halt(self, route: str, halt: Halt, batch_id: UUID | None = None) -> bool:
        """Close the route until a person acts. False if it was closed already. On a server that stops the work of every
        owner, so its operator is told whose request it was."""
        if route in self._halts:
            return False
        if batch_id is not None and provider_in(self._pool) is not None and not is_session_pool(self._pool):
            met_by = f"{halt.error_message} (in answer to {batch_public_id(batch_id)})"
            halt = msgspec.structs.replace(halt, error_message=met_by)
        self._halts[route] = halt
        # The upstream's message is not logged: it may quote the request. It is kept with the gate, for the operator.
        code = plain_code(halt.error_code)
        answered = "" if halt.status_code is None else f"HTTP {halt.status_code} "
        what = f"route {route} is halted: {answered}{code}"
        fields = event("gate_halted", route=route, pool=self._pool, code=code, status_code=halt.status_code)
        if (provider := provider_in(self._pool)) is not None:
            _log.error(
                "provider %s (%s): %s; once that is fixed: `penstock providers resume %s`"
                " or POST /v1/providers/%s/resume",
                *(provider, self._pool, what, provider, provider),
                extra=fields,
            )
        else:
            _log.error("%s", what, extra=fields)
        self._in_background(
            lambda connection: self._record(connection, route, halt), if_not=lambda: self._unrecorded.add(route)
        )
        return True

    async def refresh(self) -> None:
        """Open routes that a person has opened since, or that were halted long ago; record halts that could not be
        recorded before."""
        self._closed.flush()
        if not self._halts:
            return
        async with borrowed(self._database) as connection:
            for route in list(self._unrecorded):
                await self._record(connection, route, self._halts[route])
            if self._probe_s:
                await gates.open_to_probe(connection, self._pool, self._probe_s)
            # A halt that is being written right now may be missing from the list: that does not mean it was opened.
            recorded = frozenset(self._recorded)
            found = await gates.list_closed(connection, self._pool)
        for route in recorded.difference(gate.route for gate in found if gate.halted_at is not None):
            _log.warning("route %s is open again", route, extra=event("gate_reopened", route=route, pool=self._pool))
            self._recorded.discard(route)
            del self._halts[route]

    async def _record(self, connection: Connection, route: str, halt: Halt) -> None:
        await gates.halt(connection, self._pool, route, halt.error_code, halt.error_message)
        self._recorded.add(route)
        self._unrecorded.discard(route)

    def _in_background(
        self, write: Callable[[Connection], Awaitable[None]], *, if_not: Callable[[], None] = lambda: None
    ) -> None:
        """Write a gate; `if_not` is called if that fails."""

        async def run() -> None:
            try:
                async with borrowed(self._database) as connection:
                    await write(connection)
            except psycopg.Error:
                if_not()

        task = asyncio.create_task(run(), name="gate")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def tasks(self) -> set[asyncio.Task[None]]:
        """Gates that are being recorded."""
        return self._tasks

"""The heartbeat: from a thread and a connection of its own, so that neither a busy loop nor a full pool delays it."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from collections.abc import Callable
from time import monotonic
from uuid import UUID

import psycopg

from penstock.config import LivenessLimits
from penstock.db import sql
from penstock.db.pool import BACKEND_PID, KEEPALIVE, SERVER_KEEPALIVE, is_pooled

_log = logging.getLogger("penstock.heart")
_SQL = sql.load("penstock.claim", "claim.sql")

# Of the grace, the part a worker may use: the rest is for clocks that run at different rates, and for the time
# between this process noticing and its last call having ended.
_USABLE_GRACE = 0.8
_RETRY_S = 0.5


class Heart:
    """Checks a worker in, and says until when it may consider itself alive.

    The promise to the others is made on the database's clock: they wait the whole grace after the last check-in they
    see. This side counts from before it sent that check-in, and for less than the grace. So it has stopped before
    anybody takes its work, whatever the two clocks say.
    """

    def __init__(
        self, conninfo: str, worker_id: UUID, limits: LivenessLimits, *, on_beat: Callable[[], None] = lambda: None
    ) -> None:
        self.worker_id = worker_id
        self.draining = False
        self._place = (conninfo, limits)
        self._usable_s = limits.heartbeat_grace_s * _USABLE_GRACE
        self._on_beat = on_beat
        self.alive_until = monotonic() + self._usable_s
        """On the monotonic clock; pushed on by every check-in."""
        self.declared_dead = False
        """The others have removed this worker: its leases are gone or going."""

    def count_from_now(self) -> None:
        """The worker is about to be registered, which counts as its first check-in. What came before, such as waiting
        for a connection, does not."""
        self.alive_until = monotonic() + self._usable_s

    def start(self) -> None:
        """Begin. The worker has just been registered."""
        with _pulses_lock:
            pulse = _pulses.get(self._place)
            if pulse is None:
                pulse = _pulses[self._place] = _Pulse(*self._place)
            pulse.hearts[self.worker_id] = self

    def drain(self) -> None:
        """Say from now on that this worker is leaving."""
        self.draining = True

    def stop(self) -> None:
        with _pulses_lock:
            pulse = _pulses.get(self._place)
            if pulse is None or pulse.hearts.pop(self.worker_id, None) is None or pulse.hearts:
                return
            del _pulses[self._place]
            pulse.ended.set()

    @property
    def alive(self) -> bool:
        return not self.declared_dead and monotonic() < self.alive_until

    def checked_in(self, began: float, known: bool) -> None:
        """A check-in that was sent at this time has been answered."""
        if known:
            self.alive_until = began + self._usable_s
        else:
            self.declared_dead = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to hear it
            self._on_beat()


class _Pulse:
    """The thread and the connection by which all workers of this process check in at one database."""

    def __init__(self, conninfo: str, limits: LivenessLimits) -> None:
        self.hearts: dict[UUID, Heart] = {}
        self.ended = threading.Event()
        self._conninfo = conninfo
        self._limits = limits
        threading.Thread(target=self._run, name="penstock-heart", daemon=True).start()

    def _run(self) -> None:
        while not self.ended.is_set():
            try:
                with psycopg.connect(
                    self._conninfo,
                    autocommit=True,
                    prepare_threshold=None,
                    application_name="penstock heart",
                    connect_timeout=max(2, int(self._limits.heartbeat_interval_s)),
                    **KEEPALIVE,
                ) as connection:
                    if not is_pooled(connection, connection.execute(BACKEND_PID).fetchone()):
                        connection.execute("SELECT" + SERVER_KEEPALIVE)
                    self._beat_while(connection)
            except (psycopg.Error, OSError) as error:
                _log.warning("heartbeat failed, trying again: %s", error)
            self.ended.wait(_RETRY_S * random.uniform(0.5, 1))  # noqa: S311 -- jitter

    def _beat_while(self, connection: psycopg.Connection) -> None:
        while not self.ended.is_set():
            began = monotonic()
            with _pulses_lock:
                hearts = list(self.hearts.values())
            known = self._check_in(connection, hearts)
            for heart in hearts:
                heart.checked_in(began, heart.worker_id in known)
                if heart.declared_dead:
                    heart.stop()
            self.ended.wait(self._limits.heartbeat_interval_s * random.uniform(0.9, 1))  # noqa: S311 -- jitter

    def _check_in(self, connection: psycopg.Connection, hearts: list[Heart]) -> set[UUID]:
        timeout = f"{int(self._limits.heartbeat_interval_s * 1000)}ms"
        ids, draining = [heart.worker_id for heart in hearts], [heart.worker_id for heart in hearts if heart.draining]
        with connection.transaction():
            # A check-in that hangs is as good as none: end it in time to try another. For this transaction alone,
            # since behind a pooler the session is somebody else's the next moment.
            connection.execute("SELECT set_config('statement_timeout', %s, true)", [timeout])
            cursor = connection.execute(_SQL["heartbeat_if_known"], {"ids": ids, "draining": draining, "now": None})
            return {worker_id for (worker_id,) in cursor.fetchall()}


_pulses: dict[tuple[str, LivenessLimits], _Pulse] = {}
_pulses_lock = threading.Lock()

"""Heartbeats, from a thread and a connection of their own, so that neither a busy loop nor a full pool delays them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from time import monotonic
from uuid import UUID

import psycopg

from penstock.backoff import jittered
from penstock.config import LivenessLimits
from penstock.db import sql
from penstock.db.pool import BACKEND_PID, KEEPALIVE, SERVER_KEEPALIVE, is_pooled
from penstock.observe import catalogue

_log = logging.getLogger("penstock.heartbeat")
_SQL = sql.load("penstock.worker", "heartbeat.sql")

# A worker stops itself after this part of the grace. The rest is for clocks that run at different rates, and for the
# time until its last call has ended.
_USABLE_GRACE = 0.8
_RETRY_S = 0.5


class Heartbeat:
    """Checks a worker in, and says until when it may consider itself alive.

    Other workers judge by the database's clock (`reclaim_if_lost`): they wait the whole grace after its last check-in.
    This worker counts from before it sent that check-in, and for less than the grace. So it has stopped before another
    worker takes its leases, whatever the two clocks say.
    """

    def __init__(
        self, conninfo: str, worker_id: UUID, limits: LivenessLimits, *, on_beat: Callable[[], None] = lambda: None
    ) -> None:
        self.worker_id = worker_id
        self.draining = False
        self._thread_key = (conninfo, limits)
        self._usable_s = limits.heartbeat_grace_s * _USABLE_GRACE
        self._on_beat = on_beat
        self.alive_until = monotonic() + self._usable_s
        """On the monotonic clock; every check-in moves it."""
        self.declared_dead = False
        """Another worker has removed this one: its leases are being taken back."""

    def count_from_now(self) -> None:
        """Count the grace from now: the worker is about to be registered, which is its first check-in. The time before,
        such as the wait for a connection, does not count."""
        self.alive_until = monotonic() + self._usable_s

    def start(self) -> None:
        """Begin to check in. The worker has just been registered."""
        with _threads_lock:
            thread = _threads.get(self._thread_key)
            if thread is None:
                thread = _threads[self._thread_key] = _HeartbeatThread(*self._thread_key)
            thread.heartbeats[self.worker_id] = self

    def drain(self) -> None:
        """Check in as draining from now on."""
        self.draining = True

    def stop(self) -> None:
        with _threads_lock:
            thread = _threads.get(self._thread_key)
            if thread is None or thread.heartbeats.pop(self.worker_id, None) is None or thread.heartbeats:
                return
            del _threads[self._thread_key]
            thread.ended.set()

    @property
    def alive(self) -> bool:
        return not self.declared_dead and monotonic() < self.alive_until

    def note_check_in(self, began: float, known: bool) -> None:
        """Note the answer to a check-in that was sent at `began`: whether the database still knows the worker."""
        if known:
            self.alive_until = began + self._usable_s
        else:
            self.declared_dead = True
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._on_beat()


class _HeartbeatThread:
    """The thread and the connection by which all workers of this process check in at one database."""

    def __init__(self, conninfo: str, limits: LivenessLimits) -> None:
        self.heartbeats: dict[UUID, Heartbeat] = {}
        self.ended = threading.Event()
        self._conninfo = conninfo
        self._limits = limits
        threading.Thread(target=self._run, name="penstock-heartbeat", daemon=True).start()

    def _run(self) -> None:
        while not self.ended.is_set():
            try:
                with psycopg.connect(
                    self._conninfo,
                    autocommit=True,
                    prepare_threshold=None,
                    application_name="penstock heartbeat",
                    connect_timeout=max(2, int(self._limits.heartbeat_interval_s)),
                    **KEEPALIVE,
                ) as connection:
                    if not is_pooled(connection, connection.execute(BACKEND_PID).fetchone()):
                        connection.execute("SELECT" + SERVER_KEEPALIVE)
                    self._beat_until_ended(connection)
            except (psycopg.Error, OSError) as error:
                catalogue.HEARTBEAT_FAILURES.add()
                _log.warning("heartbeat failed, trying again: %s", error)
            self.ended.wait(jittered(_RETRY_S))

    def _beat_until_ended(self, connection: psycopg.Connection) -> None:
        while not self.ended.is_set():
            began = monotonic()
            with _threads_lock:
                heartbeats = list(self.heartbeats.values())
            known = self._check_in(connection, heartbeats)
            catalogue.HEARTBEAT_DURATION.observe((), monotonic() - began)
            for heartbeat in heartbeats:
                heartbeat.note_check_in(began, heartbeat.worker_id in known)
                if heartbeat.declared_dead:
                    heartbeat.stop()
            self.ended.wait(jittered(self._limits.heartbeat_interval_s, 0.9))

    def _check_in(self, connection: psycopg.Connection, heartbeats: list[Heartbeat]) -> set[UUID]:
        timeout = f"{int(self._limits.heartbeat_interval_s * 1000)}ms"
        ids = [heartbeat.worker_id for heartbeat in heartbeats]
        draining = [heartbeat.worker_id for heartbeat in heartbeats if heartbeat.draining]
        with connection.transaction():
            # A check-in that hangs is as good as none: end it in time to try another. The time limit is for this
            # transaction alone, since behind a pooler the session is another client's the next moment.
            connection.execute("SELECT set_config('statement_timeout', %s, true)", [timeout])
            cursor = connection.execute(_SQL["heartbeat_if_known"], {"ids": ids, "draining": draining, "now": None})
            return {worker_id for (worker_id,) in cursor.fetchall()}


_threads: dict[tuple[str, LivenessLimits], _HeartbeatThread] = {}
_threads_lock = threading.Lock()

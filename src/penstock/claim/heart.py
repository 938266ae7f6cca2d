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
        self._conninfo = conninfo
        self._worker_id = worker_id
        self._limits = limits
        self._on_beat = on_beat
        self._stopped = threading.Event()
        self._draining = False
        self._thread = threading.Thread(target=self._run, name="penstock-heart", daemon=True)
        self.alive_until = monotonic() + limits.heartbeat_grace_s * _USABLE_GRACE
        """On the monotonic clock; pushed on by every check-in."""
        self.declared_dead = False
        """The others have removed this worker: its leases are gone or going."""

    def count_from_now(self) -> None:
        """The worker is about to be registered, which counts as its first check-in. What came before, such as waiting
        for a connection, does not."""
        self.alive_until = monotonic() + self._limits.heartbeat_grace_s * _USABLE_GRACE

    def start(self) -> None:
        """Begin. The worker has just been registered."""
        self._thread.start()

    def drain(self) -> None:
        """Say from now on that this worker is leaving."""
        self._draining = True

    def stop(self) -> None:
        self._stopped.set()

    @property
    def alive(self) -> bool:
        return not self.declared_dead and monotonic() < self.alive_until

    def _run(self) -> None:
        while not self._stopped.is_set():
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
            if self.declared_dead:
                return
            self._stopped.wait(_RETRY_S * random.uniform(0.5, 1))  # noqa: S311 -- jitter

    def _beat_while(self, connection: psycopg.Connection) -> None:
        interval_s = self._limits.heartbeat_interval_s
        while True:
            began = monotonic()
            if not self._check_in(connection):
                self.declared_dead = True
                self._announce()
                return
            self.alive_until = began + self._limits.heartbeat_grace_s * _USABLE_GRACE
            self._announce()
            if self._stopped.wait(interval_s * random.uniform(0.9, 1)):  # noqa: S311 -- jitter
                return

    def _check_in(self, connection: psycopg.Connection) -> bool:
        timeout = f"{int(self._limits.heartbeat_interval_s * 1000)}ms"
        with connection.transaction():
            # A check-in that hangs is as good as none: end it in time to try another. For this transaction alone,
            # since behind a pooler the session is somebody else's the next moment.
            connection.execute("SELECT set_config('statement_timeout', %s, true)", [timeout])
            parameters = {"id": self._worker_id, "draining": self._draining, "now": None}
            return connection.execute(_SQL["heartbeat_if_known"], parameters).fetchone() is not None

    def _announce(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to hear it
            self._on_beat()

"""API on the database itself: the server's application in this process, for the one user of this machine.

No requests are worked off here. A server on the same database finds what a command changed, now or when it is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from uuid import UUID

from starlette.types import ASGIApp

from penstock.api.app import create_app, make_server
from penstock.batches.run_again import retry_batch
from penstock.batches.runs import is_run_pool
from penstock.batches.work import explain_idle, read_work
from penstock.client.api import Purged
from penstock.client.asgi import AsgiTransport
from penstock.client.disk import give_back_space
from penstock.config import Config
from penstock.db import sql
from penstock.db.pool import Pool, borrowed, open_pool
from penstock.db.start import explain_database_errors, migrate_database, start_database
from penstock.dispatch.providers import Providers
from penstock.model import new_id
from penstock.observe.logs import log_to
from penstock.server.background import BackgroundDuties
from penstock.worker.identity import register_identity

_SQL = sql.load("penstock.client", "local.sql")
NOT_SERVED = "Nothing works it off until a server runs on this data: penstock serve"
_OWNER = "local"
_RUN_AGAIN = "What was stored is safe: once the database works again, run the command again."


class LocalTransport(AsgiTransport):
    """Transport to the application on one database."""

    def __init__(self, application: ASGIApp, place: str, database: Pool, config: Config) -> None:
        super().__init__(application, place)
        self._database = database
        self._config = config
        self._grace_s = config.liveness.heartbeat_grace_s

    async def is_served(self) -> bool:
        """Whether a server or one of its workers is alive on this database."""
        async with borrowed(self._database) as connection:
            cursor = await connection.execute(_SQL["is_any_server_alive"], {"grace_s": self._grace_s})
            return await cursor.fetchone() == (True,)

    async def say_idle(self, name: str) -> str | None:
        """What is to be done so that the batch or job of this id is worked off; None if it is."""
        async with borrowed(self._database) as connection:
            found = await read_work(connection, [_uuid(name)], None)
            if found and is_run_pool(found[0].pool):
                return await explain_idle(connection, found[0], self._grace_s)
        return None if await self.is_served() else NOT_SERVED

    async def retry_run(self, name: str) -> int | None:
        """Let the failed rows of a run over a table be called again by its command. Returns how many."""
        async with borrowed(self._database) as connection:
            retried = await retry_batch(connection, _uuid(name), _OWNER, limits=self._config.retry)
        return retried.requests

    async def purge(self) -> Purged | None:
        """Remove the rows of what was deleted, and give their space back."""
        return await give_back_space(self._database, self._config)


def _uuid(name: str) -> UUID:
    return UUID(name.rpartition("_")[2])


@contextlib.asynccontextmanager
async def open_local_transport(config: Config, *, uploads: bool) -> AsyncIterator[LocalTransport]:
    """Open the application on the configured database; an embedded one is started if needed."""
    with contextlib.ExitStack() as held, explain_database_errors(_RUN_AGAIN):
        conninfo = await asyncio.to_thread(held.enter_context, start_database(config))
        await asyncio.to_thread(migrate_database, conninfo)
        place = "the database" if config.database_url is not None else str(config.data_dir)
        async with (
            await open_pool(conninfo, config.database, name="penstock client") as database,
            # An upload that a command leaves half-done can be swept, by its identity.
            register_identity(database, "intake", config.liveness)
            if uploads
            else contextlib.nullcontext(new_id()) as worker_id,
        ):
            # Duties that are never started: validating and purging are left to servers, which know the models.
            background = BackgroundDuties(config, conninfo, database, Providers(()))
            known = Providers(config.providers)
            server = make_server(config, conninfo, database, known, worker_id, background)
            try:
                yield LocalTransport(create_app(server, in_process=True), place, database, config)
            finally:
                await server.close()


def log_into_data(config: Config) -> None:
    """Send the application's log to a file, or nowhere: a command's output is for its results."""
    handler: logging.Handler = logging.NullHandler()
    if config.database_url is None:
        with contextlib.suppress(OSError):
            handler = logging.FileHandler(config.data_dir / "penstock.log", delay=True)
    log_to(handler, logging.WARNING, config.observe.log_format)

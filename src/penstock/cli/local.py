"""The API over the data itself: the server's application in this process, for the one user of this machine.

Nothing is worked off here. What a command changes, a server on the same database finds, now or when it is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID

import psycopg

from penstock.api.app import create_app, make_server
from penstock.caretaker import Caretaker
from penstock.claim import liveness
from penstock.claim.heart import Heart
from penstock.cli.asgi import Application, AsgiTransport
from penstock.cli.database import migrated, reached
from penstock.config import Config
from penstock.db import sql
from penstock.db.pool import Pool, borrowed, open_pool
from penstock.errors import PenstockError
from penstock.model import new_id
from penstock.providers import Providers

_SQL = sql.load("penstock.cli", "local.sql")


class LocalTransport(AsgiTransport):
    """Calls the application over one database."""

    def __init__(self, application: Application, place: str, database: Pool, grace_s: float) -> None:
        super().__init__(application, place)
        self._database = database
        self._grace_s = grace_s

    async def is_served(self) -> bool:
        """Whether somebody works off what is stored here."""
        async with borrowed(self._database) as connection:
            cursor = await connection.execute(_SQL["is_any_server_alive"], {"grace_s": self._grace_s})
            return await cursor.fetchone() == (True,)


@contextlib.asynccontextmanager
async def local_transport(config: Config, *, uploads: bool) -> AsyncIterator[LocalTransport]:
    """The application over the configured database; an embedded one is started if need be."""
    _log_into(config.data_dir if config.database_url is None else None)
    with contextlib.ExitStack() as held:
        conninfo = await asyncio.to_thread(held.enter_context, reached(config))
        await asyncio.to_thread(migrated, conninfo)
        database = await open_pool(conninfo, config.database, name="penstock client")
        try:
            place = "the database" if config.database_url is not None else str(config.data_dir)
            grace_s = config.liveness.heartbeat_grace_s
            async with _identity(conninfo, database, config, needed=uploads) as worker_id:
                # A caretaker that is never begun: checking and purging are left to servers, who know the models.
                caretaker = Caretaker(config, conninfo, database, Providers(()))
                known = Providers(config.providers)
                server = make_server(config, conninfo, database, known, worker_id, caretaker)
                try:
                    yield LocalTransport(create_app(server, in_process=True), place, database, grace_s)
                finally:
                    await server.close()
        except psycopg.Error as error:
            raise PenstockError(
                f"the database failed: {str(error).strip().splitlines()[0]}",
                hint="What was stored is safe: once the database works again, run the command again.",
            ) from error
        finally:
            await database.close()


@contextlib.asynccontextmanager
async def _identity(conninfo: str, database: Pool, config: Config, *, needed: bool) -> AsyncIterator[UUID]:
    """A registered, beating identity for a command that uploads: what it leaves half-done can be swept."""
    worker_id = new_id()
    if not needed:
        yield worker_id
        return
    async with borrowed(database) as connection:
        await liveness.register(connection, worker_id, "intake")
    heart = Heart(conninfo, worker_id, config.liveness)
    heart.start()
    try:
        yield worker_id
    finally:
        heart.stop()
        with contextlib.suppress(psycopg.Error):
            async with borrowed(database) as connection:
                await liveness.unregister(connection, worker_id)


def _log_into(data_dir: Path | None) -> None:
    """The application's log goes to a file, if to anywhere: a command's output is for its results."""
    handler: logging.Handler = logging.NullHandler()
    if data_dir is not None:
        with contextlib.suppress(OSError):
            handler = logging.FileHandler(data_dir / "penstock.log", delay=True)
    logging.raiseExceptions = False
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)

"""The console beside a run: served from the run's process, on this machine alone, for as long as the run lasts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from penstock.api.app import create_app, make_server
from penstock.config import Config
from penstock.db.pool import open_pool
from penstock.dispatch.providers import Providers
from penstock.model import new_id
from penstock.server.background import BackgroundDuties
from penstock.server.listener import Listener, bind

_HOST = "127.0.0.1"
_ANY_PORT = 0


@contextlib.asynccontextmanager
async def serve_console(config: Config, conninfo: str) -> AsyncIterator[str]:
    """Serve the console on a free loopback port; gives its address. Nothing is worked off for its callers."""
    (sock, *_) = bind(_HOST, _ANY_PORT, keyless=True)
    async with await open_pool(conninfo, config.database, name="penstock console") as database:
        # Duties that are never started: they are a server's.
        background = BackgroundDuties(config, conninfo, database, Providers(()))
        server = make_server(config, conninfo, database, Providers(config.providers), new_id(), background)
        listener = Listener(create_app(server), config)
        listening = asyncio.create_task(listener.serve([sock]), name="console")
        try:
            await listener.listening.wait()
            yield f"http://{_HOST}:{sock.getsockname()[1]}/console/"
        finally:
            server.stop()
            listener.should_exit = listener.force_exit = True
            await listening
            await server.close()

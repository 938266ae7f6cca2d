"""A server from its start to its end: API in this process, workers in others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import click
import uvloop
from psycopg.conninfo import conninfo_to_dict

from penstock import __version__
from penstock.api.app import create_app, open_server
from penstock.api.endpoint import Server
from penstock.api.keys import any_key
from penstock.api.listen import Listener, bind
from penstock.claim import gates
from penstock.cli.database import migrated, reached
from penstock.cli.fleet import Staff
from penstock.cli.logs import log_to_stderr
from penstock.config import Config
from penstock.db.pool import Pool, borrowed, open_pool
from penstock.desk import Desk
from penstock.errors import ExitCode
from penstock.providers import Provider, Providers

# Signals it takes until we leave without looking back.
_PATIENCE = 3


@dataclass(frozen=True, slots=True)
class ServePlan:
    """What a `serve` was asked to do."""

    config: Config
    providers: tuple[Provider, ...]
    host: str
    port: int
    workers: int
    trust_prefix: bool
    verbose: bool


def serve(plan: ServePlan) -> None:
    """Serve until a signal."""
    log_to_stderr(verbose=plan.verbose)
    _raise_file_limit()
    with reached(plan.config) as conninfo:
        migrated(conninfo)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(plan, conninfo))


def work(config: Config, providers: tuple[Provider, ...], workers: int, *, verbose: bool) -> None:
    """Run workers alone until a signal."""
    log_to_stderr(verbose=verbose)
    with reached(config) as conninfo:
        migrated(conninfo)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_work(config, providers, workers, conninfo, verbose=verbose))


async def _serve(plan: ServePlan, conninfo: str) -> None:
    providers = Providers(plan.providers)
    async with open_server(plan.config, conninfo, providers) as server:
        async with borrowed(server.database) as connection:
            keyless = not await any_key(connection)
        sockets = bind(plan.host, plan.port, keyless=keyless)
        await _reopen(server.database, plan.config, plan.providers)
        listener = Listener(create_app(server, trust_prefix=plan.trust_prefix), plan.config)
        staff = Staff(plan.config, plan.providers, plan.workers, verbose=plan.verbose, desk=True)
        # With --workers 0 this server answers only; sessions are then worked off by others too.
        desk = Desk(plan.config, conninfo, plan.providers if plan.workers else (), server.waiters.bell)
        with _stopped_by_signals(_Stop(listener, server, staff, desk)):
            listening = asyncio.create_task(listener.serve(sockets), name="http")
            server.sit_at(desk)
            async with desk, staff:
                await listener.listening.wait()
                _announce(plan, conninfo, sockets, keyless=keyless)
                await listening
        click.echo("stopped")


async def _work(config: Config, providers: tuple[Provider, ...], workers: int, conninfo: str, *, verbose: bool) -> None:
    async with _pool(config, conninfo) as database:
        await _reopen(database, config, providers)
    staff = Staff(config, providers, workers, verbose=verbose)
    stop = _Stop(None, None, staff, None)
    with _stopped_by_signals(stop):
        async with staff:
            click.echo(f"penstock worker {__version__}")
            _show("database", _database(config, conninfo))
            _show_providers(providers)
            _show("processes", str(workers))
            _show("stop", "Ctrl-C; calls in flight finish first")
            await stop.asked.wait()
    click.echo("stopped")


@contextlib.asynccontextmanager
async def _pool(config: Config, conninfo: str) -> AsyncIterator[Pool]:
    database = await open_pool(conninfo, config.database)
    try:
        yield database
    finally:
        await database.close()


async def _reopen(database: Pool, config: Config, providers: tuple[Provider, ...]) -> None:
    """Whoever starts a server says that what halted its providers is mended."""
    async with borrowed(database) as connection:
        for provider in providers:
            for pool in (provider.pool, provider.session_pool):
                await gates.reopen(connection, pool, wait_max_s=config.retry.retry_after_max_s)


class _Stop:
    """What signals do: the first lets everything under way end, the second cuts it short."""

    def __init__(self, listener: Listener | None, server: Server | None, staff: Staff, desk: Desk | None) -> None:
        self._desk = desk
        self.asked = asyncio.Event()
        self._listener = listener
        self._server = server
        self._staff = staff
        self._signals = 0

    def __call__(self) -> None:
        self._signals += 1
        if self._signals >= _PATIENCE:
            os._exit(ExitCode.INTERRUPTED)
        self.asked.set()
        if self._server is not None:
            self._server.stop()
        if self._listener is not None:
            self._listener.should_exit = True
        if self._signals == 1:
            click.echo("stopping: what is under way finishes first (again to cut it short)", err=True)
            self._staff.stop()
            if self._desk is not None:
                self._desk.stop()
            return
        click.echo("stopping now", err=True)
        if self._listener is not None:
            self._listener.force_exit = True
        self._staff.abort()
        if self._desk is not None:
            self._desk.abort()


@contextlib.contextmanager
def _stopped_by_signals(stop: _Stop) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


# -- what is said at the start


def _announce(plan: ServePlan, conninfo: str, sockets: list[socket.socket], *, keyless: bool) -> None:
    click.echo(f"penstock serve {__version__}")
    root = plan.config.root_path
    for sock in sockets:
        host, port = sock.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        _show("address", f"http://{shown}:{port}{root}/v1")
    if plan.config.public_url:
        _show("public", plan.config.public_url)
    _show("database", _database(plan.config, conninfo))
    _show_providers(plan.providers)
    _show("keys", "none: one user, this machine only" if keyless else "required")
    _show("workers", str(plan.workers))
    _show("stop", "Ctrl-C; what is under way finishes first")


def _show(name: str, value: str) -> None:
    # Seen at once also where the output is a file or a pipe.
    click.echo(f"  {name:<10}{value}")


def _show_providers(providers: tuple[Provider, ...]) -> None:
    for provider in providers:
        _show("provider", f"{provider.name}  {provider.base_url}  {' '.join(provider.models)}")


def _database(config: Config, conninfo: str) -> str:
    if config.database_url is None:
        return f"embedded, in {config.data_dir}"
    parts = conninfo_to_dict(conninfo)
    return f"{parts.get('dbname', '')} at {parts.get('host', 'local socket')}:{parts.get('port', 5432)}"


def _raise_file_limit() -> None:
    """A connection is a file: as many as the system lets us."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

"""Server from its start to its end: API in this process, workers in others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

import click
import uvloop
from psycopg.conninfo import conninfo_to_dict

from penstock import __version__
from penstock.api.app import create_app, open_server
from penstock.api.endpoint import Server
from penstock.api.keys import has_any_key
from penstock.claim import gates
from penstock.config import Config
from penstock.db.pool import Pool, borrowed, open_pool
from penstock.db.start import explain_database_errors, migrate_database, start_database
from penstock.deliver.sealing import check_sealing_keys
from penstock.dispatch.providers import Provider, Providers
from penstock.errors import ExitCode
from penstock.observe.catalogue import name_models
from penstock.observe.logs import log_to_stderr
from penstock.observe.metrics import ProcessMetrics
from penstock.observe.traces import start_traces
from penstock.server.connections import count_clients, raise_descriptor_limit
from penstock.server.listener import Listener, bind
from penstock.server.metrics_page import MetricsPage
from penstock.server.session_workers import SessionWorkers
from penstock.tasks import handle_signals
from penstock.worker.processes import ServerWorkers

_log = logging.getLogger("penstock.serve")

# The signal at which the process exits without cleaning up.
_EXIT_SIGNAL = 3
_SWITCH_S = 0.0005
"""How long a thread that reads an upload may keep the interpreter from the event loop, which wants it many times in a
request. With Python's 5 ms, an upload that is being read makes a session's call several times as long."""
_START_AGAIN = "What was stored is safe: once the database works again, start this again."


@dataclass(frozen=True, slots=True)
class ServePlan:
    """Options of one `penstock serve`."""

    config: Config
    providers: tuple[Provider, ...]
    host: str
    port: int
    workers: int
    trust_prefix: bool
    log_level: int


def serve(plan: ServePlan) -> None:
    """Serve until a signal."""
    log_to_stderr(plan.log_level, plan.config.observe.log_format)
    start_traces("penstock serve")
    check_sealing_keys(plan.config)
    sys.setswitchinterval(_SWITCH_S)
    max_clients = count_clients(plan.config, raise_descriptor_limit())
    with start_database(plan.config) as conninfo, explain_database_errors(_START_AGAIN):
        migrate_database(conninfo)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(plan, conninfo, max_clients))


@dataclass(frozen=True, slots=True)
class WorkPlan:
    """Options of one `penstock worker`."""

    config: Config
    providers: tuple[Provider, ...]
    workers: int
    metrics_host: str
    metrics_port: int | None
    log_level: int


def work(plan: WorkPlan) -> None:
    """Run workers alone until a signal."""
    log_to_stderr(plan.log_level, plan.config.observe.log_format)
    with start_database(plan.config) as conninfo, explain_database_errors(_START_AGAIN):
        migrate_database(conninfo)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_work(plan, conninfo))


async def _serve(plan: ServePlan, conninfo: str, max_clients: int) -> None:
    providers = Providers(plan.providers)
    _name_models(plan.config, providers)
    async with open_server(plan.config, conninfo, providers) as server:
        async with borrowed(server.database) as connection:
            keyless = not await has_any_key(connection)
        sockets = bind(plan.host, plan.port, keyless=keyless)
        await _reopen(server.database, plan.config, plan.providers)
        app = create_app(server, trust_prefix=plan.trust_prefix)
        listener = Listener(app, plan.config, max_clients=max_clients, memory=server.memory)
        stage = (plan.config, plan.providers, plan.workers)
        processes = ServerWorkers(*stage, log_level=plan.log_level, metrics=server.metrics)
        server.kickoffs.has_worker_processes = plan.workers > 0
        # With --workers 0 this server only answers the API; other processes then work for sessions too.
        served = plan.providers if plan.workers else ()
        sessions = SessionWorkers(plan.config, conninfo, served, server.waiters.notices, server.limits)
        with handle_signals(_Stop(processes, sessions, server, listener)):
            listening = asyncio.create_task(listener.serve(sockets), name="http")
            server.start_sessions_with(sessions)
            async with sessions, processes:
                await listener.listening.wait()
                _announce(plan, conninfo, sockets, keyless=keyless)
                _say_if_few(plan.config, max_clients)
                await listening
        click.echo("stopped")


async def _work(plan: WorkPlan, conninfo: str) -> None:
    config, providers, metrics = plan.config, plan.providers, ProcessMetrics()
    _name_models(config, Providers(providers))
    async with await open_pool(conninfo, config.database) as database:
        await _reopen(database, config, providers)
    processes = ServerWorkers(config, providers, plan.workers, log_level=plan.log_level, metrics=metrics)
    stop = _Stop(processes)
    with handle_signals(stop):
        async with _metrics_listener(plan, metrics) as addresses, processes:
            click.echo(f"penstock worker {__version__}")
            _show("database", _database(config, conninfo))
            _show_providers(providers)
            _show_processors(plan.config)
            _show("processes", str(plan.workers))
            for address in addresses:
                _show("metrics", f"http://{address}/metrics")
            _show("stop", "Ctrl-C; calls in flight finish first")
            await stop.asked.wait()
    click.echo("stopped")


@contextlib.asynccontextmanager
async def _metrics_listener(plan: WorkPlan, metrics: ProcessMetrics) -> AsyncIterator[list[str]]:
    """Serve the metrics for as long as the context lasts, if a port was given; gives the addresses."""
    if plan.metrics_port is None:
        yield []
        return
    # The page says nothing that needs a key: docs/observe.md.
    sockets = bind(plan.metrics_host, plan.metrics_port, keyless=False)
    listener = Listener(MetricsPage(metrics), plan.config)
    listening = asyncio.create_task(listener.serve(sockets), name="metrics")
    try:
        await listener.listening.wait()
        yield [_address(sock) for sock in sockets]
    finally:
        listener.should_exit = listener.force_exit = True
        await listening


def _name_models(config: Config, providers: Providers) -> None:
    names = [*(model for model, _ in providers.models), *(one.name for one in config.processors)]
    name_models(names, config.metrics.metrics_max_models)


async def _reopen(database: Pool, config: Config, providers: tuple[Provider, ...]) -> None:
    """Open the halted routes of the providers: to start a server is to say that the reason is gone."""
    async with borrowed(database) as connection:
        for provider in providers:
            for pool in (provider.pool, provider.session_pool):
                await gates.reopen(connection, pool, wait_max_s=config.retry.retry_after_max_s)


class _Stop:
    """Signal handler: the first signal lets calls in flight finish, the second cuts them short."""

    def __init__(
        self,
        processes: ServerWorkers,
        sessions: SessionWorkers | None = None,
        server: Server | None = None,
        listener: Listener | None = None,
    ) -> None:
        self._processes = processes
        self._sessions = sessions
        self._server = server
        self._listener = listener
        self._signals = 0
        self.asked = asyncio.Event()

    def __call__(self) -> None:
        self._signals += 1
        if self._signals >= _EXIT_SIGNAL:
            os._exit(ExitCode.INTERRUPTED)
        self.asked.set()
        if self._server is not None:
            self._server.stop()
        if self._listener is not None:
            self._listener.should_exit = True
        if self._signals == 1:
            click.echo("stopping: what is under way finishes first (again to cut it short)", err=True)
            self._processes.stop()
            if self._sessions is not None:
                self._sessions.stop()
            return
        click.echo("stopping now", err=True)
        if self._listener is not None:
            self._listener.force_exit = True
        self._processes.abort()
        if self._sessions is not None:
            self._sessions.abort()


# -- start-up messages


def _announce(plan: ServePlan, conninfo: str, sockets: list[socket.socket], *, keyless: bool) -> None:
    click.echo(f"penstock serve {__version__}")
    root = plan.config.root_path
    for sock in sockets:
        _show("address", f"http://{_address(sock)}{root}/v1")
    if plan.config.public_url:
        _show("public", plan.config.public_url)
    _show("console", f"{plan.config.public_url or f'http://{_address(sockets[0])}{root}'}/console/")
    _show("database", _database(plan.config, conninfo))
    _show_providers(plan.providers)
    _show_processors(plan.config)
    for adapter in plan.config.adapters:
        _show("adapter", f"{adapter.name}  {adapter.place}  for {adapter.owner}")
    _show("keys", "none: one user, this machine only" if keyless else "required")
    _show("workers", str(plan.workers))
    _show("stop", "Ctrl-C; what is under way finishes first")


def _address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _show(name: str, value: str) -> None:
    # click.echo flushes: the line is seen at once also where the output is a file or a pipe.
    click.echo(f"  {name:<10}{value}")


def _show_providers(providers: tuple[Provider, ...]) -> None:
    for provider in providers:
        _show("provider", f"{provider.name}  {provider.base_url}  {' '.join(provider.models)}")


def _show_processors(config: Config) -> None:
    for processor in config.processors:
        _show("processor", f"{processor.name}  {processor.function}")


def _database(config: Config, conninfo: str) -> str:
    if config.database_url is None:
        return f"embedded, in {config.data_dir}"
    parts = conninfo_to_dict(conninfo)
    return f"{parts.get('dbname', '')} at {parts.get('host', 'local socket')}:{parts.get('port', 5432)}"


def _say_if_few(config: Config, max_clients: int) -> None:
    if max_clients < config.serve.max_connections:
        _log.warning(
            "the limit on open files leaves room for %d clients; max_connections is %d: raise the limit (ulimit -n)",
            max_clients,
            config.serve.max_connections,
        )

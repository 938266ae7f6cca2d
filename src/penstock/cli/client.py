"""Client commands' common part: the options that name a server or a database, running a command, and its exit code."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.options import DatabaseOptions, database_options, load_config
from penstock.errors import ExitCode, PenstockError, UsageError, report

if TYPE_CHECKING:
    from penstock.client.api import Api
    from penstock.config import Config

Json = dict[str, Any]
_Command = Callable[..., Any]
_Work = Callable[..., Coroutine[Any, Any, ExitCode | None]]


@dataclass(frozen=True, slots=True)
class CommandContext:
    """Context of one command: its API and how it prints."""

    api: Api
    as_json: bool
    place: tuple[str, ...] = ()
    """Options that name the server or the database, as they were typed."""

    def command(self, *words: str) -> str:
        """Another command at the same place, as it can be pasted."""
        import shlex

        return shlex.join(["penstock", *words, *self.place])

    def say(self, text: str) -> None:
        """Print a line for a person, on standard error; with --json nothing."""
        if not self.as_json:
            click.echo(text, err=True)

    async def say_idle(self, name: str) -> None:
        """Say what is to be done so that a batch or job is worked off, if nothing works it off now."""
        if not self.as_json and (idle := await self.api.say_idle(name)) is not None:
            self.say(idle)


@dataclass(frozen=True, slots=True)
class ApiPlace:
    """ApiPlace of batches, jobs and sessions: a server, or the database this configuration names."""

    server: str | None
    config: Config | None
    makes_database: bool
    """Whether the command may make the local database; others only use one that is there."""
    words: tuple[str, ...] = ()
    """Options that name it, as they were typed."""


def client_command(
    *, makes_database: bool = False, hints: Mapping[int, str] | None = None
) -> Callable[[_Work], _Command]:
    """Make a command of an async function: give it a context, and --server, --json and the database's options.

    `hints` say what to do about a server's refusals, by their status, where these are not about batches.
    """

    def decorate(work: _Work) -> _Command:
        @functools.wraps(work)
        def call(server: str | None, as_json: bool, database: DatabaseOptions, **given: Any) -> None:
            try:
                place = _place(server, database, makes_database=makes_database)
                code = _carry_out(place, as_json, lambda context: work(context, **given))
            except PenstockError as error:
                from penstock.client.api import Refused

                if isinstance(error, Refused) and hints is not None and not error.local:
                    error.hint = hints.get(error.status, error.hint)
                report(error, as_json=as_json)
                code = error.exit_code
            raise SystemExit(code)

        where = click.option(
            "--server", metavar="URL", help="Server to talk to, or PENSTOCK_SERVER.  [default: the local data]"
        )
        json = click.option("--json", "as_json", is_flag=True, help="Answer as JSON; no progress display.")
        return where(json(database_options(call)))

    return decorate


def _place(server: str | None, database: DatabaseOptions, *, makes_database: bool) -> ApiPlace:
    import os

    named = database.database_url is not None or database.data_dir is not None
    if server is not None and named:
        raise UsageError(
            "--server and a database at once",
            hint="--server calls a running server; --database-url or --data-dir reads the database itself. Give one.",
        )
    given = server is not None
    if server is None and not named:
        server = os.environ.get("PENSTOCK_SERVER", "").strip() or None
    if server is not None:
        return ApiPlace(server, None, makes_database, ("--server", server) if given else ())
    return ApiPlace(None, load_config(database), makes_database, database.as_words())


def _carry_out(
    place: ApiPlace, as_json: bool, work: Callable[[CommandContext], Coroutine[Any, Any, ExitCode | None]]
) -> int:
    import asyncio
    import os
    import signal

    import uvloop

    from penstock.tasks import cancel_and_wait

    async def run() -> int:
        signalled = 0
        task: asyncio.Task[ExitCode | None] | None = None
        ending: asyncio.Task[None] | None = None

        def on_signal() -> None:
            nonlocal signalled, ending
            signalled += 1
            if signalled > 1:
                os._exit(ExitCode.INTERRUPTED)
            if task is not None:
                # Until it has ended: see there for how a first cancellation can be lost.
                ending = loop.create_task(cancel_and_wait([task]))

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
        # Opening is not cancelled: a pool cut off half-opened may never close.
        async with _open_api(place) as api:
            if not signalled:
                task = loop.create_task(work(CommandContext(api, as_json, place.words)))
                try:
                    return await task or ExitCode.OK
                except asyncio.CancelledError:
                    if not signalled:
                        raise
        click.echo("penstock: interrupted", err=True)
        return ExitCode.INTERRUPTED

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


@contextlib.asynccontextmanager
async def _open_api(place: ApiPlace) -> AsyncIterator[Api]:
    """Open the API of a server or of a database, for as long as a command runs."""
    from penstock.client.api import Api

    if place.server is not None:
        from penstock.client.remote import HttpTransport

        async with HttpTransport.of(place.server) as remote:
            yield Api(remote)
    elif place.config is not None:
        config = place.config
        if config.database_url is None and not place.makes_database and not (config.data_dir / "pg").is_dir():
            raise PenstockError(
                f"{config.data_dir} holds no data yet",
                hint="`penstock run FILE` makes some here. Data elsewhere: --data-dir PATH; a server's: --server URL.",
            )
        from penstock.client.local import log_into_data, open_local_transport

        log_into_data(config)
        async with open_local_transport(config, uploads=place.makes_database) as local:
            yield Api(local)
    else:
        raise UsageError("neither a server nor a database is named", hint="Give --server URL or --data-dir PATH.")


def print_json(value: Any) -> None:
    """Print one line of JSON on standard output."""
    import json

    click.echo(json.dumps(value))

"""`penstock`: the program. Commands are imported when they run, so that `--help` costs next to nothing."""

from __future__ import annotations

import errno
import os
import sys
from importlib import import_module
from typing import Any

import click

from penstock import __version__
from penstock.errors import ExitCode, PenstockError, report

# name -> (module:attribute, short help)
_COMMANDS = {
    "run": ("penstock.cli.run:run", "Work off a file of requests or rows, write every answer."),
    "submit": ("penstock.cli.submit:submit", "Send a file of requests to be worked off."),
    "ls": ("penstock.cli.ls:ls", "List batches and jobs, newest first."),
    "show": ("penstock.cli.show:show", "Show one batch or job: figures, times, problems."),
    "watch": ("penstock.cli.watch:watch", "Follow a batch or job until it ends."),
    "pause": ("penstock.cli.steer:pause", "Start no more requests of a batch."),
    "resume": ("penstock.cli.steer:resume", "Go on with a paused batch."),
    "cancel": ("penstock.cli.steer:cancel", "End a batch; what is done is kept."),
    "retry": ("penstock.cli.steer:retry", "Run a batch's failed requests again."),
    "export": ("penstock.cli.export:export", "Write the results of a batch, or a job's sheet."),
    "rm": ("penstock.cli.rm:rm", "Erase batches or jobs, and give their space back."),
    "prune": ("penstock.cli.rm:prune", "Erase what ended long ago, and give its space back."),
    "jobs": ("penstock.cli.jobs:jobs", "Do something with every row of a table, on a server."),
    "session": ("penstock.cli.session:session", "Send to sessions, and look at them."),
    "serve": ("penstock.cli.serve:serve", "Serve the batch API, with workers."),
    "worker": ("penstock.cli.worker:worker", "Run workers for a server elsewhere."),
    "keys": ("penstock.cli.keys:keys", "Create, list and revoke API keys."),
    "providers": ("penstock.cli.providers:providers", "List providers, and let halted ones go on."),
    "db": ("penstock.cli.database:db", "Migrate or inspect the database, share out its work."),
    "import": ("penstock.cli.import_:import_command", "Move in from a database with a row per request, or back."),
    "doctor": ("penstock.cli.doctor:doctor", "Examine an installation: what is wrong, and what to do."),
    "mock": ("penstock.cli.mock:mock", "Serve a fake OpenAI-compatible upstream."),
    "completion": ("penstock.cli.completion:completion", "Print the script for completion in a shell."),
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 -- click's signature
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        module, attribute = _COMMANDS[cmd_name][0].split(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_, about) in _COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("penstock: interrupted", err=True)
            sys.exit(ExitCode.INTERRUPTED)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except PenstockError as error:
            report(error)
            sys.exit(error.exit_code)
        except OSError as error:
            if error.errno not in _DISK_FULL:
                raise
            _report_full_disk(error)
            sys.exit(ExitCode.OPERATIONAL)


_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _report_full_disk(error: OSError) -> None:
    """Say that what standard output, or a file, leads to is full."""
    # What is buffered for standard output would fail once more when the program ends.
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 -- no path, a device
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    where = f" {error.filename}" if error.filename else ""
    report(
        PenstockError(
            f"cannot write{where}: {error.strerror}",
            hint="What is stored is safe: free some space or write elsewhere, then run the command again.",
        )
    )


@click.group(
    cls=_LazyGroup,
    epilog="Exit codes: 0 all done, 1 operational error, 2 wrong usage or input, 3 some rows failed, "
    "4 paused for a person, 130 interrupted. Every setting: docs/configuration.md.",
)
@click.version_option(__version__, prog_name="penstock")
def main() -> None:
    """Durable request processing on PostgreSQL.

    Penstock stores requests first, works them off against HTTP endpoints or Python functions, and
    records every answer exactly once. With no --database-url it brings its own PostgreSQL.
    """


if __name__ == "__main__":
    main()

"""Interrupting the commands that talk to a server."""

from __future__ import annotations

import asyncio
import os
import signal

from penstock.cli.client import ApiPlace, CommandContext, _carry_out
from penstock.errors import ExitCode


def test_an_interrupt_is_repeated_until_the_command_ends() -> None:
    """A cancellation may be lost, as psycopg loses one that comes together with an error."""
    forgotten = 0

    async def work(_: CommandContext) -> None:
        nonlocal forgotten
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            forgotten += 1
        await asyncio.Event().wait()

    assert _carry_out(ApiPlace("http://127.0.0.1:9", None, False), False, work) == ExitCode.INTERRUPTED
    assert forgotten == 1

"""Interrupting the commands that talk to a server."""

from __future__ import annotations

import asyncio
import os
import signal

from penstock.cli.client import Place, Session, _carry_out
from penstock.errors import ExitCode


def test_an_interrupt_is_repeated_until_the_command_ends() -> None:
    """The HTTP client may forget a cancellation that comes together with an answer."""
    forgotten = 0

    async def work(_: Session) -> None:
        nonlocal forgotten
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            forgotten += 1
        await asyncio.Event().wait()

    assert _carry_out(Place("http://127.0.0.1:9", None, False), False, work) == ExitCode.INTERRUPTED
    assert forgotten == 1

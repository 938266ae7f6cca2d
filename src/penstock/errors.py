"""Errors meant for a person: what happened, where, and what to do next."""

from __future__ import annotations

import sys
from enum import IntEnum


class ExitCode(IntEnum):
    """The program's documented exit codes."""

    OK = 0
    OPERATIONAL = 1
    USAGE = 2
    FAILED_ROWS = 3
    PAUSED = 4
    INTERRUPTED = 130


class PenstockError(Exception):
    """An error whose text can be shown as it is; `hint` says what to do next."""

    exit_code: ExitCode = ExitCode.OPERATIONAL

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint is not None:
            self.add_note(hint)  # a program that does not catch it shows what to do, below the traceback

    @property
    def advice(self) -> str:
        """What happened and what to do, as one text."""
        if "\n" in self.message:
            return f"{self.message}\n{self.hint or ''}".rstrip()
        return f"{self.message.rstrip('.')}. {self.hint or ''}".rstrip()


class UsageError(PenstockError):
    """The request itself is wrong: a missing file, a bad option, an invalid input line."""

    exit_code = ExitCode.USAGE


class Interrupted(PenstockError):  # noqa: N818 -- a person's wish
    """A person stopped it; the hint says how to go on."""

    exit_code = ExitCode.INTERRUPTED


def plain(text: str, limit: int = 300) -> str:
    """Text as one line that cannot move the cursor: users' texts are shown on a terminal only so."""
    cleaned = "".join(c if c.isprintable() else " " for c in text)
    return cleaned if len(cleaned) <= limit else cleaned[: limit - 1] + "…"


def report(error: PenstockError, *, as_json: bool = False) -> None:
    """Print an error for a person, and for a program too if asked: what happened, then what to do."""
    if as_json:
        import json

        said = {"message": error.message, "hint": error.hint}
        print(json.dumps({"error": said, "exit_code": error.exit_code}))
    print(f"penstock: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"  {error.hint}", file=sys.stderr)

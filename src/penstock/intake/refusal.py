"""Why a file was not taken: the bad lines, and the error that carries them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import ExitCode, PenstockError, UsageError

_FILE_CODES = {"empty_file", "too_many_tasks"}
"""What the batch API has a word for when a file as a whole is at fault."""
_LONGER = " `--set max_line_bytes=…` lets longer lines in."


@dataclass(frozen=True, slots=True)
class BadLine:
    """One line that cannot be taken. `code` is what the batch API reports for it."""

    line: int
    """Physical line, from 1: blank lines count."""
    field: str
    """The field at fault, such as `custom_id` or `body.model`; empty when it is the line as a whole."""
    reason: str
    code: str

    def __str__(self) -> str:
        place = f"line {self.line}, {self.field}" if self.field else f"line {self.line}"
        return f"{place}: {self.reason}"

    @property
    def problem(self) -> dict[str, Any]:
        if self.code == "invalid_json_line":
            message = f"This line is not parseable as valid JSON. {self.reason[:1].upper()}{self.reason[1:]}."
        else:
            message = f"{self.field}: {self.reason}" if self.field else self.reason
        return {"code": self.code, "line": self.line, "message": message, "param": self.field or None}


class IntakeRefused(UsageError):  # noqa: N818 - a verdict on the input, not a failure of ours
    """The input is not acceptable; nothing of it is stored. The message can be printed as it is."""

    def __init__(
        self,
        message: str,
        *,
        code: str = "invalid_request",
        param: str | None = None,
        hint: str | None = None,
        bad_lines: Sequence[BadLine] = (),
        more: bool = False,
    ) -> None:
        super().__init__(message, hint=hint)
        self.code = code
        self.param = param
        """Parameter of the call that is at fault, if it is not the input itself."""
        self.bad_lines = tuple(bad_lines)
        self.more = more
        """Whether there are bad lines beyond those listed."""

    @property
    def problems(self) -> list[dict[str, Any]]:
        """Why no batch can run over the file, as the batch API says it: one entry per line, or one for the whole."""
        if not self.bad_lines:
            code = self.code if self.code in _FILE_CODES else "invalid_request"
            return [{"code": code, "line": None, "message": self.message, "param": None}]
        listed: list[dict[str, Any]] = [bad.problem for bad in self.bad_lines]
        if self.more:
            message = f"More lines than the {len(listed)} listed are not valid."
            listed.append({"code": "invalid_request", "line": None, "message": message, "param": None})
        return listed

    @classmethod
    def for_lines(cls, name: str, bad_lines: Sequence[BadLine], *, more: bool) -> IntakeRefused:
        count = f"more than {len(bad_lines)}" if more else f"{len(bad_lines)}"
        noun = "line is" if count == "1" else "lines are"
        listed = "".join(f"\n  {bad}" for bad in bad_lines)
        is_long = any(bad.reason.endswith("(max_line_bytes)") for bad in bad_lines)
        return cls(
            f"{name}: {count} {noun} not valid; nothing was stored{listed}",
            code=bad_lines[0].code,
            hint=f"Correct the lines listed, then give the file again.{_LONGER if is_long else ''}",
            bad_lines=bad_lines,
            more=more,
        )


class IntakeGivenUp(PenstockError):  # noqa: N818 - another process's decision
    """Another process took this one for dead and gave its file up; nothing of it is stored."""


class IntakeInterrupted(PenstockError):  # noqa: N818 - the caller's wish
    """The caller asked to stop; nothing of the file is stored."""

    exit_code = ExitCode.INTERRUPTED

"""Paths of the files a run reads and writes, checked before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.errors import UsageError
from penstock.export.draft import draft_of
from penstock.export.jsonl import errors_path

_NAME_A_FILE = "Name a file for the answers, such as answers.jsonl."


def check_paths(inputs: Sequence[Path], output: Path | None, *, folders: bool = False) -> None:
    """Check that the inputs are regular files, or also `folders`, and that the output, if there is one, and its error
    file can be written and overwrite nothing else."""
    for path in inputs:
        _check_input(path, folder=folders)
    if output is not None:
        check_outputs(output, inputs)


def check_outputs(output: Path, inputs: Sequence[Path] = ()) -> None:
    """Check that the output and its error file can be written, and overwrite nothing else."""
    if str(output.absolute().parent) in ("/dev", "/dev/fd") or output.absolute().is_relative_to("/proc"):
        # Some of these lead to regular files, such as a redirected output, which the rename would replace.
        raise UsageError(f"{output} is not a regular file", hint=_NAME_A_FILE)
    if not output.name:  # `.` or `/`: no name that an error file could have beside it
        raise UsageError(f"{output} is a directory", hint=_NAME_A_FILE)
    targets = [_final(output), _final(errors_path(output))]
    for path in inputs:
        if path.resolve() in targets:
            raise UsageError("the output would overwrite the input", hint="Choose another -o.")
        if path.resolve() in targets[0].parents and path.is_dir():
            raise UsageError(f"the output would lie among the images of {path}", hint="Choose another -o.")
    if targets[0] == targets[1]:
        raise UsageError(
            f"{output} and {errors_path(output)} are the same file",
            hint="Failures go beside the output: remove the link, or choose another -o.",
        )
    for target in targets:
        _check_writable(target)


def _check_input(source: Path, *, folder: bool) -> None:
    if str(source) == "-":
        raise UsageError(
            "standard input cannot be read twice, and a run must be able to go on after an interruption",
            hint="Save the stream to a file first.",
        )
    try:
        # Path.is_file() and its like hide a missing permission, or raise on a name that is too long.
        source.stat()
    except FileNotFoundError:
        raise UsageError(f"{source}: no such file", hint="Check the path; it is relative to this directory.") from None
    except OSError as error:
        raise UsageError(f"{source}: cannot be read: {error.strerror}", hint="Check the path.") from error
    if source.is_dir() and folder:
        return
    if source.is_dir():
        raise UsageError(f"{source} is a directory", hint="Name one JSONL file (.jsonl, .gz or .zst).")
    if not source.is_file():
        raise UsageError(
            f"{source} is not a regular file",
            hint="A run must be able to read it again: save the stream to a file first.",
        )


def _final(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:  # a loop of links; which of the two depends on Python's version
        raise UsageError(f"cannot write {path}: its links lead nowhere", hint="Choose another -o.") from error


def _check_writable(path: Path) -> None:
    """Check that a draft can be made beside the path, and that renaming it would replace nothing but a file."""
    try:
        if path.is_dir():
            raise UsageError(f"{path} is a directory", hint=_NAME_A_FILE)
        if path.exists() and not path.is_file():
            raise UsageError(
                f"{path} is not a regular file",
                hint="Results are written beside it and renamed, which would replace it. Choose another -o.",
            )
        draft = draft_of(path)
        draft.touch()
        draft.unlink(missing_ok=True)  # another export may have removed it as abandoned
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}",
            hint="Its directory must exist and be writable. Choose another -o.",
        ) from error

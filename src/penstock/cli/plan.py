"""Plan of one `penstock run`: its input, output, target and options; and what makes two plans the same run."""

from __future__ import annotations

import hashlib
import json
import shlex
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from penstock.cli.tables import RowsPlan
from penstock.dispatch.target import Target
from penstock.export.sheet_file import sheet_stem
from penstock.validators import names_this_machine

STDOUT = "-"
_ONCE = ("--new", "--retry-failed", "--continue")
"""Options that ask for something to be done once: a command that goes on leaves them out."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of one `penstock run`."""

    input: Path
    output: Path
    """File for the answers; `-` is standard output."""
    target: Target
    workers: int = 1
    deadline: timedelta | None = None
    rows: RowsPlan | None = None
    """What is done with each row, where the input is a table."""
    start_anew: bool = False
    retry_failed: bool = False
    """Whether requests that failed in an earlier run are run again."""
    continues: bool = False
    """Whether a file that has grown goes on with the run over its beginning."""
    partial: bool = False
    """Whether what is there is written when the run stops before its end."""
    as_json: bool = False
    verbose: bool = False
    console: bool = False
    """Whether the console is served while the run lasts."""
    command: tuple[str, ...] = ()
    """The command's arguments as they were typed, for hints; none where no command was typed."""
    place: tuple[str, ...] = ()
    """Options that name the database, for hints about other commands."""

    @property
    def to_stdout(self) -> bool:
        return str(self.output) == STDOUT

    @property
    def in_process(self) -> bool:
        """Whether this process is the worker. A function gets a process of its own: one that ends its process, or
        blocks it, harms neither the run nor its display."""
        return self.workers == 1 and self.target.processor is None

    @property
    def inputs(self) -> list[Path]:
        return [self.input] if self.rows is None else list(self.rows.source.paths)

    @property
    def asked(self) -> str:
        """Digest of what is asked of the input: of which host or function, and what for each row. The port, the key and
        the number of calls at a time are no part of it: none of them changes an answer."""
        target = self.target
        parts: list[Any] = [target.processor or host_of(str(target.base_url))]
        if self.rows is not None:
            # The place of None was that of --limit, which is no part of what is asked of a row.
            parts.append([target.definition, msgspec.to_builtins(self.rows.spec), None])
        return _hash(parts)[:32]

    def key(self, digest: bytes) -> str:
        """Key by which a run is found again: from the input's content, how much of it, and what is asked of it."""
        limit = None if self.rows is None else self.rows.limit
        return f"run:{self.asked}:{digest.hex()}" + ("" if limit is None else f":{limit}")

    @property
    def former_key(self) -> str:
        """Key under which earlier releases stored the run of this command."""
        name = self.output.name if self.rows is None else sheet_stem(self.output.name)
        output = self.output.parent.resolve() / name
        parts: list[Any] = [str(self.input.resolve()), str(output), str(self.target)]
        if self.rows is not None:
            parts.append([self.target.definition, msgspec.to_builtins(self.rows.spec), self.rows.limit])
            parts += [str(path.resolve()) for path in self.rows.source.paths[1:]]
        return f"run:{_hash(parts, sort_keys=False)}"

    def command_with(self, *options: str) -> str:
        """The command, as it can be pasted, with these options and without those that ask for something once."""
        kept = [word for word in self.command if word not in _ONCE]
        return shlex.join(["penstock", *kept, *options])

    def other_command(self, *words: str) -> str:
        """Another command on the same data, as it can be pasted."""
        return shlex.join(["penstock", *words, *self.place])


def host_of(base_url: str) -> str:
    """Host of an endpoint; all names of this machine are one."""
    host = (urlsplit(base_url).hostname or base_url).lower()
    return "localhost" if names_this_machine(host) else host


def _hash(parts: list[Any], *, sort_keys: bool = True) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=sort_keys).encode()).hexdigest()

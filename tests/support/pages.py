"""Pages of the documentation, followed as a reader would: their files written, their commands run, what they print
compared."""

from __future__ import annotations

import contextlib
import random
import re
import socket
import subprocess
import sys
from pathlib import Path

from tests.support.cli import environment

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*<<'END'\n(?:.*\n)*?END|(?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
_FILE = re.compile(r"# (\w+\.(?:py|toml))\n")
_PORT = re.compile(r"\b80\d\d\b")
_MARK = "@@ next @@"
DEADLINE_S = 540.0
"""A page starts the program a dozen times: on a busy machine that takes minutes."""
_ENDPOINTS = re.compile(r"https://api\.openai\.com/v1|http://127\.0\.0\.1:(?:8000|11434|4000)/v1")
"""Addresses that stand for whatever a reader calls; a test has a mock there."""


def blocks_of(text: str) -> list[tuple[str, str]]:
    """Kind and content of every block of code."""
    return _BLOCK.findall(text)


def follow(text: str, folder: Path, programs: Path, endpoint: str | None = None) -> None:
    """Follow a page in this folder: write the files it shows (a first line `# name.py` names one), run its commands in
    one shell, and compare what each prints. `…` is anything in a line, and a line of it any lines. `programs` is a
    folder for `penstock` itself; `endpoint` stands in for those of others."""
    _add_program(programs / "penstock", f'exec {sys.executable} -m penstock.cli.main "$@"')
    _add_program(programs / "sudo", "true")
    if endpoint is not None:
        text = _ENDPOINTS.sub(endpoint, text)
    names = sorted(set(_PORT.findall(_ENDPOINTS.sub("", text))))
    ports = dict(zip(names, map(str, free_ports(len(names))), strict=True))
    text = _PORT.sub(lambda found: ports.get(found[0], found[0]), text)
    for kind, block in blocks_of(text):
        if kind != "console" and (name := _FILE.match(block)):
            (folder / name[1]).write_text(block, "utf-8")
    steps = [step for kind, block in blocks_of(text) if kind == "console" for step in _COMMAND.findall(block)]
    assert steps
    path = f"{programs}:{Path(sys.executable).parent}:{environment()['PATH']}"
    ended = subprocess.run(
        ["bash", "-c", _script_of([command for command, _ in steps])],
        cwd=folder,
        env=environment({"PATH": path}),
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    logged = folder / "services.log"
    about = ended.stderr + (logged.read_text() if logged.exists() else "")
    printed = ended.stdout.split(f"{_MARK}\n")[1:]
    assert len(printed) == len(steps), about
    for (command, expected), found in zip(steps, printed, strict=True):
        assert _matches(expected, found), f"{command}\nprints\n{found}\ninstead of\n{expected}\n{about}"


def _matches(expected: str, found: str) -> bool:
    lines = [
        r"(?:.*\n)*" if line == "…\n" else ".*?".join(map(re.escape, line.split("…")))
        for line in expected.splitlines(True)
    ]
    # The last command of a pipe may end its line or not.
    return re.fullmatch("".join(lines).removesuffix("\\\n") + r"\n?", found) is not None


def _add_program(path: Path, command: str) -> None:
    path.write_text(f"#!/bin/sh\n{command}\n", "utf-8")
    path.chmod(0o755)


def free_ports(count: int) -> list[int]:
    """Ports that are free, each another. They lie below those that the system gives to whoever asks for any."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.randrange(10_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports += [port] if port not in ports else []
    return ports


def _script_of(commands: list[str]) -> str:
    """All commands, for one shell; what listens is ended with the shell."""
    lines = ["trap 'kill $(jobs -p); wait' EXIT"]
    for command in commands:
        lines.append(f"echo '{_MARK}'")
        if command.endswith("&"):
            lines.append(f"{command[:-1]} >>services.log 2>&1 &")
        else:
            lines.append(command)
    return "\n".join(lines)

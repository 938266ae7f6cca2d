"""docs/examples.md: every command of it is run as it stands there, and prints what stands there."""

from __future__ import annotations

import contextlib
import random
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import openpyxl
import pytest

from tests.support.cli import DEADLINE_S, environment
from tests.support.prepared import Prepared

REPOSITORY = Path(__file__).parents[3]
PAGE = (REPOSITORY / "docs" / "examples.md").read_text("utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
_PORT = re.compile(r"\b80\d\d\b")
_MARK = "@@ next @@"


def free_ports(count: int) -> list[int]:
    """Ports that are free, each another. They lie below those that the system gives to whoever asks for any."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.randrange(10_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports += [port] if port not in ports else []
    return ports


def script_of(commands: list[str]) -> str:
    """All commands of a section, for one shell; what listens is ended with the shell."""
    lines = ["trap 'kill $(jobs -p); wait' EXIT"]
    for command in commands:
        lines.append(f"echo '{_MARK}'")
        if command.endswith("&"):
            lines.append(f"{command[:-1]} >>services.log 2>&1 &")
        else:
            lines.append(command)
    return "\n".join(lines)


@pytest.mark.parametrize("title", SECTIONS)
def test_an_example_does_what_it_says(tmp_path: Path, prepared: Prepared, title: str) -> None:
    folder = tmp_path / "examples"
    shutil.copytree(
        REPOSITORY / "examples", folder, ignore=shutil.ignore_patterns("demo.py", "__pycache__", ".penstock")
    )
    prepared(folder / ".penstock")
    (tmp_path / "penstock").write_text(f'#!/bin/sh\nexec {sys.executable} -m penstock.cli.main "$@"\n')
    (tmp_path / "penstock").chmod(0o755)

    text = SECTIONS[title]
    names = sorted(set(_PORT.findall(text)))
    ports = dict(zip(names, map(str, free_ports(len(names))), strict=True))
    text = _PORT.sub(lambda found: ports[found[0]], text)
    steps = [step for kind, block in _BLOCK.findall(text) if kind == "console" for step in _COMMAND.findall(block)]
    assert steps

    path = f"{tmp_path}:{Path(sys.executable).parent}:{environment()['PATH']}"
    ended = subprocess.run(
        ["bash", "-c", script_of([command for command, _ in steps])],
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
        pattern = ".*?".join(map(re.escape, expected.split("…")))
        assert re.fullmatch(pattern, found), f"{command}\nprints\n{found}\ninstead of\n{expected}\n{about}"


@pytest.mark.parametrize("title", SECTIONS)
def test_what_a_section_quotes_stands_in_the_files(title: str) -> None:
    files = [path.read_text("utf-8") for path in (REPOSITORY / "examples").iterdir() if path.is_file()]
    for kind, block in _BLOCK.findall(SECTIONS[title]):
        assert kind == "console" or any(block in content for content in files), block


def test_the_demo_ends_with_a_sheet(tmp_path: Path, prepared: Prepared) -> None:
    prepared(tmp_path / "demo-out" / "data")
    command = [sys.executable, str(REPOSITORY / "examples" / "demo.py"), "--requests", "20"]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False, timeout=DEADLINE_S
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith("a sheet to open:      demo-out/products.xlsx\n")
    sheet = openpyxl.load_workbook(tmp_path / "demo-out" / "products.xlsx").worksheets[0]
    header, *rows = sheet.iter_rows(values_only=True)
    assert header == ("sku", "product_title", "brand", "category", "fragile", "status", "attempts", "error")
    assert [row[0] for row in rows] == list(range(1001, 1011))

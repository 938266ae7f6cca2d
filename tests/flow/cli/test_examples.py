"""docs/examples.md: every command of it is run as it stands there, and prints what stands there."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import openpyxl
import psutil
import pytest

from penstock.db.embedded.cluster import PGDATA
from tests.support.cli import DEADLINE_S, environment, finish, interrupt
from tests.support.pages import blocks_of, follow
from tests.support.prepared import Prepared
from tests.support.wait import wait_until

REPOSITORY = Path(__file__).parents[3]
PAGE = (REPOSITORY / "docs" / "examples.md").read_text("utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize("title", SECTIONS)
def test_an_example_does_what_it_says(tmp_path: Path, prepared: Prepared, title: str) -> None:
    folder = tmp_path / "examples"
    shutil.copytree(
        REPOSITORY / "examples", folder, ignore=shutil.ignore_patterns("demo.py", "__pycache__", ".penstock")
    )
    prepared(folder / ".penstock")
    follow(SECTIONS[title], folder, tmp_path)


@pytest.mark.parametrize("title", SECTIONS)
def test_what_a_section_quotes_stands_in_the_files(title: str) -> None:
    files = [path.read_text("utf-8") for path in (REPOSITORY / "examples").iterdir() if path.is_file()]
    for kind, block in blocks_of(SECTIONS[title]):
        assert kind == "console" or any(block in content for content in files), block


def test_the_demo_ends_with_a_sheet(tmp_path: Path, prepared: Prepared) -> None:
    prepared(tmp_path / "demo-out" / "data")
    command = [sys.executable, str(REPOSITORY / "examples" / "demo.py"), "--requests", "20"]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False, timeout=DEADLINE_S
    )
    assert ended.returncode == 0, ended.stderr
    assert "a sheet to open:      demo-out/products.xlsx\n" in ended.stdout
    assert "*** kill -9 after" in ended.stdout
    assert "  answered  " in ended.stdout
    sheet = openpyxl.load_workbook(tmp_path / "demo-out" / "products.xlsx").worksheets[0]
    header, *rows = sheet.iter_rows(values_only=True)
    assert header == ("sku", "product_title", "brand", "category", "fragile", "status", "attempts", "error")
    assert [row[0] for row in rows] == list(range(1001, 1011))


def test_ctrl_c_ends_all_that_the_demo_started(tmp_path: Path, prepared: Prepared) -> None:
    data_dir = prepared(tmp_path / "demo-out" / "data")
    command = [sys.executable, str(REPOSITORY / "examples" / "demo.py")]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=pipe, stderr=pipe, process_group=0
    ) as process:
        assert process.stderr is not None
        assert any(line.startswith(b"stored as") for line in process.stderr)
        started = psutil.Process(process.pid).children(recursive=True)
        try:
            interrupt(process)
            left = psutil.wait_procs(started, timeout=DEADLINE_S)[1]
        finally:
            for one in started:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
        ended = finish(process)
    assert len(started) >= 2
    assert left == []
    ended.expect(130)
    assert "interrupted: nothing of the demo is running any more\n" in ended.stderr
    wait_until(lambda: not (data_dir / PGDATA / "postmaster.pid").exists(), DEADLINE_S)

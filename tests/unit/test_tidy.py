"""What a reader may rely on, checked: no catch-all modules, no long files, no stage that reaches into another."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import penstock

ROOT = Path(penstock.__file__).parent
REPOSITORY = ROOT.parent.parent
MODULES = sorted(ROOT.rglob("*.py"))
STAGES = {"intake", "batches", "sessions", "claim", "dispatch", "settle", "export", "erase", "deliver"}
# Wire formats, how to speak HTTP, and what makes two errors the same are written in one place and needed in two; a
# deletion ends batches as everything else does.
SHARED = {
    "settle": {"penstock.export.result_lines", "penstock.batches.error_groups"},
    "batches": {"penstock.export.result_lines"},
    "deliver": {
        "penstock.sessions.cloudevents",
        *(f"penstock.dispatch.http.{name}" for name in ("connect", "connection", "countdown", "errors", "tls")),
    },
    "erase": {"penstock.batches.finish"},
}
MAX_LINES = 450


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_stay_small_and_well_named(path: Path) -> None:
    assert path.stem not in {"utils", "util", "helpers", "helper", "common", "manager", "misc"}
    lines = path.read_text("utf-8").splitlines()
    assert len(lines) <= MAX_LINES, f"{path.name} has {len(lines)} lines: more than one room in it?"


@pytest.mark.parametrize("stage", sorted(STAGES))
def test_a_stage_does_not_import_another(stage: str) -> None:
    for path in (ROOT / stage).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("penstock."):
                other = node.module.split(".")[1]
                allowed = other == stage or other not in STAGES or node.module in SHARED.get(stage, ())
                assert allowed, f"{path.name} imports {node.module}"


def test_only_settle_writes_outcomes() -> None:
    writers = [
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.sql")
        if "INTO penstock.outcomes" in path.read_text("utf-8") or "UPDATE penstock.outcomes" in path.read_text("utf-8")
    ]
    assert writers == ["settle/settle.sql"]


def test_the_configuration_page_is_current() -> None:
    from penstock import config

    page = (REPOSITORY / "docs" / "configuration.md").read_text("utf-8")
    for knob in config.knobs():
        row = f"| `{knob.name}` | `{knob.variable}` | {config.plain(knob.default)} | {knob.span} | {knob.about} |"
        assert row in page, f"docs/configuration.md lacks or misstates {knob.name}: expected\n{row}"


@pytest.mark.parametrize("page", sorted((REPOSITORY / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_the_tests_that_a_page_names_exist(page: Path) -> None:
    for path, _, name in re.findall(r"`((?:tests|bench)/[\w/]+\.py)(::(\w+))?`", page.read_text("utf-8")):
        assert (REPOSITORY / path).exists(), path
        assert not name or f"class {name}" in (REPOSITORY / path).read_text("utf-8"), f"{path} has no {name}"

"""What a reader may rely on, checked: no catch-all modules, no long files, no stage that reaches into another."""

from __future__ import annotations

import ast
import re
import runpy
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


PAGES_OF_DOCS = sorted((REPOSITORY / "docs").rglob("*.md"))


@pytest.mark.parametrize("stage", sorted(STAGES))
def test_a_stage_does_not_import_another(stage: str) -> None:
    for path in (ROOT / stage).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("penstock."):
                other = node.module.split(".")[1]
                allowed = other == stage or other not in STAGES or node.module in SHARED.get(stage, ())
                assert allowed, f"{path.name} imports {node.module}"


def test_only_the_command_line_imports_the_command_line() -> None:
    for path in MODULES:
        nodes = ast.walk(ast.parse(path.read_text("utf-8")))
        named = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        of_commands = path.is_relative_to(ROOT / "cli")
        assert of_commands or not any(f"{name}.".startswith("penstock.cli.") for name in named), path


def test_only_settle_writes_outcomes() -> None:
    """But for an import, which brings those of another system."""
    writing = re.compile(r"(INTO|UPDATE|COPY)\s+penstock\.outcomes\b")
    writers = [
        path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.sql") if writing.search(path.read_text("utf-8"))
    ]
    assert sorted(writers) == ["moving/moving.sql", "settle/settle.sql"]


def test_the_configuration_page_is_current() -> None:
    from penstock import config

    page = (REPOSITORY / "docs" / "configuration.md").read_text("utf-8")
    for knob in config.knobs():
        row = f"| `{knob.name}` | `{knob.variable}` | {config.plain(knob.default)} | {knob.span} | {knob.about} |"
        assert row in page, f"docs/configuration.md lacks or misstates {knob.name}: expected\n{row}"


def test_the_reference_is_current() -> None:
    written = runpy.run_path(str(REPOSITORY / "scripts" / "reference_pages.py"))
    for name, page in written["PAGES"].items():
        current = (REPOSITORY / "docs" / "reference" / name).read_text("utf-8")
        assert current == page(), f"docs/reference/{name} is not what the code says: run make docs"


def test_every_page_is_in_the_navigation() -> None:
    docs = REPOSITORY / "docs"
    linked = set(re.findall(r"\]\(([\w/.-]+\.md)\)", (docs / "README.md").read_text("utf-8")))
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    expected = pages - {"README.md", "wheel.md"} - {page for page in pages if page.startswith("adr/")}
    assert linked == expected, "docs/README.md lists every page, and no other"


@pytest.mark.parametrize("page", [*PAGES_OF_DOCS, REPOSITORY / "README.md"], ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target, heading in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text("utf-8")):
        if "://" not in target:
            found = page.parent / target if target else page
            assert found.exists(), target
            assert not heading or heading in anchors_of(found), f"{target} has no heading #{heading}"


def anchors_of(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES_OF_DOCS, ids=lambda page: page.name)
def test_the_tests_that_a_page_names_exist(page: Path) -> None:
    for path, _, name in re.findall(r"`((?:tests|bench)/[\w/]+\.py)(::(\w+))?`", page.read_text("utf-8")):
        assert (REPOSITORY / path).exists(), path
        assert not name or f"class {name}" in (REPOSITORY / path).read_text("utf-8"), f"{path} has no {name}"

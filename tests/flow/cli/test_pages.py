"""The README, the tutorial and the how-tos: every command of them is run, and prints what stands there."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mock_process import start_mock_process
from tests.support.pages import blocks_of, follow
from tests.support.prepared import Prepared

REPOSITORY = Path(__file__).parents[3]
PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "docs" / "tutorial.md",
    *sorted((REPOSITORY / "docs" / "howto").glob("*.md")),
]
# What moves in comes from a database that a reader has: tests/flow/moving has one, and runs the commands of that page.
FOLLOWED = [page for page in PAGES if page.name != "moving-in.md"]
# What these tell to type, other tests of the commands do as well.
AGAIN = {"backup.md", "clean-up.md", "endpoints.md", "upgrade.md"}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with start_mock_process() as mock:
        yield mock.base_url


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.again] if page.name in AGAIN else [], id=page.name) for page in FOLLOWED],
)
def test_a_page_does_what_it_says(tmp_path: Path, prepared: Prepared, endpoint: str, page: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    shutil.copytree(REPOSITORY / "deploy", folder / "deploy")
    prepared(folder / ".penstock")
    follow(page.read_text("utf-8"), folder, tmp_path, endpoint)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_shows_of_a_file_stands_in_it(page: Path) -> None:
    files = [path.read_text("utf-8") for path in (REPOSITORY / "deploy").rglob("*") if path.is_file()]
    for kind, block in blocks_of(page.read_text("utf-8")):
        if kind in ("ini", "nginx"):
            lines = [line for line in block.splitlines() if line]
            assert any(all(line in content.splitlines() for line in lines) for content in files), block


def test_the_map_of_the_readme_is_that_of_the_how_to() -> None:
    (shown,) = (block for kind, block in blocks_of(PAGES[0].read_text("utf-8")) if "penstock.map" in block)
    assert shown in (REPOSITORY / "docs" / "howto" / "functions.md").read_text("utf-8")

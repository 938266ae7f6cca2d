"""What the console ships of others: exactly the files that vendor.toml names, as published, with their licences."""

from __future__ import annotations

import hashlib
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
SHIPPED = ROOT / "src/penstock/console/static/vendor"
MANIFESTS = (SHIPPED / "vendor.toml", ROOT / "tests/browser/vendor/vendor.toml")
LICENCES = {"MIT", "ISC", "Apache-2.0"}  # that may go into the wheel
PROVIDED = {"preact", "preact/hooks", "@preact/signals-core", "htm"}  # imported by name: the import map says where


def packages(manifest: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tomllib.loads(manifest.read_text("utf-8"))["package"]
    return found


@pytest.mark.parametrize("manifest", MANIFESTS, ids=("console", "tests"))
def test_the_files_are_those_of_the_manifest_and_unchanged(manifest: Path) -> None:
    entries = [entry for package in packages(manifest) for entry in package["files"]]
    entries += [package["sprite"] for package in packages(manifest) if "sprite" in package]
    present = {path.relative_to(manifest.parent).as_posix() for path in manifest.parent.rglob("*") if path.is_file()}
    assert present - {"vendor.toml"} == {entry["to"] for entry in entries}
    for entry in entries:
        digest = hashlib.sha256((manifest.parent / entry["to"]).read_bytes()).hexdigest()
        assert digest == entry["sha256"], f"{entry['to']} is not what was published: run make vendor"


@pytest.mark.parametrize("manifest", MANIFESTS, ids=("console", "tests"))
def test_every_package_has_a_version_and_its_licence_with_it(manifest: Path) -> None:
    for package in packages(manifest):
        assert re.fullmatch(r"\d+\.\d+\.\d+", package["version"]), package["name"]
        assert any(entry["to"].startswith("licences/") for entry in package["files"]), package["name"]
        assert manifest.parent != SHIPPED or package["licence"] in LICENCES, package["name"]


def test_modules_import_nothing_from_elsewhere_and_evaluate_nothing() -> None:
    for module in SHIPPED.glob("*.js"):
        text = module.read_text("utf-8")
        assert set(re.findall(r"""\b(?:from|import) *["']([\w@/.:-]+)["']""", text)) <= PROVIDED, module.name
        assert not re.search(r"\beval\(|\bnew Function\b|\bimport\(", text), module.name
    for style in SHIPPED.glob("*.css"):
        assert not re.search(r"@import|url\(", style.read_text("utf-8")), style.name


def test_the_sprite_has_every_icon_once() -> None:
    (sprite,) = (package["sprite"] for package in packages(MANIFESTS[0]) if "sprite" in package)
    ids = re.findall(r'<symbol id="([^"]+)"', (SHIPPED / sprite["to"]).read_text("utf-8"))
    assert ids == sorted(set(sprite["names"]))


def test_the_sprite_has_the_icons_that_pages_show_and_no_others() -> None:
    (sprite,) = (package["sprite"] for package in packages(MANIFESTS[0]) if "sprite" in package)
    text = "".join(path.read_text("utf-8") for path in (SHIPPED.parent / "app").rglob("*.js"))
    shown = set(re.findall(r"""\bicon="([\w-]+)"|<\$\{Icon\} name="([\w-]+)""", text))
    assert {name for pair in shown for name in pair if name} - set(sprite["names"]) == set()
    assert [name for name in sprite["names"] if not re.search(rf"""["'`]{name}["'`]""", text)] == []

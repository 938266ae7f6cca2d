"""Modules of the console: what they import is there, and what every visit needs is fetched at once."""

from __future__ import annotations

import json
import posixpath
import re

from penstock.console.files import INDEX, ROOT

_IMPORT = re.compile(r'^\s*(?:import|export)\b[^;"]*?\bfrom\s+"([^"]+)"|^import\s+"([^"]+)"', re.MULTILINE)
_LAZY = re.compile(r'\bimport\("([^"]+)"\)')


def _page() -> str:
    return (ROOT / INDEX).read_text("utf-8")


def _import_map() -> dict[str, str]:
    found = re.search(r'<script type="importmap">(.*?)</script>', _page(), re.DOTALL)
    assert found is not None
    names: dict[str, str] = json.loads(found[1])["imports"]
    return {name: path.removeprefix("./static/") for name, path in names.items()}


def _imports(name: str, pattern: re.Pattern[str] = _IMPORT) -> set[str]:
    """Files that a module imports, as paths below the directory of files."""
    named = _import_map()
    found = {next(filter(None, match.groups())) for match in pattern.finditer((ROOT / name).read_text("utf-8"))}
    return {
        posixpath.normpath(posixpath.join(posixpath.dirname(name), text)) if text.startswith(".") else named[text]
        for text in found
    }


def _closure(*names: str) -> set[str]:
    seen: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += [] if name.startswith("vendor/") else _imports(name)
    return seen


def test_every_module_is_there_and_reached_from_the_page() -> None:
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "app").rglob("*.js")}
    reached = _closure("app/main.js", *_imports("app/routes.js", _LAZY))
    assert {name for name in reached if not (ROOT / name).is_file()} == set()
    assert modules - reached == {"app/early.js", "app/work_types.js"}  # the page has the one, the other is types alone


def test_what_every_visit_needs_is_fetched_at_once() -> None:
    preloaded = re.findall(r'<link rel="modulepreload" href="static/([^"]+)">', _page())
    needed = _closure("app/main.js", "app/pages/home.js") | {"vendor/preact-hooks.js", "vendor/signals-core.js"}
    assert preloaded == sorted(needed)


def test_every_style_is_linked() -> None:
    linked = set(re.findall(r'<link rel="stylesheet" href="static/([^"]+)">', _page()))
    assert linked == {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.css")}

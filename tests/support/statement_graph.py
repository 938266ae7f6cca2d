"""Which SQL statements a function can come to, found in the source without running it.

A function comes to the statements of its module's `.sql` files that it names, and to whatever the functions and classes
come to that it names in turn: its own module's, and those it imports. A class comes to all that its methods do. What is
reached only through an attribute of an object that was handed in is not seen.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import penstock
from penstock.db import sql

ROOT = Path(penstock.__file__).parent


@dataclass(slots=True)
class _Module:
    statements: dict[str, str] = field(default_factory=dict)
    """Statements of its `.sql` files, as `package/file.sql name`, by name."""
    imports: dict[str, str] = field(default_factory=dict)
    """What a name stands for: a module, or `module:name`."""
    uses: dict[str, set[str]] = field(default_factory=dict)
    """Of each function and class: the names in it, `module.attribute` included, and the texts."""


def reachable_statements(begin: Iterable[Callable[..., object]]) -> set[str]:
    """Statements that these functions can come to, as `package/file.sql name`."""
    modules = {_name_of(path): _read(path) for path in sorted(ROOT.rglob("*.py"))}
    found: set[str] = set()
    seen: set[tuple[str, str]] = set()
    todo = [(function.__module__, function.__name__) for function in begin]
    while todo:
        place = todo.pop()
        module = modules.get(place[0])
        if place in seen or module is None or place[1] not in module.uses:
            continue
        seen.add(place)
        for used in module.uses[place[1]]:
            found |= {module.statements[used]} if used in module.statements else set()
            todo += _targets(place[0], module, used)
    return found


def _targets(name: str, module: _Module, used: str) -> Iterator[tuple[str, str]]:
    first, _, rest = used.partition(".")
    if not rest:
        yield name, first
    target = module.imports.get(first)
    if target is not None:
        where, _, what = target.partition(":")
        if what:
            yield where, what
            yield f"{where}.{what}", rest  # `from penstock.deliver import endpoints`
        elif rest:
            yield where, rest


def _name_of(path: Path) -> str:
    return ".".join(("penstock", *path.relative_to(ROOT).with_suffix("").parts))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def _read(path: Path) -> _Module:
    module = _Module()
    # What is imported for its type alone, under an `if`, is not called from here.
    body = [node for node in parsed(path).body if not isinstance(node, ast.If)]
    for node in (inner for outer in body for inner in ast.walk(outer)):
        if isinstance(node, ast.ImportFrom) and node.module:
            module.imports |= {each.asname or each.name: f"{node.module}:{each.name}" for each in node.names}
        if isinstance(node, ast.Call) and _loads(node.func):
            package, file = (ast.literal_eval(argument) for argument in node.args)
            where = ROOT.joinpath(*package.split(".")[1:]) / file
            named = {each.name: f"{where.relative_to(ROOT)} {each.name}" for each in _statements(where)}
            module.statements |= named
    uses: dict[str, set[str]] = defaultdict(set)
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            uses[node.name] |= set(_names_in(node))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for name in ast.walk(node):
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                    uses[name.id] |= set(_names_in(node))
    module.uses = uses
    return module


def _loads(function: ast.expr) -> bool:
    """Whether it is `sql.load`."""
    match function:
        case ast.Attribute(ast.Name("sql"), "load"):
            return True
    return False


def _statements(path: Path) -> list[sql.Statement]:
    return list(sql.parse(path.name, path.read_text("utf-8")))


def _names_in(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            yield each.id
        elif isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name):
            yield f"{each.value.id}.{each.attr}"
        elif isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value

from __future__ import annotations

from pathlib import Path

import pytest

import penstock
from penstock.db import sql

ROOT = Path(penstock.__file__).parent
FILES = sorted(ROOT.glob("*/*.sql"))
CONSTRAINTS = "\n".join(path.read_text("utf-8") for path in (ROOT / "db" / "migrations").glob("*.sql"))


def test_statements_are_split_by_name_and_stripped_of_comments() -> None:
    source = (
        "-- name: one\n-- Says what it does.\nSELECT 1;\n\n-- name: two_if_ready\n-- Other.\nSELECT\n  -- why\n  2\n"
    )
    found = sql.parse("here", source)
    assert found["one"] == b"SELECT 1"
    assert found["two_if_ready"] == b"SELECT\n  2"
    assert [statement.about for statement in found] == ["Says what it does.", "Other."]


def test_now_is_the_parameter_or_the_databases_clock() -> None:
    found = sql.parse("here", "-- name: due\n-- Says what is due.\nSELECT 1 WHERE due_at <= @now")
    assert found["due"] == b"SELECT 1 WHERE due_at <= coalesce(%(now)s::timestamptz, now())"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("-- name: one\nSELECT 1", "no description"),
        ("-- name: one\n-- A.\nSELECT 1\n-- name: one\n-- B.\nSELECT 2", "defined twice"),
    ],
)
def test_a_careless_file_is_refused(source: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sql.parse("here", source)


def test_there_is_sql_to_check() -> None:
    assert len(FILES) >= 5


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_statement_qualifies_its_tables(path: Path) -> None:
    import re

    tables = "files|file_lanes|templates|batches|lanes|leases|deferrals|outcomes|attempts|reclaims|progress|workers"
    for statement in sql.parse(path.name, path.read_text("utf-8")):
        bare = re.findall(rf"(?:FROM|JOIN|INTO|UPDATE)\s+({tables})\b", statement.text.decode())
        assert not bare, f"{path.name}: {statement.name} names {bare} without its schema"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_statement_is_used(path: Path) -> None:
    code = "\n".join(module.read_text("utf-8") for module in path.parent.glob("*.py"))
    for statement in sql.parse(path.name, path.read_text("utf-8")):
        family, _, member = statement.name.partition("_")
        # By its name, or as one of a family: _SQL[f"erase_{what}"] with "templates" for what.
        used = f'"{statement.name}"' in code or (f'_SQL[f"{family}_' in code and f"'{member}'" in CONSTRAINTS)
        assert used, f"{path.name}: {statement.name} is used by nobody"

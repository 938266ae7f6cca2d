"""Payload and history can be distributed over nodes, by source, lane or batch, while the control tables stay on one.

For that, no statement may read a payload table together with a control table, or with one that is distributed by
something else; nor find rows by their place, or lock them; nor ask, for each of many keys, for the first so many rows.
What is written to payload tables may come from control tables: an INSERT is sent to wherever it belongs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import penstock
from penstock.db import sql
from tests.support.payload import PAYLOAD

ROOT = Path(penstock.__file__).parent
MIGRATIONS = "\n".join(path.read_text("utf-8") for path in (ROOT / "db" / "migrations").glob("*.sql"))
RELATIONS = set(re.findall(r"CREATE (?:UNLOGGED )?(?:TABLE|VIEW) (?:IF NOT EXISTS )?penstock\.(\w+)", MIGRATIONS))
# They unite payload and control, for people with psql.
VIEWS = {"requests", "session_answers"}
CONTROL = RELATIONS - PAYLOAD.keys() - VIEWS

WRITTEN_ONCE = {"templates", "file_chunks", "attempts", "reclaims", "blob_bytes"}

_NAMED = re.compile(r"(INSERT\s+INTO|DELETE\s+FROM|\bUPDATE|COPY)?\s+penstock\.(\w+)\b(?!\()", re.IGNORECASE)
_LOCKS = re.compile(r"\bFOR\s+(?:NO\s+KEY\s+UPDATE|UPDATE|KEY\s+SHARE|SHARE)\b")


@dataclass(frozen=True, slots=True)
class Use:
    """What a statement does with relations of the schema."""

    text: str
    reads: set[str]
    updates: set[str]
    writes: set[str]

    @property
    def payload(self) -> set[str]:
        return (self.reads | self.writes) & PAYLOAD.keys()


def use_of(text: str) -> Use:
    reads: set[str] = set()
    updates: set[str] = set()
    writes: set[str] = set()
    for verb, name in _NAMED.findall(text):
        if name in RELATIONS:
            (writes if verb else reads).add(name)
            if verb.upper() == "UPDATE":
                updates.add(name)
    return Use(text, reads, updates, writes)


def complaints(use: Use) -> Iterator[str]:
    """What keeps the tables of a statement from being distributed."""
    payload = use.reads & PAYLOAD.keys()
    if spanning := use.reads & VIEWS:
        yield f"reads {sorted(spanning)}, which unites payload and control tables"
    if payload and (control := (use.reads | use.writes) & CONTROL):
        yield f"reads {sorted(payload)} together with {sorted(control)}"
    if len({PAYLOAD[table] for table in payload}) > 1:
        yield f"reads {sorted(payload)}, which are distributed by different keys"
    if use.payload and re.search(r"\bctid\b", use.text):
        yield "finds rows by their place, which differs from node to node"
    if payload and _LOCKS.search(use.text):
        yield f"locks rows of {sorted(payload)}"
    if changed := use.updates & WRITTEN_ONCE:
        yield f"updates {sorted(changed)}"
    for inner in laterals(use.text):
        some = use_of(inner)
        fixed = all(re.search(rf"\b{PAYLOAD[table]} = %\(", inner) for table in some.payload)
        if some.payload and not fixed and re.search(r"\b(LIMIT|OFFSET)\b", inner):
            yield f"asks for so many rows of {sorted(some.payload)} for each of many keys"


def laterals(text: str) -> Iterator[str]:
    """The inside of every LATERAL (...)."""
    for found in re.finditer(r"\bLATERAL\s*\(", text):
        depth = 1
        for place in range(found.end(), len(text)):
            depth += {"(": 1, ")": -1}.get(text[place], 0)
            if depth == 0:
                yield text[found.end() : place]
                break


STATEMENTS = [
    pytest.param(statement.text.decode(), id=f"{path.parent.name}-{statement.name}")
    for path in sorted(ROOT.rglob("*.sql"))
    if path.parent.name != "migrations"
    for statement in sql.parse(path.name, path.read_text("utf-8"))
]


@pytest.mark.parametrize("text", STATEMENTS)
def test_a_statement_works_on_distributed_payload(text: str) -> None:
    assert list(complaints(use_of(text))) == []


def test_there_are_statements_and_tables_to_check() -> None:
    assert PAYLOAD.keys() | VIEWS <= RELATIONS
    assert {"files", "lanes", "leases", "session_requests", "session_stream"} <= CONTROL
    assert len(STATEMENTS) > 150


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("SELECT FROM penstock.templates t JOIN penstock.leases l ON l.id = 1", "together with"),
        ("SELECT body FROM penstock.templates WHERE EXISTS (SELECT FROM penstock.lanes)", "together with"),
        ("DELETE FROM penstock.deferrals WHERE id IN (SELECT lane_id FROM penstock.outcomes)", "together with"),
        ("SELECT FROM penstock.templates, penstock.outcomes", "different keys"),
        ("SELECT FROM penstock.session_answers", "unites"),
        ("DELETE FROM penstock.outcomes WHERE ctid = ANY (%(places)s)", "place"),
        ("SELECT FROM penstock.outcomes WHERE lane_id = %(lane)s FOR UPDATE SKIP LOCKED", "locks"),
        ("UPDATE penstock.attempts SET counted = true", "updates"),
        (
            "SELECT FROM w CROSS JOIN LATERAL (SELECT FROM penstock.outcomes WHERE lane_id = w.id LIMIT 1) o",
            "many keys",
        ),
    ],
)
def test_what_cannot_be_distributed_is_noticed(text: str, words: str) -> None:
    (complaint,) = complaints(use_of(text))
    assert words in complaint


@pytest.mark.parametrize(
    "text",
    [
        "WITH held AS (SELECT id FROM penstock.leases FOR UPDATE) INSERT INTO penstock.outcomes SELECT id FROM held",
        "WITH gone AS (DELETE FROM penstock.outcomes WHERE lane_id = %(lane)s RETURNING ordinal)"
        " INSERT INTO penstock.deferrals SELECT ordinal FROM gone",
        "SELECT penstock.ordinal_after_line(source_id, 0, 1, 1) FROM penstock.lanes",
        "SELECT FROM w CROSS JOIN LATERAL ("
        "SELECT FROM penstock.outcomes WHERE lane_id = %(lane)s AND ordinal = w.n LIMIT 1) o",
    ],
)
def test_what_can_be_distributed_is_let_pass(text: str) -> None:
    assert list(complaints(use_of(text))) == []

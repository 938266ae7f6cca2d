"""S13, the second line behind the handlers' checks (docs/adr/0022-owners-in-statements.md): every statement that a
tenant's request can come to, and that reads rows with an owner, carries the owner in its own text. Where it does not,
it is listed here with the statement that found its row under the owner before."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from penstock.api.app import endpoints
from penstock.db import sql
from tests.support.statement_graph import ROOT, parsed, reachable_statements

# Tables with an owner whose rows requests name by ids. The rest is found by keys of these: lanes, sources, endpoints.
OWNED = {
    *("files", "batches", "uploads", "webhook_endpoints", "sessions", "session_requests", "erasures", "jobs"),
    *("operations", "audit"),
}
_READS = re.compile(r"(?:FROM|JOIN|UPDATE|USING|,)\s+(?:ONLY\s+)?penstock\.(\w+)\b(?!\()", re.IGNORECASE)
# `place` of a session is its owner and its key.
_CARRIES_OWNER = re.compile(r"\bowner\s*=\s*%\(owner\)s|\bplace\s*=\s*ARRAY\[(?:%\(owner\)s|w\.owner)")

_BATCH = "batches/read.sql read_batch"
_REQUESTED = "batches/validate.sql request_batch_if_ready"
_RERUN = "batches/run_again.sql hold_if_known"
_STEERED = "batches/steer.sql cancel_if_unfinished"
_FILE = "erase/erase.sql find_file"
_ERASED = "erase/erase.sql find_batch"
_UPLOAD = "intake/intake.sql read_upload"
_SESSION = "sessions/sessions.sql find_lane"
# Statements without the owner, and the one that found their row under it: what each is given is that one's answer.
FOUND_BY = {
    "batches/finish.sql close_if_past_deadline": _STEERED,
    "batches/finish.sql finish_if_over": _STEERED,
    "batches/finish.sql fail_if_validating": _REQUESTED,
    "batches/jobs.sql read_jobs": _BATCH,
    "batches/reprocess.sql find_operation_by_key": _BATCH,
    "batches/reprocess.sql list_operations": _BATCH,
    "batches/run_again.sql reopen_if_ended": _RERUN,
    "batches/run_again.sql rerun_if_held": _RERUN,
    "batches/run_again.sql list_unrun": _STEERED,
    "batches/run_again.sql hold_first_unrun": _STEERED,
    "batches/steer.sql hold_batch": _STEERED,
    "batches/validate.sql read_wish": _REQUESTED,
    "batches/validate.sql validate_if_validating": _REQUESTED,
    "deliver/deliver.sql read_signing_keys": "deliver/deliver.sql find_endpoint_if_owned",
    "erase/erase.sql hold_file_if_there": _FILE,
    "erase/erase.sql cancel_batches_of_file": _FILE,
    "erase/erase.sql erase_file_if_held": _FILE,
    "erase/erase.sql erase_result_if_held": _FILE,
    "erase/erase.sql hold_batch_if_there": _ERASED,
    "erase/erase.sql hold_job": _ERASED,
    "erase/erase.sql erase_batch_if_held": _ERASED,
    "erase/erase.sql has_other_batches": _ERASED,
    "erase/erase.sql erase_session_if_held": "erase/erase.sql hold_session_if_there",
    "erase/erase.sql is_in_use": "erase/erase.sql hold_session_if_there",
    "export/export.sql read_ended": _BATCH,
    "export/export.sql list_lanes_with_inputs": _BATCH,
    "export/export.sql find_lanes_between": _BATCH,
    "export/grid.sql read_columns": _BATCH,
    "intake/intake.sql add_part_if_pending": _UPLOAD,
    "intake/intake.sql hold_upload_if_open": _UPLOAD,
    "intake/intake.sql complete_upload": _UPLOAD,
    "intake/intake.sql cancel_upload": _UPLOAD,
    "intake/intake.sql give_up_parts": _UPLOAD,
    "sessions/sessions.sql find_known": _SESSION,
    "sessions/sessions.sql list_undecided": _SESSION,
    "sessions/sessions.sql list_cancelled": _SESSION,
    "sessions/sessions.sql list_cancelled_newest_first": _SESSION,
    "sessions/sessions.sql find_requests_at": _SESSION,
    "sessions/sessions.sql resume_if_held": "sessions/sessions.sql hold_lane_if_blocked",
    "settle/settle.sql settle_cancelled_if_next": _SESSION,
}
# Statements whose row no request names: it was made by the request itself.
MADE_HERE = {
    f"intake/intake.sql {name}"
    for name in (
        *("hold_if_ingesting", "seal_if_ingesting", "fail_if_ingesting", "read_state", "hold_if_failed"),
        "forget_if_failed",
    )
}
# Statements that answer the row's owner, which the caller in `sessions/answers.py` compares.
COMPARED = {"sessions/sessions.sql find_requests"}
# Calls in the API that ask for anybody's row by its id. What is followed or watched was found under its owner before;
# events are made for the operator's sinks.
FOR_ANYBODY = {
    ("follow.py", "get_batch"),
    ("ticks.py", "read_work"),
    ("ticks.py", "read_details"),
    ("events.py", "get_request"),
}

TEXTS = {
    f"{path.relative_to(ROOT)} {statement.name}": statement.text.decode()
    for path in sorted(ROOT.rglob("*.sql"))
    if path.parent.name != "migrations"
    for statement in sql.parse(path.name, path.read_text("utf-8"))
}


def reads_owned(text: str) -> bool:
    return bool(set(_READS.findall(text)) & OWNED)


def carries_owner(text: str) -> bool:
    return bool(_CARRIES_OWNER.search(text))


def for_tenants() -> set[str]:
    """Statements that read owned rows and that a tenant's request can come to."""
    handlers = [getattr(each.handle, "func", each.handle) for each in endpoints() if each.role == "user"]
    return {name for name in reachable_statements(handlers) if reads_owned(TEXTS[name])}


@pytest.fixture(scope="module")
def reached() -> set[str]:
    return for_tenants()


def test_statements_for_tenants_carry_the_owner(reached: set[str]) -> None:
    without = {name for name in reached if not carries_owner(TEXTS[name])}
    assert without - FOUND_BY.keys() - MADE_HERE - COMPARED == set(), (
        "give these an owner, or say in FOUND_BY which statement has found their row under it"
    )


def test_nothing_is_excepted_that_need_not_be(reached: set[str]) -> None:
    excepted = {*FOUND_BY, *MADE_HERE, *COMPARED}
    assert {name for name in excepted if name not in reached or carries_owner(TEXTS[name])} == set()


def test_what_finds_rows_for_others_carries_the_owner(reached: set[str]) -> None:
    for name in set(FOUND_BY.values()):
        assert carries_owner(TEXTS[name]), name
        assert name in reached


def test_there_is_something_to_check(reached: set[str]) -> None:
    known = {"batches/read.sql read_batch", "deliver/deliver.sql list_endpoints", "sessions/sessions.sql find_lane"}
    assert known <= reached
    assert len(reached) > 60


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("SELECT id FROM penstock.files WHERE id = %(id)s", (True, False)),
        ("SELECT id FROM penstock.files WHERE id = %(id)s AND owner = %(owner)s", (True, True)),
        ("SELECT owner FROM penstock.batches b JOIN penstock.files f ON f.owner = b.owner", (True, False)),
        ("UPDATE penstock.sessions SET x = 1 WHERE place = ARRAY[%(owner)s::text, %(key)s]", (True, True)),
        ("SELECT body FROM penstock.templates WHERE source_id = %(source)s", (False, False)),
    ],
)
def test_a_missing_owner_is_noticed(text: str, verdict: tuple[bool, bool]) -> None:
    assert (reads_owned(text), carries_owner(text)) == verdict


# -- None as an owner is everybody: a handler passes its caller's scope


def owner_positions() -> dict[str, int]:
    """Where functions of the engine take an owner that may be None."""
    found: dict[str, int] = {}
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for at, each in enumerate(node.args.args):
                    if each.arg == "owner" and each.annotation and "None" in ast.unparse(each.annotation):
                        found[node.name] = at
    return found


def calls_for_anybody() -> Iterator[tuple[str, str]]:
    positions = owner_positions()
    for path in (ROOT / "api").glob("*.py"):
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func).rpartition(".")[2]
            given = [word.value for word in node.keywords if word.arg == "owner"]
            if name in positions and len(node.args) > positions[name]:
                given.append(node.args[positions[name]])
            if any(isinstance(value, ast.Constant) and value.value is None for value in given):
                yield path.name, name


def test_no_handler_asks_for_anybodys_rows() -> None:
    assert len(owner_positions()) > 5
    assert set(calls_for_anybody()) == FOR_ANYBODY

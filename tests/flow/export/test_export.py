from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from penstock.batches.finish import finish_batch
from penstock.batches.steer import cancel_batch
from penstock.claim import claim as claims
from penstock.db.pool import Connection
from penstock.errors import PenstockError
from penstock.export.jsonl import errors_path, export_files
from penstock.model import BatchState, Outcome, OutcomeState
from penstock.settle.write import Changes, settle
from tests.support.db import with_connection
from tests.support.engine import claim_due, make_batch

COMPLETED, FAILED = OutcomeState.COMPLETED, OutcomeState.FAILED


async def settle_first(connection: Connection, count: int, *outcomes: Outcome) -> None:
    """Settle the first `count` items of each route with the outcomes, in turn."""
    worker = uuid4()
    for route in await claims.list_routes_with_work(connection, "test"):
        leases = await claim_due(connection, pool="test", wants={route: count}, worker_id=worker, taper_floor=count)
        changes = Changes()
        for lease in leases:
            items = await claims.read_bodies(connection, lease, lease.ranges, max_rows=count, max_bytes=1 << 20)
            for number, item in enumerate(items):
                changes.decide(item, outcomes[number % len(outcomes)])
        await settle(connection, worker, changes)


def made(conninfo: str, totals: list[int], count: int, *outcomes: Outcome, cancel: bool = False) -> UUID:
    async def body(connection: Connection) -> UUID:
        batch_id = await make_batch(connection, totals)
        await settle_first(connection, count, *outcomes)
        if cancel:
            await cancel_batch(connection, batch_id)
        assert await finish_batch(connection, batch_id)
        return batch_id

    return with_connection(conninfo, body)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def test_answers_and_failures_come_in_input_order(database: str, tmp_path: Path) -> None:
    refused = Outcome(FAILED, b'{"error": {"message": "no"}}', 400, "req_1", "bad", "no")
    lost = Outcome(FAILED, None, None, None, "connection_reset", "it broke")
    batch_id = made(database, [4, 4], 4, Outcome(COMPLETED, b'{"a": 1}', 201, "req_9"), refused, lost)
    done = export_files(database, batch_id, BatchState.COMPLETED, tmp_path / "out.jsonl")
    good, bad = lines(tmp_path / "out.jsonl"), lines(tmp_path / "out.errors.jsonl")
    assert (done.output_lines, done.error_lines) == (4, 4)
    assert [line["custom_id"] for line in good] == ["0-0", "1-0", "0-3", "1-3"]
    assert [line["custom_id"] for line in bad] == ["0-1", "1-1", "0-2", "1-2"]
    assert good[0] == {
        "id": f"batch_req_{batch_id.hex}_1",
        "custom_id": "0-0",
        "response": {"status_code": 201, "request_id": "req_9", "body": {"a": 1}},
        "error": None,
    }
    assert bad[0]["response"]["body"] == {"error": {"message": "no"}}
    assert bad[0]["error"] is None
    assert bad[2]["response"] is None
    assert bad[2]["error"] == {"code": "connection_reset", "message": "it broke"}


@pytest.mark.parametrize(
    "body",
    [b'{\n  "a": [\r\n 1 ]\n}', '"one\u2028two\u2029three\u0085four"'.encode(), b'"\xf0\x9f\x8c\x8a \\n"'],
    ids=["pretty-printed", "line separators", "non-ASCII"],
)
def test_every_answer_is_one_line_and_the_same_json(database_18: str, tmp_path: Path, body: bytes) -> None:
    batch_id = made(database_18, [1], 1, Outcome(COMPLETED, body, 200))
    export_files(database_18, batch_id, BatchState.COMPLETED, tmp_path / "out.jsonl")
    text = (tmp_path / "out.jsonl").read_text("utf-8")
    assert len(text.splitlines()) == 1
    assert json.loads(text)["response"]["body"] == json.loads(body)


def test_what_a_cancelled_batch_never_ran_is_said_line_by_line(database: str, tmp_path: Path) -> None:
    batch_id = made(database, [3_000, 2], 1, Outcome(COMPLETED, b"1", 200), cancel=True)
    done = export_files(database, batch_id, BatchState.CANCELLED, tmp_path / "out.jsonl")
    assert (done.output_lines, done.error_lines) == (2, 3_000)
    bad = lines(tmp_path / "out.errors.jsonl")
    assert [line["custom_id"] for line in bad[:3]] == ["0-1", "1-1", "0-2"]
    assert {line["error"]["code"] for line in bad} == {"batch_cancelled"}


def test_an_old_errors_file_goes_when_there_are_no_errors(database_18: str, tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    errors_path(output).write_text("old")
    batch_id = made(database_18, [2], 2, Outcome(COMPLETED, b"1", 200))
    assert export_files(database_18, batch_id, BatchState.COMPLETED, output).errors is None
    assert [path.name for path in tmp_path.iterdir()] == ["answers.jsonl"]


def test_a_failed_write_leaves_what_was_there(database_18: str, tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    output.write_text("before")
    errors_path(output).mkdir()
    batch_id = made(database_18, [2], 2, Outcome(FAILED, b"1", 400))
    with pytest.raises(PenstockError, match="cannot write"):
        export_files(database_18, batch_id, BatchState.COMPLETED, output)
    assert output.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answers.errors.jsonl", "answers.jsonl"]


@pytest.mark.parametrize(
    ("output", "errors"), [("a.jsonl", "a.errors.jsonl"), ("a", "a.errors"), ("a.b.json", "a.b.errors.json")]
)
def test_where_failures_go(output: str, errors: str) -> None:
    assert errors_path(Path(output)) == Path(errors)

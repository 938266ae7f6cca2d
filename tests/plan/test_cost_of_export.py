"""A page of results costs its rows, whatever the batch's size and wherever in it the page is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime

import pytest

from penstock.db import sql
from penstock.db.arrays import Int4Array, Int8Array
from penstock.db.pool import Connection
from penstock.export.follow import number_lines
from penstock.export.grid import find_grid, find_ordinals, list_live, read_columns, read_grid, stretches
from penstock.export.merged import read_attempts_page, read_results_page
from penstock.export.order import read_inputs, read_results
from tests.plan.conftest import SMALL
from tests.plan.crowd import Subject, fresh_database, inform, make_subject
from tests.support.plans import Mode, Plan, Session

_SQL = sql.load("penstock.export", "export.sql")
_PAGE = 100
_PER_ENTRY = 10

_JOURNAL = (
    # One entry for ten lines, all of them numbered.
    "INSERT INTO penstock.journal (batch_id, lane_id, completed, others, written_at, outputs_before, errors_before)"
    " SELECT %(batch)s, %(lane)s,"
    "        int4multirange(int4range(n * %(per)s + 1, (n + 1) * %(per)s)),"
    "        int4multirange(int4range(n * %(per)s, n * %(per)s + 1)),"
    "        (SELECT finished_at FROM penstock.outcomes WHERE lane_id = %(lane)s LIMIT 1), n * (%(per)s - 1), n"
    "   FROM generate_series(0, %(half)s / %(per)s - 1) AS n"
)
_HEAD = (
    "INSERT INTO penstock.journal_heads (batch_id, outputs, errors)"
    " SELECT batch_id, sum(completed_count), sum(others_count) FROM penstock.journal GROUP BY batch_id"
)
_OTHERS = (
    # Batches that must not matter, in the same tables.
    "INSERT INTO penstock.journal (batch_id, lane_id, completed, others, written_at)"
    " SELECT gen_random_uuid(), 0, '{[0,1)}', '{}', now()"
    "   FROM generate_series(0, %(half)s / %(per)s - 1) AS n"
)


@dataclass(frozen=True, slots=True)
class Journalled:
    session: Session
    subject: Subject
    written_at: datetime


Operation = Callable[[Journalled, Connection], Awaitable[None]]


@pytest.fixture(scope="module")
def built(any_server: str) -> Iterator[tuple[Journalled, Journalled]]:
    with ExitStack() as stack:
        made = []
        for lines in (SMALL, 100_000):
            session = stack.enter_context(fresh_database(any_server))
            session.execute("ALTER TABLE penstock.journal SET (autovacuum_enabled = false)")
            session.execute("ANALYZE")
            subject = make_subject(session, lines)
            values = {"batch": subject.batch, "lane": subject.lane, "half": lines // 2, "per": _PER_ENTRY}
            session.execute(_JOURNAL, values)
            session.execute(_OTHERS, values)
            session.execute(_HEAD)
            ((written_at,),) = session.execute("SELECT min(finished_at) FROM penstock.outcomes")
            made.append(Journalled(session, subject, written_at))
        small, large = made
        yield small, large


@pytest.fixture(scope="module", params=["analysed-empty", "analysed"])
def sizes(request: pytest.FixtureRequest, built: tuple[Journalled, Journalled]) -> tuple[Journalled, Journalled]:
    for at in built:
        inform(at.session, request.param)
    return built


async def rows_of(connection: Connection, name: str, values: Mapping[str, object], least: int = 1) -> None:
    assert len(await (await connection.execute(_SQL[name], values)).fetchall()) >= least


async def keys(at: Journalled, connection: Connection) -> None:
    middle = at.subject.lines // 4
    values = {"lanes": Int8Array([at.subject.lane]), "starts": Int4Array([middle]), "rows": _PAGE}
    await rows_of(connection, "read_keys", values, _PAGE)


async def keys_not_completed(at: Journalled, connection: Connection) -> None:
    values = {"lane": at.subject.lane, "start": 0, "rows": 5}
    await rows_of(connection, "read_keys_not_completed", values, 5)


async def keys_missing(at: Journalled, connection: Connection) -> None:
    subject = at.subject
    start = subject.lines // 2 - _PAGE // 2
    values = {"lanes": Int8Array([subject.lane]), "starts": Int4Array([start]), "rows": _PAGE}
    await rows_of(connection, "list_decided", values)


async def inputs_at(at: Journalled, connection: Connection) -> None:
    found = await read_inputs(connection, [(at.subject.source, 0, ordinal) for ordinal in _middle(at)])
    assert len(found) == _PAGE
    assert None not in found


async def outcomes_in_a_row(at: Journalled, connection: Connection) -> None:
    assert None not in await read_results(connection, [(at.subject.lane, ordinal) for ordinal in _middle(at)])


async def outcomes_apart(at: Journalled, connection: Connection) -> None:
    places = [(at.subject.lane, ordinal) for ordinal in range(0, at.subject.lines // 4, at.subject.lines // 4 // _PAGE)]
    assert None not in await read_results(connection, places[:_PAGE])


def _middle(at: Journalled) -> list[int]:
    return list(range(at.subject.lines // 4, at.subject.lines // 4 + _PAGE))


async def journal_outputs(at: Journalled, connection: Connection) -> None:
    """From the middle: a page of them, and none of what is before."""
    values = {"batch": at.subject.batch, "offset": at.subject.lines // 4, "rows": 20, "lines": _PAGE}
    await rows_of(connection, "read_journal_outputs", values, 10)


async def journal_errors(at: Journalled, connection: Connection) -> None:
    values = {"batch": at.subject.batch, "offset": at.subject.lines // 4 // _PER_ENTRY, "rows": 20, "lines": _PAGE}
    await rows_of(connection, "read_journal_errors", values, 10)


async def journal_end(at: Journalled, connection: Connection) -> None:
    """Nothing new: what a poller asks again and again."""
    values = {"batch": at.subject.batch, "offset": at.subject.lines, "rows": 500, "lines": 2_000}
    await rows_of(connection, "read_journal_outputs", values, 0)


async def journal_numbers(at: Journalled, connection: Connection) -> None:
    """Nothing to number, beside batches that nobody follows."""
    assert await number_lines(connection, at.subject.batch, "errors") > 0


async def keys_written(at: Journalled, connection: Connection) -> None:
    starts = list(range(at.subject.lines // 4, at.subject.lines // 4 + _PAGE, _PER_ENTRY))
    values = {
        "lanes": Int8Array([at.subject.lane] * len(starts)),
        "starts": Int4Array(starts),
        "stops": Int4Array([start + _PER_ENTRY for start in starts]),
        "times": [at.written_at] * len(starts),
        "completed": True,
    }
    await rows_of(connection, "read_keys_written", values, _PAGE // 2)


async def lines(at: Journalled, connection: Connection) -> None:
    middle = at.subject.lines // 4
    values = {"batch": at.subject.batch, "after_line": middle, "last_line": middle + _PAGE}
    await rows_of(connection, "find_lanes_between", values)


async def merged(at: Journalled, connection: Connection) -> None:
    """Half of the page has outcomes."""
    after_line = at.subject.lines // 2 - _PAGE // 2
    assert len(await read_results_page(connection, at.subject.batch, after_line, _PAGE)) == _PAGE


async def attempts(at: Journalled, connection: Connection) -> None:
    place = (at.subject.lane, at.subject.lines // 4, 0)
    assert len(await read_attempts_page(connection, at.subject.batch, place, _PAGE)) == _PAGE


async def undecided(at: Journalled, connection: Connection) -> None:
    where = {"batch": at.subject.batch, "lanes": Int8Array([at.subject.lane]), "ranges": None}
    stretch = {"starts": Int4Array([0]), "stops": Int4Array([_PAGE])}
    await rows_of(connection, "list_undecided", where | stretch, 0)


async def keys_of_state(at: Journalled, connection: Connection) -> None:
    where = {"lane": at.subject.lane, "state": "failed", "start": at.subject.lines // 4, "rows": 5}
    await rows_of(connection, "read_keys_of_state", where, 5)


async def ended(at: Journalled, connection: Connection) -> None:
    await rows_of(connection, "read_ended", {"batch": at.subject.batch})


async def lanes_with_inputs(at: Journalled, connection: Connection) -> None:
    await rows_of(connection, "list_lanes_with_inputs", {"batch": at.subject.batch})


async def grid(at: Journalled, connection: Connection) -> None:
    """Rows of a job from the middle on, with what became of each."""
    lane = await find_grid(connection, at.subject.batch)
    assert lane is not None
    live = await list_live(connection, at.subject.batch)
    start = at.subject.lines // 4
    assert len(await read_grid(connection, lane, live, [(start, start + _PAGE)])) == _PAGE


async def grid_of_state(at: Journalled, connection: Connection) -> None:
    """Rows far between: those that failed."""
    found = await find_grid(connection, at.subject.batch)
    assert found is not None
    live = await list_live(connection, at.subject.batch)
    ordinals = await find_ordinals(connection, found, live, {"ERROR"}, 0, 5)
    assert len(await read_grid(connection, found, live, stretches(ordinals))) == 5


async def columns(at: Journalled, connection: Connection) -> None:
    assert await read_columns(connection, at.subject.batch) is None


_PAGES: list[Operation] = [
    *(
        grid,
        grid_of_state,
        columns,
        keys,
        keys_not_completed,
        keys_missing,
        inputs_at,
        outcomes_in_a_row,
        outcomes_apart,
        journal_outputs,
        journal_errors,
        journal_end,
    ),
    *(journal_numbers, keys_written, lines, merged, attempts, undecided, keys_of_state, ended, lanes_with_inputs),
]


@pytest.mark.parametrize("mode", [Mode.CUSTOM, Mode.GENERIC], ids=str)
@pytest.mark.parametrize("operation", _PAGES, ids=lambda operation: operation.__name__)
def test_a_page_costs_its_rows(sizes: tuple[Journalled, Journalled], operation: Operation, mode: Mode) -> None:
    small, large = (_explain(at, operation, mode) for at in sizes)
    assert large.buffers <= 2 * small.buffers + 20, f"{small.buffers} buffers became {large.buffers}:\n{large}"
    assert large.rows_handled <= 2 * small.rows_handled + 20, f"{large}"


def _explain(at: Journalled, operation: Operation, mode: Mode) -> Plan:
    return at.session.explain(lambda connection: operation(at, connection), mode)

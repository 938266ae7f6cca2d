"""What deleting costs follows what is deleted: neither the rows that stay nor those that went before count."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from uuid import UUID, uuid4

import pytest

from penstock.db import sql
from penstock.db.pool import Connection
from penstock.erase.purge import purge_step
from tests.plan.crowd import World, Worlds, fresh_database, make_subject
from tests.support.plans import Mode, Plan, Session

Operation = Callable[[World, Connection], Awaitable[object]]

_ERASE = sql.load("penstock.erase", "erase.sql")
_SMALL_TABLES = {"gates", "owners", "workers", "webhook_endpoints"}
_PAGE = 100
_BEYOND = 2**62

_MARKER = UUID(int=1)
_OUTPUT = UUID(int=2)
_NEIGHBOURS = (
    # Erasures under way with most of their stretches done, and finished ones.
    "INSERT INTO penstock.erasures (id, owner, kind, object_id, requested_at, finished_at)"
    " SELECT gen_random_uuid(), 'local', 'file', gen_random_uuid(), now(), CASE WHEN n % 50 > 0 THEN now() END"
    "   FROM generate_series(1, {few}) AS n",
    "INSERT INTO penstock.erasure_pieces (erasure_id, what, key, source_lane, next, total)"
    " SELECT e.id, 'templates', -1, n, CASE WHEN n = 0 AND e.finished_at IS NULL THEN 0 ELSE 9 END, 9"
    "   FROM penstock.erasures e, generate_series(0, 3) AS n",
    "INSERT INTO penstock.file_chunks SELECT source_id, n, 1, 'x' FROM penstock.files, generate_series(0, 3) AS n",
    "INSERT INTO penstock.reclaims (lane_id, lease_id, batch_id, worker_id, reclaimed_by, ordinals, attempt, reclaims,"
    "  reclaimed_at)"
    " SELECT id, 0, batch_id, gen_random_uuid(), gen_random_uuid(), '{{[0,1)}}', 1, 1, now()"
    "   FROM penstock.lanes, generate_series(1, 3)",
    "INSERT INTO penstock.blobs (owner, digest, size)"
    " SELECT 'local', sha256(source_id::text::bytea), 1 FROM penstock.files",
    "INSERT INTO penstock.blob_uses SELECT -id, 0, n, id FROM penstock.blobs, generate_series(0, 3) AS n",
    # One whose last stretch is done.
    "INSERT INTO penstock.erasures (id, owner, kind, object_id, requested_at)"
    " VALUES ('{marker}', 'local', 'file', '{marker}', '-infinity')",
    "INSERT INTO penstock.erasure_pieces (erasure_id, what, key, source_lane, next, total)"
    " VALUES ('{marker}', 'templates', -1, 0, 9, 9)",
    "INSERT INTO penstock.files (id, owner, filename, state, kind, purpose, batch_id, created_at, sealed_at)"
    " VALUES ('{output}', 'local', 'f', 'ready', 'output', 'batch_output', '{batch}', now(), now())",
)


@pytest.fixture(scope="module")
def ruins(worlds: Worlds) -> Iterator[Worlds]:
    for world in (worlds.small, worlds.large):
        for statement in _NEIGHBOURS:
            values = {"few": world.subject.lines // 20, "marker": _MARKER, "output": _OUTPUT}
            world.session.execute(statement.format(**values, batch=world.subject.batch))
        if worlds.statistics == "analysed":
            world.session.execute("ANALYZE")
    yield worlds
    for world in (worlds.small, worlds.large):
        for table in ("erasures", "erasure_pieces", "file_chunks", "reclaims"):
            world.session.execute(f"TRUNCATE penstock.{table}")
        world.session.execute("TRUNCATE penstock.blobs, penstock.blob_uses")
        world.session.execute(f"DELETE FROM penstock.files WHERE id = '{_OUTPUT}'")


def _stretch(world: World, what: str, **place: Any) -> Operation:
    """The statement that deletes the next rows of a stretch, from the middle on."""

    async def erase(_: World, connection: Connection) -> None:
        everything: dict[str, Any] = {"key": world.subject.lane, "batch_id": None, "source_lane": None}
        bounds = {"next": world.subject.lines // 4, "total": world.subject.lines, "rows": _PAGE}
        row = await (await connection.execute(_ERASE[f"erase_{what}"], everything | bounds | place)).fetchone()
        assert row is not None
        assert row[1] > 0, "nothing to delete would cost nothing"

    return erase


async def erase_templates(world: World, connection: Connection) -> None:
    await _stretch(world, "templates", key=world.subject.source, source_lane=0)(world, connection)


async def erase_chunks(world: World, connection: Connection) -> None:
    await _stretch(world, "chunks", key=world.subject.source, next=0, total=4)(world, connection)


async def erase_outcomes(world: World, connection: Connection) -> None:
    await _stretch(world, "outcomes")(world, connection)


async def erase_completed(world: World, connection: Connection) -> None:
    await _stretch(world, "completed")(world, connection)


async def erase_not_completed(world: World, connection: Connection) -> None:
    await _stretch(world, "not_completed", rows=3)(world, connection)


async def erase_attempts(world: World, connection: Connection) -> None:
    await _stretch(world, "attempts")(world, connection)


async def erase_reclaims(world: World, connection: Connection) -> None:
    await _stretch(world, "reclaims", next=0, total=_BEYOND)(world, connection)


async def erase_journal(world: World, connection: Connection) -> None:
    await _stretch(world, "journal", batch_id=world.subject.batch, next=0, total=_BEYOND)(world, connection)


async def erase_deferrals(world: World, connection: Connection) -> None:
    rows = {"batch_id": world.subject.batch, "next": 0, "total": 1, "rows": _PAGE}
    await connection.execute(_ERASE["erase_deferrals"], rows)


async def take_piece(_: World, connection: Connection) -> None:
    assert await (await connection.execute(_ERASE["take_piece"], {"after": 0})).fetchone() is not None


async def finish_one(_: World, connection: Connection) -> None:
    cursor = await connection.execute(_ERASE["finish_erasure_if_empty"], {"id": _MARKER, "now": None})
    assert await cursor.fetchall() == [(_MARKER,)]


async def read_reports(_: World, connection: Connection) -> None:
    page = {"owner": "local", "from": UUID(int=0), "below": UUID(int=2**128 - 1), "limit": 20}
    assert len(await (await connection.execute(_ERASE["read_erasures"], page)).fetchall()) == 20


async def list_expired(_: World, connection: Connection) -> None:
    await connection.execute(_ERASE["list_expired"], {"limit": 20, "now": None})


async def list_archivable(_: World, connection: Connection) -> None:
    await connection.execute(_ERASE["list_archivable"], {"kept_s": 29 * 86_400.0, "limit": 20, "now": None})


async def erase_result(world: World, connection: Connection) -> None:
    where = {"file_id": _OUTPUT, "batch_id": world.subject.batch}
    order = {"erasure_id": uuid4(), "stretch": 100_000, "beyond": _BEYOND, "now": None}
    await connection.execute(_ERASE["erase_result_if_held"], where | order)


async def cancel_batches_of_file(world: World, connection: Connection) -> None:
    where = {"file_id": world.subject.file, "now": None}
    assert len(await (await connection.execute(_ERASE["cancel_batches_of_file"], where)).fetchall()) == 1


async def hold_leases(world: World, connection: Connection) -> None:
    cursor = await connection.execute(_ERASE["hold_leases"], {"ids": [world.subject.batch]})
    assert len(await cursor.fetchall()) == 1


async def close_lanes(world: World, connection: Connection) -> None:
    await connection.execute(_ERASE["close_lanes"], {"ids": [world.subject.batch]})


async def end_leases(world: World, connection: Connection) -> None:
    await connection.execute(_ERASE["end_leases_if_free"], {"ids": [world.subject.batch]})


async def erase_file(world: World, connection: Connection) -> None:
    where = {"file_id": world.subject.file, "batches": [world.subject.batch]}
    order = {"erasure_id": uuid4(), "stretch": 100_000, "beyond": _BEYOND, "now": None}
    await connection.execute(_ERASE["erase_file_if_held"], where | order)


async def erase_batch(world: World, connection: Connection) -> None:
    order = {"erasure_id": uuid4(), "stretch": 100_000, "now": None, "beyond": _BEYOND, "archived": False}
    await connection.execute(_ERASE["erase_batch_if_held"], {"batch_id": world.subject.batch} | order)


_STRETCHES: list[Operation] = [
    *(erase_templates, erase_chunks, erase_outcomes, erase_completed, erase_not_completed, erase_attempts),
    *(erase_reclaims, erase_journal, erase_deferrals),
]
_OTHERS: list[Operation] = [
    *(
        finish_one,
        read_reports,
        list_expired,
        list_archivable,
        cancel_batches_of_file,
        hold_leases,
        close_lanes,
        end_leases,
    ),
    *(erase_file, erase_batch, erase_result),
]


@pytest.mark.parametrize("mode", [Mode.CUSTOM, Mode.CHOSEN], ids=str)
@pytest.mark.parametrize("operation", [*_STRETCHES, *_OTHERS], ids=lambda operation: operation.__name__)
def test_cost_follows_what_is_deleted(ruins: Worlds, operation: Operation, mode: Mode) -> None:
    small, large = (_explain(world, operation, mode) for world in (ruins.small, ruins.large))
    assert large.buffers <= 2 * small.buffers + 20, f"{small.buffers} buffers became {large.buffers}:\n{large}"
    assert large.scanned_whole() <= _SMALL_TABLES | {"erasure_pieces", "sessions"}, f"{large}"


def test_a_stretch_is_found_among_those_that_are_done(ruins: Worlds) -> None:
    small, large = (_explain(world, take_piece, Mode.CUSTOM) for world in (ruins.small, ruins.large))
    assert large.buffers <= 2 * small.buffers + 10, f"{small.buffers} buffers became {large.buffers}:\n{large}"


def _explain(world: World, operation: Operation, mode: Mode) -> Plan:
    return world.session.explain(lambda connection: operation(world, connection), mode)


def test_a_step_costs_the_same_from_the_first_to_the_last(any_server: str) -> None:
    """Although what was deleted before is still there, for somebody who looks at an older snapshot."""
    with fresh_database(any_server) as session:
        subject = make_subject(session, 20_000)
        session.execute("ANALYZE")
        order = {"erasure_id": uuid4(), "stretch": 100_000, "beyond": _BEYOND, "now": None}
        session.run(
            lambda connection: connection.execute(
                _ERASE["erase_file_if_held"], {"file_id": subject.file, "batches": [], **order}
            )
        )
        first = _step_buffers(session, 0)
        for _ in range(18):
            assert session.run(lambda connection: purge_step(connection, 1_000)) == 1_000
        assert _step_buffers(session, 18_000) <= 1.2 * first + 10


def _step_buffers(session: Session, start: int) -> int:
    ((key,),) = session.execute("SELECT key FROM penstock.erasure_pieces WHERE what = 'templates'")
    place = {"key": key, "source_lane": 0, "next": start, "total": 20_000, "rows": 1_000}
    plan = session.explain(lambda connection: connection.execute(_ERASE["erase_templates"], place))
    return plan.buffers

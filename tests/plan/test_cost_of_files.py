"""Files cost what is read of them, however many there are and however large the others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from uuid import UUID

import pytest

from penstock.db import sql
from penstock.db.pool import Connection
from penstock.intake import files, parts
from tests.plan.crowd import fresh_database, inform
from tests.support.plans import Mode, Plan, Session

_SQL = sql.load("penstock.intake", "intake.sql")
_PAGE = 20
_FEW, _MANY = 600, 30_000

_FILES = (
    # Of five owners and two purposes, some deleted, expired, given up or under way.
    "INSERT INTO penstock.files (id, owner, filename, worker_id, state, created_at, sealed_at, deleted_at, expires_at,"
    "  purpose, idempotency_key, chunks, bytes)"
    " SELECT lpad(to_hex(n), 32, '0')::uuid, 'owner-' || n %% 5, 'f', gen_random_uuid(), state, now(),"
    "        CASE WHEN state = 'ready' THEN now() END, CASE n %% 7 WHEN 0 THEN now() END,"
    "        now() + interval '1 day', CASE n %% 2 WHEN 0 THEN 'batch' ELSE 'user_data' END, 'key-' || n, 3, 3"
    "   FROM generate_series(1, %(count)s) AS n,"
    "        LATERAL (SELECT CASE WHEN n > 20 OR n %% 10 > 1 THEN 'ready' WHEN n %% 10 = 1 THEN 'ingesting'"
    "                        ELSE 'failed' END AS state) AS drawn",
    "INSERT INTO penstock.file_chunks (source_id, chunk, size, bytes)"
    " SELECT source_id, n, 1, 'x' FROM penstock.files, generate_series(0, 2) AS n",
    "INSERT INTO penstock.uploads (id, owner, filename, purpose, mime_type, bytes, idempotency_key, created_at,"
    "  expires_at, cancelled_at)"
    " SELECT lpad(to_hex(n), 32, '0')::uuid, 'owner-' || n %% 5, 'f', 'batch', 'm', 1, 'key-' || n, now(),"
    "        now() - interval '1 day', CASE WHEN n > 20 THEN now() END FROM generate_series(1, %(count)s) AS n",
    "INSERT INTO penstock.upload_parts (upload_id, id, source_id, bytes, chunks, digest, created_at)"
    " SELECT id, gen_random_uuid(), 0, 1, 1, sha256('x'), now() FROM penstock.uploads, generate_series(1, 3)",
)


@dataclass(frozen=True)
class Store:
    session: Session
    count: int

    @property
    def middle(self) -> UUID:
        return UUID(int=self.count // 2)


Operation = Callable[[Store, Connection], Awaitable[object]]


@pytest.fixture(scope="module")
def built(any_server: str) -> Iterator[tuple[Store, Store]]:
    with ExitStack() as stack:
        few, many = (_store(stack.enter_context(fresh_database(any_server)), count) for count in (_FEW, _MANY))
        yield few, many


def _store(session: Session, count: int) -> Store:
    session.execute("ANALYZE")
    for statement in _FILES:
        session.execute(statement, {"count": count})
    return Store(session, count)


@pytest.fixture(scope="module", params=["analysed-empty", "analysed"])
def stores(request: pytest.FixtureRequest, built: tuple[Store, Store]) -> tuple[Store, Store]:
    for store in built:
        inform(store.session, request.param)
    return built


def list_page(purpose: str | None, ascending: bool, *, at_the_end: bool = False) -> Operation:
    async def list_files(store: Store, connection: Connection) -> None:
        after = None if at_the_end else store.middle
        page = await files.list_files(
            connection, owner="owner-2", purpose=purpose, after=after, limit=_PAGE, ascending=ascending
        )
        assert len(page) == _PAGE

    list_files.__name__ = f"list_{purpose or 'all'}_{'up' if ascending else 'down'}{'_from_the_end' * at_the_end}"
    return list_files


async def get_file(store: Store, connection: Connection) -> None:
    assert await files.get_file(connection, UUID(int=store.count // 2 // 35 * 35 + 2), None) is not None


async def read_chunk(store: Store, connection: Connection) -> None:
    cursor = await connection.execute(_SQL["read_chunk"], {"source_id": store.count // 2, "chunk": 1})
    assert await cursor.fetchone() == (1, b"x")


async def read_file_by_key(store: Store, connection: Connection) -> None:
    number = store.count // 2 // 35 * 35 + 2
    key = {"owner": f"owner-{number % 5}", "idempotency_key": f"key-{number}"}
    assert await (await connection.execute(_SQL["read_file_by_key"], key)).fetchone() is not None


async def list_failed(_: Store, connection: Connection) -> None:
    assert len(await (await connection.execute(_SQL["list_failed"])).fetchall()) == 2


async def fail_if_abandoned(_: Store, connection: Connection) -> None:
    nobody: list[UUID] = []
    parameters = {"dead_workers": nobody, "grace_s": 30, "now": None}
    assert len(await (await connection.execute(_SQL["fail_if_abandoned"], parameters)).fetchall()) == 2


async def purge_chunks(store: Store, connection: Connection) -> None:
    place = {"source_id": store.count // 2, "chunk": 1, "rows": _PAGE}
    assert await (await connection.execute(_SQL["purge_chunks_from"], place)).fetchone() == (3, 2)


async def get_upload(store: Store, connection: Connection) -> None:
    assert await parts.get_upload(connection, store.middle, None) is not None


async def read_parts(store: Store, connection: Connection) -> None:
    assert len(await (await connection.execute(_SQL["read_parts"], {"upload_id": store.middle})).fetchall()) == 3


async def list_expired_uploads(_: Store, connection: Connection) -> None:
    parameters = {"limit": 100, "grace_s": 0, "now": None}
    assert len(await (await connection.execute(_SQL["list_expired_uploads"], parameters)).fetchall()) == 20


_READS = [
    *(list_page(purpose, ascending) for purpose in (None, "batch") for ascending in (False, True)),
    *(list_page(purpose, False, at_the_end=True) for purpose in (None, "batch")),
    *(get_file, read_chunk, read_file_by_key, get_upload, read_parts),
]
_SWEEPS = [list_failed, fail_if_abandoned, purge_chunks, list_expired_uploads]


def _explain(store: Store, operation: Operation, mode: Mode) -> Plan:
    return store.session.explain(lambda connection: operation(store, connection), mode)


def _check(stores: tuple[Store, Store], operation: Operation, mode: Mode, *, whole: set[str]) -> None:
    few, many = (_explain(store, operation, mode) for store in stores)
    assert many.buffers <= 2 * few.buffers + 20, f"{few.buffers} buffers became {many.buffers}:\n{many}"
    assert many.scanned_whole() <= whole, f"{many}"


@pytest.mark.parametrize("mode", list(Mode), ids=str)
@pytest.mark.parametrize("operation", _READS, ids=lambda operation: operation.__name__)
def test_cost_follows_the_rows_answered(stores: tuple[Store, Store], operation: Operation, mode: Mode) -> None:
    _check(stores, operation, mode, whole=set())


@pytest.mark.parametrize("stores", ["analysed"], indirect=True)
@pytest.mark.parametrize("operation", _SWEEPS, ids=lambda operation: operation.__name__)
def test_a_sweep_costs_what_it_sweeps(stores: tuple[Store, Store], operation: Operation) -> None:
    # Of files and uploads, it reads the index of those that are not whole, from end to end.
    _check(stores, operation, Mode.CUSTOM, whole={"files", "uploads", "workers"})


def test_rows_are_found_by_their_keys_alone() -> None:
    """A row's place means nothing where its table is spread over several nodes."""
    assert not [statement.name for statement in _SQL if b"ctid" in statement.text]

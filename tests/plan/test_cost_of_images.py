"""What an image costs to store, to read and to delete follows the images asked for, not those that exist."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from penstock.blobs.blobs import NewUse, Place, erase_images, read_images, run_steps, store_images
from penstock.db.pool import Connection
from tests.plan.conftest import LARGE, SMALL
from tests.plan.crowd import fresh_database, inform
from tests.support.plans import Mode, Plan, Session

_PAGE = 50
_SOURCE = 1
_FULL = (
    # Every line of a source has an image of its own; every tenth image is used by another source, too.
    "INSERT INTO penstock.blobs (owner, digest, size)"
    " SELECT 'local', sha256(n::text::bytea), 5 FROM generate_series(1, {lines}) AS n",
    "INSERT INTO penstock.blob_bytes SELECT id, 'image' FROM penstock.blobs",
    "INSERT INTO penstock.blob_uses SELECT 1, 0, row_number() OVER (ORDER BY id) - 1, id FROM penstock.blobs",
    "INSERT INTO penstock.blob_uses SELECT -ordinal - 1, 0, 0, blob_id FROM penstock.blob_uses WHERE ordinal % 10 = 0",
)


@dataclass(frozen=True, slots=True)
class Album:
    """One source with an image for each of its lines."""

    session: Session
    lines: int


Operation = Callable[[Album, Connection], Awaitable[object]]


@pytest.fixture(scope="module")
def built(any_server: str) -> Iterator[tuple[Album, Album]]:
    with ExitStack() as stack:
        small, large = (_built(stack.enter_context(fresh_database(any_server)), lines) for lines in (SMALL, LARGE))
        yield small, large


def _built(session: Session, lines: int) -> Album:
    session.execute("ANALYZE")
    for statement in _FULL:
        session.execute(statement.format(lines=lines))
    return Album(session, lines)


@pytest.fixture(scope="module", params=["analysed-empty", "analysed"])
def albums(request: pytest.FixtureRequest, built: tuple[Album, Album]) -> tuple[Album, Album]:
    for album in built:
        inform(album.session, request.param)
    return built


async def store(album: Album, connection: Connection) -> None:
    """Half of them are there already."""
    contents = [str(number).encode() for number in range(album.lines - _PAGE // 2, album.lines + 2)]
    uses = [NewUse(at, hashlib.sha256(content).digest(), b"image") for at, content in enumerate(contents)]
    await run_steps(connection, store_images("local", Place(2**40, 0), uses))


async def read(album: Album, connection: Connection) -> None:
    start = album.lines // 2
    ordinals = list(range(start, start + 2 * _PAGE, 2))
    found = await read_images(connection, Place(_SOURCE, 0), ordinals, 1 << 20)
    assert len(found.by_ordinal) == _PAGE


async def erase(album: Album, connection: Connection) -> None:
    start, total = album.lines // 4, album.lines
    steps = erase_images(Place(_SOURCE, 0), start, total, _PAGE)
    assert await run_steps(connection, steps) == (start + _PAGE, _PAGE)


@pytest.mark.parametrize("mode", [Mode.CUSTOM, Mode.CHOSEN], ids=str)
@pytest.mark.parametrize("operation", [store, read, erase], ids=lambda operation: operation.__name__)
def test_cost_follows_the_images_asked_for(albums: tuple[Album, Album], operation: Operation, mode: Mode) -> None:
    small, large = (_explain(album, operation, mode) for album in albums)
    assert large.buffers <= 2 * small.buffers + 20, f"{small.buffers} buffers became {large.buffers}:\n{large}"
    assert not large.scanned_whole(), f"{large}"


def _explain(album: Album, operation: Operation, mode: Mode) -> Plan:
    return album.session.explain(lambda connection: operation(album, connection), mode)

"""What an image costs to store, to read and to delete follows the images asked for, not those that exist."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterator

import pytest

from penstock.blobs.blobs import NewUse, Place, erase_images, read_images, run_steps, store_images
from penstock.db.pool import Connection
from tests.plan.crowd import World, Worlds
from tests.support.plans import Mode, Plan

Operation = Callable[[World, Connection], Awaitable[object]]

_PAGE = 50
_FULL = (
    # Every line of the subject has an image of its own; every tenth image is used by another source, too.
    "INSERT INTO penstock.blobs (owner, digest, size)"
    " SELECT 'local', sha256(n::text::bytea), 5 FROM generate_series(1, {lines}) AS n",
    "INSERT INTO penstock.blob_bytes SELECT id, 'image' FROM penstock.blobs",
    "INSERT INTO penstock.blob_uses SELECT {source}, 0, row_number() OVER (ORDER BY id) - 1, id FROM penstock.blobs",
    "INSERT INTO penstock.blob_uses SELECT -ordinal - 1, 0, 0, blob_id FROM penstock.blob_uses WHERE ordinal % 10 = 0",
)


@pytest.fixture(scope="module")
def pictured(worlds: Worlds) -> Iterator[Worlds]:
    for world in (worlds.small, worlds.large):
        for statement in _FULL:
            world.session.execute(statement.format(lines=world.subject.lines, source=world.subject.source))
        if worlds.statistics == "analysed":
            world.session.execute("ANALYZE")
    yield worlds
    for world in (worlds.small, worlds.large):
        world.session.execute("TRUNCATE penstock.blobs, penstock.blob_bytes, penstock.blob_uses")


async def store(world: World, connection: Connection) -> None:
    """Half of them are there already."""
    contents = [str(number).encode() for number in range(world.subject.lines - _PAGE // 2, world.subject.lines + 2)]
    uses = [NewUse(at, hashlib.sha256(content).digest(), b"image") for at, content in enumerate(contents)]
    await run_steps(connection, store_images("local", Place(2**40, 0), uses))


async def read(world: World, connection: Connection) -> None:
    start = world.subject.lines // 2
    ordinals = list(range(start, start + 2 * _PAGE, 2))
    found = await read_images(connection, Place(world.subject.source, 0), ordinals, 1 << 20)
    assert len(found.by_ordinal) == _PAGE


async def erase(world: World, connection: Connection) -> None:
    start, total = world.subject.lines // 4, world.subject.lines
    steps = erase_images(Place(world.subject.source, 0), start, total, _PAGE)
    assert await run_steps(connection, steps) == (start + _PAGE, _PAGE)


@pytest.mark.parametrize("mode", [Mode.CUSTOM, Mode.CHOSEN], ids=str)
@pytest.mark.parametrize("operation", [store, read, erase], ids=lambda operation: operation.__name__)
def test_cost_follows_the_images_asked_for(pictured: Worlds, operation: Operation, mode: Mode) -> None:
    small, large = (_explain(world, operation, mode) for world in (pictured.small, pictured.large))
    assert large.buffers <= 2 * small.buffers + 20, f"{small.buffers} buffers became {large.buffers}:\n{large}"
    assert not large.scanned_whole(), f"{large}"


def _explain(world: World, operation: Operation, mode: Mode) -> Plan:
    return world.session.explain(lambda connection: operation(world, connection), mode)

"""A running batch is followed: every line once, in an order that never changes, whoever commits when."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Iterable
from typing import Any
from uuid import UUID, uuid4

import pytest

from penstock.batches.finish import finish_batch
from penstock.batches.run_again import retry_batch
from penstock.db.pool import Connection, Pool
from penstock.export import follow
from penstock.export.follow import Page, number_lines, read_journal_page
from penstock.export.read import Which
from penstock.model import Item, Lease, Outcome, OutcomeState
from penstock.settle.write import Changes, settle
from tests.support.db import connected, one, pooled
from tests.support.engine import claim_due, make_batch

GOOD = Outcome(OutcomeState.COMPLETED, b'"good"', 200)
BAD = Outcome(OutcomeState.FAILED, b'"bad"', 400, None, "bad", "no")
WORKER = uuid4()
BUDGET = 1 << 20


def on_pool(conninfo: str, body: Callable[[Pool, Connection], Awaitable[None]]) -> None:
    async def run() -> None:
        async with pooled(conninfo) as database, database.connection() as connection:
            await body(database, connection)

    asyncio.run(run())


async def leased(connection: Connection, count: int, route: str = "model-0") -> Lease:
    (lease,) = await claim_due(connection, pool="test", wants={route: count}, worker_id=WORKER, taper_floor=count)
    return lease


async def decide(connection: Connection, lease: Lease, ordinals: Iterable[int], outcome: Outcome = GOOD) -> None:
    changes = Changes()
    for ordinal in ordinals:
        name = f"{lease.source_lane}-{ordinal}"
        changes.decide(Item(lease, ordinal, ordinal + 1, name, b"{}"), outcome)
    settled = await settle(connection, WORKER, changes)
    assert settled.outcomes == len(changes.outcomes)


def names(page: Page) -> list[str]:
    return [json.loads(line)["custom_id"] for line in page.lines]


async def all_of(
    database: Pool, batch_id: UUID, which: Which = "output", offset: int = 0, max_bytes: int = BUDGET
) -> tuple[list[str], int]:
    found: list[str] = []
    while True:
        page = await read_journal_page(database, batch_id, which, offset, max_bytes)
        if not page.lines:
            return found, offset
        found += names(page)
        offset = page.after


def test_lines_come_in_the_order_of_their_being_decided(database: str) -> None:
    async def body(pool: Pool, connection: Connection) -> None:
        batch_id = await make_batch(connection, [20, 20])
        first, second = await leased(connection, 20), await leased(connection, 20, "model-1")
        page = await read_journal_page(pool, batch_id, "output", 0, BUDGET)
        assert (page.lines, page.after) == ([], 0)
        await decide(connection, second, [7, 3, 4])
        await decide(connection, first, [5])
        await decide(connection, first, [0], BAD)
        await decide(connection, second, [0, 1])
        found, end = await all_of(pool, batch_id)
        assert found == ["1-3", "1-4", "1-7", "0-5", "1-0", "1-1"]
        assert end == 6
        assert (await all_of(pool, batch_id, offset=end)) == ([], end)
        assert (await all_of(pool, batch_id, "errors"))[0] == ["0-0"]
        await decide(connection, first, [6])
        assert (await all_of(pool, batch_id, offset=end))[0] == ["0-6"]
        for offset in range(8):
            assert (await all_of(pool, batch_id, offset=offset))[0] == [*found, "0-6"][offset:]

    on_pool(database, body)


@pytest.mark.parametrize("max_bytes", [1, 600, 2_000, BUDGET])
@pytest.mark.parametrize("ordinals", [1, 5, 2_000])
def test_pages_of_any_size_say_the_same(
    database_18: str, monkeypatch: pytest.MonkeyPatch, max_bytes: int, ordinals: int
) -> None:
    monkeypatch.setattr(follow, "_ORDINALS", ordinals)
    monkeypatch.setattr(follow, "_ENTRIES", 3)

    async def body(pool: Pool, connection: Connection) -> None:
        batch_id = await make_batch(connection, [60])
        lease = await leased(connection, 60)
        left = list(range(60))
        random.Random(7).shuffle(left)
        expected: dict[OutcomeState, list[str]] = {OutcomeState.COMPLETED: [], OutcomeState.FAILED: []}
        for number, size in enumerate((1, 9, 2, 14, 1, 1, 20)):
            some, left = left[:size], left[size:]
            outcome = BAD if number % 3 == 2 else GOOD
            await decide(connection, lease, some, outcome)
            expected[outcome.state] += [f"0-{ordinal}" for ordinal in sorted(some)]
        good = expected[OutcomeState.COMPLETED]
        assert (await all_of(pool, batch_id, max_bytes=max_bytes))[0] == good
        assert (await all_of(pool, batch_id, "errors", max_bytes=max_bytes))[0] == expected[OutcomeState.FAILED]
        for offset in range(0, len(good) + 2, 5):
            assert (await all_of(pool, batch_id, offset=offset, max_bytes=max_bytes))[0] == good[offset:]

    on_pool(database_18, body)


def test_who_asks_for_lines_to_come_gets_them_from_there(database_18: str) -> None:
    async def body(pool: Pool, connection: Connection) -> None:
        batch_id = await make_batch(connection, [10])
        lease = await leased(connection, 10)
        await decide(connection, lease, [0, 1])
        page = await read_journal_page(pool, batch_id, "output", 4, BUDGET)
        assert (page.lines, page.after) == ([], 4)
        await decide(connection, lease, [2, 3, 4, 5])
        page = await read_journal_page(pool, batch_id, "output", 4, BUDGET)
        assert (names(page), page.offsets) == (["0-4", "0-5"], [5, 6])

    on_pool(database_18, body)


def test_commits_out_of_order_neither_hide_nor_repeat_a_line(database: str) -> None:
    """The transaction that began first commits last: its lines come after those that were there to be read."""

    async def body(pool: Pool, connection: Connection) -> None:
        batch_id = await make_batch(connection, [30])
        leases = [await leased(connection, 10) for _ in range(3)]
        async with connected(database) as slow, connected(database) as quick:
            await decide(connection, leases[0], range(2))
            await slow.execute("BEGIN")
            await decide(slow, leases[1], range(10, 12))
            await decide(quick, leases[2], range(20, 22))
            found, offset = await all_of(pool, batch_id)
            assert found == ["0-0", "0-1", "0-20", "0-21"]
            await quick.execute("BEGIN")
            await decide(quick, leases[2], range(22, 24))
            await slow.execute("COMMIT")
            more, offset = await all_of(pool, batch_id, offset=offset)
            assert more == ["0-10", "0-11"]
            await quick.execute("ROLLBACK")
            await decide(quick, leases[2], range(22, 24))
            more, offset = await all_of(pool, batch_id, offset=offset)
            assert (more, offset) == (["0-22", "0-23"], 8)
            assert (await all_of(pool, batch_id, offset=2))[0] == ["0-20", "0-21", "0-10", "0-11", "0-22", "0-23"]

    on_pool(database, body)


def test_a_reader_among_many_writers_sees_every_line_once(database: str) -> None:
    async def body(pool: Pool, connection: Connection) -> None:
        total, writers = 600, 4
        batch_id = await make_batch(connection, [total])
        leases = [await leased(connection, total // writers) for _ in range(writers)]

        async def write(lease: Lease, seed: int) -> None:
            rng = random.Random(seed)
            ordinals = [ordinal for start, stop in lease.ranges for ordinal in range(start, stop)]
            async with connected(database) as mine:
                while ordinals:
                    size = rng.randint(1, 7)
                    await mine.execute("BEGIN")
                    await decide(mine, lease, ordinals[:size])
                    for _ in range(rng.randint(0, 3)):  # others commit meanwhile
                        await mine.execute("SELECT 1")
                    await mine.execute("COMMIT")
                    ordinals = ordinals[size:]

        writing = asyncio.gather(*(write(lease, number) for number, lease in enumerate(leases)))
        found: list[str] = []
        offset = 0
        while True:
            finished = writing.done()
            more, offset = await all_of(pool, batch_id, offset=offset, max_bytes=2_000)
            found += more
            if finished and not more:
                break
        await writing
        assert sorted(found) == sorted(f"0-{ordinal}" for ordinal in range(total))
        assert (await all_of(pool, batch_id))[0] == found

    on_pool(database, body)


def test_two_readers_at_once_see_the_same_order(database: str) -> None:
    """Both give numbers; whichever gives them, they are the same for both."""

    async def body(pool: Pool, connection: Connection) -> None:
        batch_id = await make_batch(connection, [200])
        lease = await leased(connection, 200)
        seen: list[list[str]] = [[], []]

        async def read(number: int) -> None:
            offset = 0
            while len(seen[number]) < 200:
                more, offset = await all_of(pool, batch_id, offset=offset)
                seen[number] += more

        async with asyncio.TaskGroup() as group:
            for number in range(2):
                group.create_task(read(number))
            for ordinal in range(0, 200, 4):
                await decide(connection, lease, range(ordinal, ordinal + 4))
        assert seen[0] == seen[1] == (await all_of(pool, batch_id))[0]

    on_pool(database, body)


def test_errors_that_ran_again_are_passed_over_and_keep_their_numbers(database: str) -> None:
    async def body(pool: Pool, connection: Connection) -> None:
        batch_id = await make_batch(connection, [10])
        lease = await leased(connection, 6)
        await decide(connection, lease, [0, 1, 2, 3], BAD)
        assert (await all_of(pool, batch_id, "errors"))[0] == ["0-0", "0-1", "0-2", "0-3"]
        assert (await retry_batch(connection, batch_id, "local", lines=[2, 3])).requests == 2
        # Until there is something new, the last outcome is what there is.
        assert (await all_of(pool, batch_id, "errors"))[0] == ["0-0", "0-1", "0-2", "0-3"]
        again = await leased(connection, 2)
        assert again.ranges == ((1, 3),)
        await decide(connection, again, [1])
        await decide(connection, again, [2], BAD)
        assert await number_lines(connection, batch_id, "errors") == 5
        page = await read_journal_page(pool, batch_id, "errors", 0, BUDGET)
        assert (names(page), page.offsets) == (["0-0", "0-3", "0-2"], [1, 4, 5])
        assert (await all_of(pool, batch_id))[0] == ["0-1"]
        for offset, left in ((2, ["0-3", "0-2"]), (4, ["0-2"]), (5, [])):
            assert (await all_of(pool, batch_id, "errors", offset))[0] == left

    on_pool(database, body)


def test_lines_keep_their_numbers_in_a_new_cluster(database: str) -> None:
    """R29: transaction ids do not come along with a dump; those of the new cluster may be lower than any in it."""

    async def body(pool: Pool, connection: Connection) -> None:
        batch_id = await make_batch(connection, [20])
        lease = await leased(connection, 20)
        await decide(connection, lease, range(3))
        await decide(connection, lease, range(3, 6))
        assert (await all_of(pool, batch_id))[0] == [f"0-{n}" for n in range(6)]
        await decide(connection, lease, range(6, 9))
        await connection.execute("UPDATE penstock.journal SET xact = (xact::text::int8 + 1000000)::text::xid8")
        await decide(connection, lease, range(9, 12))
        found, _ = await all_of(pool, batch_id)
        assert found[:6] == [f"0-{n}" for n in range(6)]
        assert sorted(found) == sorted(f"0-{n}" for n in range(12))
        for offset in range(12):
            assert (await all_of(pool, batch_id, offset=offset))[0] == found[offset:]
        await decide(connection, lease, range(12, 15))
        assert (await all_of(pool, batch_id))[0] == [*found, "0-12", "0-13", "0-14"]

    on_pool(database, body)


def test_whoever_is_still_writing_elsewhere_keeps_nobody_from_reading(database: str) -> None:
    async def body(pool: Pool, connection: Connection) -> None:
        batch_id = await make_batch(connection, [3])
        lease = await leased(connection, 3)
        async with connected(database) as elsewhere:
            await elsewhere.execute("BEGIN")
            await elsewhere.execute("SELECT pg_current_xact_id()")
            await decide(connection, lease, range(3))
            assert (await all_of(pool, batch_id))[0] == ["0-0", "0-1", "0-2"]
            assert await finish_batch(connection, batch_id)
            assert (await all_of(pool, batch_id))[0] == ["0-0", "0-1", "0-2"]

    on_pool(database, body)


def test_a_large_answer_is_a_page_of_its_own(database_18: str) -> None:
    large = Outcome(OutcomeState.COMPLETED, b'"' + b"x" * 3_000_000 + b'"', 200)

    async def body(pool: Pool, connection: Connection) -> None:
        batch_id = await make_batch(connection, [5])
        lease = await leased(connection, 5)
        await decide(connection, lease, range(5), large)
        offset = 0
        for _ in range(5):
            page = await read_journal_page(pool, batch_id, "output", offset, BUDGET)
            assert len(page.lines) == 1
            offset = page.after
        assert not (await read_journal_page(pool, batch_id, "output", offset, BUDGET)).lines

    on_pool(database_18, body)


def test_lines_are_those_of_the_output_file(database_18: str) -> None:
    async def body(pool: Pool, connection: Connection) -> None:
        batch_id = await make_batch(connection, [1])
        await decide(connection, await leased(connection, 1), [0])
        page = await read_journal_page(pool, batch_id, "output", 0, BUDGET)
        (line,) = page.lines
        said: dict[str, Any] = json.loads(line)
        assert line.endswith(b"\n")
        assert said["response"]["body"] == "good"
        assert await one(connection, "SELECT output_bytes FROM penstock.progress") == (len(line),)

    on_pool(database_18, body)

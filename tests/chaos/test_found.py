"""What chaos runs have found, each in the smallest form that shows it."""

from __future__ import annotations

import asyncio

import psycopg

from penstock.tasks import cancel_and_wait


async def _loop_over_a_breaking_connection() -> None:
    """Tries again after database errors. The connection breaks while its statement is being cancelled."""
    broken = False
    while True:
        try:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if broken:
                    raise
                broken = True
                raise psycopg.OperationalError("the connection is closed") from None
        except psycopg.Error:
            continue


def test_a_loop_whose_cancellation_was_lost_to_a_broken_connection_ends_all_the_same() -> None:
    async def ends() -> bool:
        task = asyncio.create_task(_loop_over_a_breaking_connection())
        await asyncio.sleep(0)
        async with asyncio.timeout(10):
            await cancel_and_wait([task])
        return task.cancelled()

    assert asyncio.run(ends())

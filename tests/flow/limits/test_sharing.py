"""One limit for all processes: of a provider whose calls are counted by a real upstream."""

from __future__ import annotations

import asyncio

from penstock.config import Config
from penstock.dispatch.throttle import Callers, Throttle
from penstock.limits.sharing import ProviderLimits
from tests.support.db import pooled


def test_processes_share_a_limit_and_one_that_leaves_frees_its_part(database_18: str) -> None:
    async def busy(limits: ProviderLimits) -> tuple[Throttle, Callers]:
        throttle = limits.add("main", "serve:main", cap=10)
        return throttle, Callers(throttle)

    async def want(callers: Callers, calls: int) -> list[asyncio.Task[None]]:
        tasks = [asyncio.create_task(callers.take("m", 30.0)) for _ in range(calls)]
        await asyncio.sleep(0)
        return tasks

    async def scenario() -> None:
        async with pooled(database_18) as pool:
            first, second = ProviderLimits(Config(), pool), ProviderLimits(Config(), pool)
            (one, callers_one), (two, callers_two) = await busy(first), await busy(second)
            assert one.capacity == two.capacity == 0  # nothing may be called before the first round
            waiting = await want(callers_one, 30)
            await first.round()
            assert (one.capacity, one.in_flight) == (10, 10)
            more = await want(callers_two, 30)
            await second.round()
            assert two.capacity == 0  # all slots are in use
            await first.round()
            for _ in range(5):
                callers_one.free("m")
            await first.round()
            await second.round()
            assert (one.in_flight, two.in_flight) == (5, 5)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            async with first.running():
                pass
            await second.round()
            assert two.capacity == 10
            for task in more:
                task.cancel()
            await asyncio.gather(*more, return_exceptions=True)
            one.close()
            two.close()

    asyncio.run(scenario())


def test_a_gate_that_another_process_closed_is_obeyed(database_18: str) -> None:
    from penstock.claim import gates
    from penstock.db.pool import borrowed

    async def scenario() -> None:
        async with pooled(database_18) as pool:
            limits = ProviderLimits(Config(), pool)
            throttle = limits.add("main", "serve:main")
            async with borrowed(pool) as connection:
                await gates.close(connection, "session:main", "m", 60, "rate_limit", "slower")
            await limits.round()
            assert 50 < throttle.route("m").wait_s(asyncio.get_running_loop().time()) <= 60

    asyncio.run(scenario())

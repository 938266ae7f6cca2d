"""Kickoffs that wait for one job look at it together."""

from __future__ import annotations

import asyncio
from typing import Any, cast
from uuid import UUID

import pytest

from penstock.claim.claim_job import JobWork
from penstock.config import Config
from penstock.dispatch.providers import Providers
from penstock.server import kickoff
from penstock.server.kickoff import Kickoffs

JOB = UUID(int=1)
WAITERS = 50


class Lender:
    """Lends nothing, to anybody."""

    def of(self, _owner: str) -> Lender:
        return self

    async def getconn(self) -> None:
        await asyncio.sleep(0)

    async def putconn(self, _connection: None) -> None:
        await asyncio.sleep(0)


def test_all_who_wait_for_a_job_share_each_look(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = 0

    async def read(_connection: object, job: UUID) -> JobWork | None:
        nonlocal reads
        reads += 1
        assert job == JOB
        return None

    monkeypatch.setattr(kickoff, "read_work", read)

    async def run() -> None:
        kickoffs = Kickoffs(Config(), "", cast(Any, Lender()), Providers(()), cast(Any, None))
        await asyncio.gather(*(kickoffs.work(JOB, "a", 0.5) for _ in range(WAITERS)))
        await kickoffs.close()

    asyncio.run(run())
    assert reads < 3 * WAITERS, "each looks when it comes and when it goes"

"""What one process does for all goes on when something of it cannot be done."""

from __future__ import annotations

import asyncio
import logging

import pytest

from penstock.batches.read import read_status
from penstock.config import Config
from penstock.dispatch.providers import Providers
from penstock.model import BatchState
from penstock.server.background import BackgroundDuties
from tests.support.db import connected
from tests.support.db import pooled as open_pooled
from tests.support.engine import make_file
from tests.support.wishes import POOL, ask_for


class Stumbling(Providers):
    """Serves every model, except that the first to ask is not answered."""

    def __init__(self) -> None:
        super().__init__(())
        self.asked = 0

    def __len__(self) -> int:
        return 1

    def pool_of(self, model: str) -> str | None:
        self.asked += 1
        if self.asked == 1:
            raise RuntimeError(model)
        return POOL


def test_a_batch_that_cannot_be_validated_does_not_keep_the_younger_ones_waiting(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with open_pooled(database) as pool, connected(database) as connection:
            file_id = await make_file(connection, [3])
            older, younger = [await ask_for(connection, file_id, validated=False) for _ in range(2)]
            async with BackgroundDuties(Config(), database, pool, Stumbling()) as caretaker, asyncio.timeout(30):
                while (await read_status(connection, younger)).state is not BatchState.IN_PROGRESS:
                    await asyncio.sleep(0.01)
                assert (await read_status(connection, older)).state is BatchState.VALIDATING
                caretaker.wake("validate")
                while (await read_status(connection, older)).state is not BatchState.IN_PROGRESS:
                    await asyncio.sleep(0.01)

    with caplog.at_level(logging.ERROR, "penstock.background"):
        asyncio.run(run())
    assert "RuntimeError" in caplog.text

"""`penstock.connect`: batches and sessions from Python, over HTTP and on the database itself."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import penstock
from tests.support.cli import request_line, write_requests
from tests.support.mock_process import start_mock_process
from tests.support.server import ServerProcess, served


async def _use(client: penstock.Client, running: ServerProcess, folder: Path) -> None:
    batch = await client.submit([request_line(f"r-{n}", f"question {n}") for n in range(20)], metadata={"by": "me"})
    assert (await client.wait(batch.id)).completed == 20
    found = [line async for line in client.results(batch.id)]
    assert [line["custom_id"] for line in found] == [f"r-{n}" for n in range(20)]
    with running.frozen_workers():  # it does not end before it is cancelled
        batch = await client.submit(write_requests(folder / "requests.jsonl", 5))
        assert batch.id in (await client.cancel(batch.id)).raw["id"]
    assert (await client.wait(batch.id)).ended
    with pytest.raises(penstock.PenstockError, match="No such Batch"):
        await client.status("batch_00000000000000000000000000000000")


async def _converse(client: penstock.Client) -> None:
    body: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": "Hello"}]}
    answer = await client.session("chat-1").send(body, request_key="one")
    assert answer["status"] == "completed"
    assert (await client.session("chat-1").send(body, request_key="one"))["id"] == answer["id"]


def test_on_a_server_and_on_its_database(tmp_path: Path, database_18: str) -> None:
    async def use(**place: Any) -> None:
        async with asyncio.timeout(60), penstock.connect(**place) as client:
            await _use(client, running, tmp_path)
            if "server" in place:  # a database knows the providers of penstock.toml alone
                await _converse(client)

    with start_mock_process() as mock, served(tmp_path, "--base-url", mock.base_url, database=database_18) as running:
        asyncio.run(use(server=running.url))
        asyncio.run(use(database_url=database_18))
    with pytest.raises(penstock.UsageError, match="at once"):
        asyncio.run(use(server=running.url, data_dir=tmp_path))

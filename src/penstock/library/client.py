"""`penstock.connect`: batches and sessions of a server, or of a database, from Python. It speaks the API that the
commands speak, over HTTP or to the application in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import uuid4

from penstock.client.api import Api
from penstock.client.local import open_local_transport
from penstock.client.remote import HttpTransport
from penstock.client.upload import Source
from penstock.errors import PenstockError, UsageError
from penstock.library.options import load_config

Json = dict[str, Any]

_CHAT = "/v1/chat/completions"
_FIRST_LOOK_S = 0.1
_LAST_LOOK_S = 2.0
_WAIT_S = 20.0
_ENDED = ("completed", "failed", "cancelled", "expired")
_ANSWERED = ("completed", "failed", "cancelled")


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch at one instant."""

    id: str
    status: str
    """As the batch API says it: `validating`, `in_progress`, `completed`, `failed`, `cancelling`, ..."""
    total: int
    completed: int
    failed: int
    raw: Json
    """The object as the API shows it."""

    @property
    def ended(self) -> bool:
        return self.status in _ENDED


@contextlib.asynccontextmanager
async def connect(
    server: str | None = None,
    *,
    api_key: str | None = None,
    data_dir: str | Path | None = None,
    database_url: str | None = None,
    settings: Mapping[str, object] | None = None,
) -> AsyncIterator[Client]:
    """Connect to the server at this address, or to a database itself: `async with penstock.connect(...) as client`.

    A server is called with `api_key`, or the key in PENSTOCK_API_KEY. A database is that at `database_url`, or the one
    in `data_dir` (`./.penstock`); what is submitted there is worked off by a server on the same data.
    """
    if server is not None:
        if data_dir is not None or database_url is not None:
            raise UsageError("a server and a database at once", hint="Give server, or data_dir, or database_url.")
        async with HttpTransport.of(server, api_key) as remote:
            yield Client(Api(remote))
        return
    if api_key is not None:
        raise UsageError("api_key without server", hint="A database needs none.")
    config = load_config(data_dir, database_url, settings)
    async with open_local_transport(config, uploads=True) as local:
        yield Client(Api(local))


class Client:
    """Client of a server or a database; `connect` makes it."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def submit(
        self,
        requests: Iterable[Mapping[str, Any]] | str | Path,
        *,
        endpoint: str | None = None,
        window: str = "24h",
        metadata: Mapping[str, str] | None = None,
    ) -> Batch:
        """Store requests, as objects or as a JSONL file, and make a batch of them. A request has `custom_id`, `url` and
        `body`; `endpoint` is the url of the first, if it is not given."""
        file, found = await self._upload(requests)
        asked: Json = {"input_file_id": file["id"], "endpoint": endpoint or found, "completion_window": window}
        if metadata:
            asked["metadata"] = dict(metadata)
        return _batch(await self._api.post("/v1/batches", asked, key=f"submit-{uuid4().hex}"))

    async def _upload(self, requests: Iterable[Mapping[str, Any]] | str | Path) -> tuple[Json, str]:
        query = {"purpose": "batch", "filename": "requests.jsonl"}
        key = f"submit-{uuid4().hex}"
        if isinstance(requests, str | Path):
            source = Source(Path(requests))

            async def read() -> AsyncIterator[bytes]:
                for piece, _ in source.pieces():
                    yield piece

            query["filename"] = source.filename
            file = await self._api.upload("PUT", "/v1/files", read, key=key, size=source.plain_size, query=query)
            return file, source.endpoint()
        lines = [json.dumps(request).encode() + b"\n" for request in requests]
        if not lines:
            raise UsageError("there are no requests", hint="Give at least one.")

        async def write() -> AsyncIterator[bytes]:
            for line in lines:
                yield line

        size = sum(map(len, lines))
        file = await self._api.upload("PUT", "/v1/files", write, key=key, size=size, query=query)
        return file, str(json.loads(lines[0]).get("url", _CHAT))

    async def status(self, batch_id: str) -> Batch:
        """Read a batch."""
        return _batch(await self._api.get(f"/v1/batches/{quote(batch_id)}"))

    async def cancel(self, batch_id: str) -> Batch:
        """Cancel a batch: calls in flight end, nothing new begins."""
        return _batch(await self._api.post(f"/v1/batches/{quote(batch_id)}/cancel"))

    async def wait(self, batch_id: str) -> Batch:
        """Wait until a batch has ended."""
        pause_s = _FIRST_LOOK_S
        while not (batch := await self.status(batch_id)).ended:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_LOOK_S)
        return batch

    async def results(self, batch_id: str) -> AsyncIterator[Json]:
        """The result lines of an ended batch, as the batch API has them: those with an answer, then those without."""
        batch = await self.status(batch_id)
        if not batch.ended:
            raise PenstockError(f"{batch_id} is {batch.status}", hint="Its results are whole when it has ended: wait.")
        for file in (batch.raw.get("output_file_id"), batch.raw.get("error_file_id")):
            if file is None:
                continue
            async with self._api.stream(f"/v1/files/{file}/content") as answer:
                held = b""
                async for piece in answer.pieces:
                    *lines, held = (held + piece).split(b"\n")
                    for line in lines:
                        yield json.loads(line)

    def session(self, key: str) -> Session:
        """The session of this key, made by its first request."""
        return Session(self._api, key)


class Session:
    """A session: one request at a time, in order. The history of a conversation is its caller's to send."""

    def __init__(self, api: Api, key: str) -> None:
        self._api = api
        self.key = key

    async def send(self, body: Mapping[str, Any], *, endpoint: str = _CHAT, request_key: str | None = None) -> Json:
        """Send a request and wait for its end. Returns it as the API shows it: `status`, `response`, `error`. Repeated
        with the same `request_key`, it is the same request."""
        place = f"/v1/sessions/{quote(self.key, safe='')}/requests"
        found = await self._api.post(
            place,
            {"endpoint": endpoint, "body": dict(body)},
            key=request_key or f"library-{uuid4().hex}",
            headers={"prefer": "respond-async"},
        )
        while found["status"] not in _ANSWERED:
            found = await self._api.get(f"{place}/{found['id']}", {"wait": f"{_WAIT_S:.0f}"})
        return found


def _batch(raw: Json) -> Batch:
    counts = raw.get("request_counts") or {}
    total, completed, failed = (int(counts.get(name, 0)) for name in ("total", "completed", "failed"))
    return Batch(raw["id"], raw["status"], total, completed, failed, raw)

"""API as commands and the library use it: over HTTP, or from the application in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol
from urllib.parse import urlencode

from penstock.backoff import Backoff
from penstock.errors import ExitCode, PenstockError, plain

Json = dict[str, Any]
Query = Mapping[str, str | int]
Body = Callable[[], AsyncIterator[bytes]]
"""Makes the body anew for every try."""

_PATIENCE_S = 15.0
_FIRST_PAUSE_S = 0.25
_LAST_PAUSE_S = 5.0
_RETRY_AFTER_MAX_S = 60.0
_ERROR_MAX_BYTES = 64 * 1024
_MESSAGE_CHARS = 2_000
# Statuses of a server that did not do it now, and may do it in a moment.
_PASSING = (429, 502, 503, 504)
_UNKNOWN = (404, 405)
_HINTS = {
    401: "Set PENSTOCK_API_KEY to a key of this server; on the server, `penstock keys create` makes one.",
    403: "The key in PENSTOCK_API_KEY may not do this: ask the server's admin.",
    404: "`penstock ls` lists the batches of this key on this server.",
    409: "`penstock show` tells its state.",
    413: "Split the file, or have the limit raised (docs/configuration.md).",
    429: "Try again in a moment.",
    503: "Try again in a moment; the server's log says what it lacks.",
    507: "Make room on the database's disk, then try again.",
}
_LOCAL_HINTS = {
    401: "See `--help`.",
    403: "See `--help`.",
    404: "`penstock ls` lists what is there.",
    503: "Try again in a moment; penstock.log in the data directory says what is lacking.",
}
"""The same where no server is asked."""
_LOG_HINTS = ("The server's log tells more.", "penstock.log in the data directory tells more.")


@dataclass(slots=True)
class Request:
    method: str
    path: str
    query: Query = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | Body | None = None

    @property
    def target(self) -> str:
        return f"{self.path}?{urlencode(self.query)}" if self.query else self.path


@dataclass(slots=True)
class Answer:
    """Answer: its head, and its body as it comes."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    pieces: AsyncIterator[bytes]

    async def whole(self, max_bytes: int | None = None) -> bytes:
        content = bytearray()
        async for piece in self.pieces:
            content += piece
            if max_bytes is not None and len(content) > max_bytes:
                break
        return bytes(content)


class Transport(Protocol):
    """Transport of requests. Raises Unreachable where no whole answer comes."""

    place: str
    """Name of the server or database, for error texts."""
    local: bool
    """Whether it reads the database itself rather than call a server."""

    def send(self, request: Request) -> AbstractAsyncContextManager[Answer]: ...

    async def is_served(self) -> bool:
        """Whether a server or a worker is alive on this data."""

    async def say_idle(self, name: str) -> str | None:
        """What is to be done so that the batch or job of this id is worked off; None if it is."""

    async def retry_run(self, name: str) -> int | None:
        """Let the failed rows of a run over a table be called again by its command; None where a server does that.
        Returns how many."""

    async def purge(self) -> Purged | None:
        """Remove the rows of what was deleted, and give their space back; None where a server does that."""


@dataclass(frozen=True, slots=True)
class Purged:
    """Bytes of the whole database before and after a purge."""

    before: int
    after: int
    shrunk: bool
    """Whether the files were made smaller; otherwise the space is used again."""


class Unreachable(PenstockError):  # noqa: N818 -- a state of affairs
    """Server that gave no whole answer."""

    def __init__(self, message: str, *, hint: str, sent: bool) -> None:
        super().__init__(message, hint=hint)
        self.sent = sent
        """Whether the request may have arrived."""


class Refused(PenstockError):  # noqa: N818 -- a verdict
    """Request that the server answered with an error."""

    def __init__(
        self,
        message: str,
        *,
        hint: str | None,
        status: int,
        code: str | None = None,
        retry_after_s: float | None = None,
        local: bool = False,
    ) -> None:
        super().__init__(message, hint=hint)
        self.local = local
        """Whether no server was asked: the application in this process refused it."""
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s
        if status in (400, 413, 422):
            self.exit_code = ExitCode.USAGE

    @property
    def passing(self) -> bool:
        """Whether the same request may be granted in a moment."""
        return self.status in _PASSING


class Api:
    """Client of the API: sends requests, repeats those that can be repeated, and explains errors."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._answered = False

    @property
    def local(self) -> bool:
        """Whether this reads the database itself rather than call a server."""
        return self._transport.local

    async def is_served(self) -> bool:
        """Whether a server or a worker is alive on this data."""
        return await self._transport.is_served()

    async def say_idle(self, name: str) -> str | None:
        """What is to be done so that the batch or job of this id is worked off; None if it is."""
        return await self._transport.say_idle(name)

    async def retry_run(self, name: str) -> int | None:
        """Let the failed rows of a run over a table be called again by its command; None where a server does that.
        Returns how many."""
        return await self._transport.retry_run(name)

    async def purge(self) -> Purged | None:
        """Remove the rows of what was deleted, and give their space back; None where a server does that."""
        return await self._transport.purge()

    async def get(self, path: str, query: Query | None = None, *, patience_s: float = _PATIENCE_S) -> Json:
        """Read an object. Tried again for `patience_s` when the server does not answer."""
        return await self._send_again(lambda: self._json(Request("GET", path, query or {})), patience_s)

    async def post(
        self, path: str, body: Json | None = None, *, key: str | None = None, headers: Mapping[str, str] | None = None
    ) -> Json:
        """Send a command, once. With an idempotency `key` it may be repeated: the server does the same thing only
        once."""
        headers = {"content-type": "application/json", **(headers or {})}
        if key is not None:
            headers["idempotency-key"] = key
        content = b"" if body is None else json.dumps(body).encode()
        return await self._send_again(
            lambda: self._json(Request("POST", path, headers=headers, body=content)), _PATIENCE_S if key else 0
        )

    async def upload(
        self,
        method: str,
        path: str,
        body: Body,
        *,
        key: str,
        size: int | None,
        query: Query | None = None,
        content_type: str = "application/octet-stream",
    ) -> Json:
        """Upload a stream. Repeated from its beginning if it was cut."""
        headers = {"content-type": content_type, "idempotency-key": key}
        if size is not None:
            headers["content-length"] = str(size)
        return await self._send_again(
            lambda: self._json(Request(method, path, query or {}, dict(headers), body)), patience_s=_PATIENCE_S
        )

    async def delete(self, path: str, query: Query | None = None) -> Json:
        """Delete an object. Sent once."""
        return await self._json(Request("DELETE", path, query or {}))

    @contextlib.asynccontextmanager
    async def stream(
        self, path: str, *, accept: str = "*/*", method: str = "GET", query: Query | None = None
    ) -> AsyncIterator[Answer]:
        """Read a body as it comes. One that is cut half-way raises; only the caller knows how to go on."""
        async with self._transport.send(Request(method, path, query or {}, {"accept": accept})) as answer:
            self._answered = True
            if answer.status != 200:
                raise await self._refused(answer)
            yield answer

    async def walk(self, path: str, *, page: int, **narrow: str) -> AsyncIterator[Json]:
        """Every object of a list that `narrow` leaves, page by page. The cursor is an id, so nothing is skipped or
        given twice."""
        query: dict[str, str | int] = {"limit": page, **narrow}
        while True:
            found = await self.get(path, query)
            for entry in found["data"]:
                yield entry
            if not found["has_more"] or not found["data"]:
                return
            query["after"] = found["data"][-1]["id"]

    async def _json(self, request: Request) -> Json:
        async with self._transport.send(request) as answer:
            self._answered = True
            if answer.status >= 300:
                raise await self._refused(answer)
            content = await answer.whole()
        if answer.status == 204:
            return {}
        try:
            found = json.loads(content)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise self._not_penstock(answer)
        return found

    async def _send_again(self, call: Callable[[], Any], patience_s: float) -> Json:
        give_up_at = monotonic() + patience_s
        backoff = Backoff(_FIRST_PAUSE_S, _LAST_PAUSE_S)
        while True:
            try:
                found: Json = await call()
            except Unreachable:
                # A server that has never answered is most likely not there: waiting would only hide that.
                if not self._answered or monotonic() > give_up_at:
                    raise
                wait_s = 0.0
            except Refused as refusal:
                if not refusal.passing or monotonic() > give_up_at:
                    raise
                wait_s = min(refusal.retry_after_s or 0.0, _RETRY_AFTER_MAX_S)
            else:
                return found
            await asyncio.sleep(max(wait_s, backoff.next_s()))

    async def _refused(self, answer: Answer) -> PenstockError:
        try:
            error = json.loads(await answer.whole(_ERROR_MAX_BYTES))["error"]
            message, code, param = plain(str(error["message"]), _MESSAGE_CHARS), error.get("code"), error.get("param")
        except (ValueError, TypeError, KeyError, AttributeError):
            return self._not_penstock(answer)
        status = answer.status
        # Penstock names what it does not have; without a name, it is the path that this server does not know.
        if status in _UNKNOWN and not (self.local or code or param):
            return self._not_penstock(answer)
        hint = {**_HINTS, **(_LOCAL_HINTS if self.local else {})}.get(status)
        if code == "unknown_url":
            hint = "The server is of another release than this command, or --server has a path too many."
        if status >= 500:
            trace = answer.headers.get("x-request-id")
            message = f"{self._transport.place} failed: {message}" + (
                f" (request {trace})" if trace and trace not in message else ""
            )
            hint = hint or _LOG_HINTS[self.local]
        retry_after_s = _seconds(answer.headers.get("retry-after"))
        return Refused(
            message,
            hint=hint or "See `--help`.",
            status=status,
            code=code,
            retry_after_s=retry_after_s,
            local=self.local,
        )

    def _not_penstock(self, answer: Answer) -> PenstockError:
        moved = answer.headers.get("location")
        if moved is not None and 300 <= answer.status < 400:
            return PenstockError(f"{self._transport.place} sends on to {moved}", hint="Give that address as --server.")
        return Refused(
            f"{self._transport.place} does not answer like Penstock: HTTP {answer.status}, "
            f"{answer.headers.get('content-type', 'no content type')}",
            hint="Check --server (or PENSTOCK_SERVER): the address `penstock serve` printed.",
            status=answer.status,
        )


def _seconds(text: str | None) -> float | None:
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None

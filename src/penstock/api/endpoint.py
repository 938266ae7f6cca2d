"""Calls as a handler sees them, with the caller and the server; and the endpoints that a module declares.

    async def retrieve(call: Call[None, None]) -> FileObject: ...

    ENDPOINTS = (Endpoint("GET", "/v1/files/{file_id}", retrieve, "One file.", errors=(404,)),)

`app` serves what the modules declare and `openapi` documents it, both from the same tuples and the handlers' types. A
handler returns a Struct, which is encoded as JSON with the endpoint's status, or a starlette Response, which is sent as
it is. It raises ApiError for every other answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints
from uuid import UUID

import msgspec
from starlette.responses import Response

from penstock.api.errors import Dialect, busy, not_found
from penstock.api.page_cursor import PageCursors, read_cursors
from penstock.model import parse_id
from penstock.shares import Shares

if TYPE_CHECKING:
    from starlette.requests import Request

    from penstock.api.follow import Hub
    from penstock.api.key_watch import KeyWatch
    from penstock.api.passthrough import Upstreams
    from penstock.api.ticks import Ticks
    from penstock.config import Config
    from penstock.db.pool import Connection, OwnerConnections, Pool
    from penstock.dispatch.providers import Providers
    from penstock.limits.sharing import ProviderLimits
    from penstock.observe.metrics import ProcessMetrics
    from penstock.observe.queue_figures import QueueFigures
    from penstock.quotas.quotas import Quota
    from penstock.server.acceptor import Acceptor
    from penstock.server.background import BackgroundDuties
    from penstock.server.halts import Halts
    from penstock.server.kickoff import Kickoffs
    from penstock.server.memory import Hold, MemoryBudget
    from penstock.server.quotas import OwnerQuotas
    from penstock.server.session_workers import SessionWorkers
    from penstock.server.waiters import Waiters

Role = Literal["user", "admin"]
_HIGHEST_PRIORITY = 100

Q = TypeVar("Q", covariant=True)
B = TypeVar("B", covariant=True)

# Names of objects in messages.
KIND_WORDS = {
    "file": "File",
    "batch": "Batch",
    "msgbatch": "MessageBatch",
    "upload": "Upload",
    "part": "UploadPart",
    "webhook": "WebhookEndpoint",
    "key": "Key",
    "erasure": "Erasure",
    "event": "Event",
    "session": "Session",
    "session_request": "SessionRequest",
    "job": "Job",
    "operation": "Operation",
}


@dataclass(frozen=True, slots=True)
class Caller:
    """Caller of a request: the owner behind its key."""

    owner: str
    role: Role
    key_id: UUID | None
    signed_in: bool = False
    """Whether it came by the console's cookie rather than by the key itself."""

    @property
    def scope(self) -> str | None:
        """Owner whose objects the caller reaches by id: itself; None, everybody, for an admin."""
        return None if self.role == "admin" else self.owner


@dataclass(slots=True)
class Server:
    """Server: the objects that the handlers of one process share."""

    config: Config
    conninfo: str
    database: Pool
    providers: Providers
    worker_id: UUID
    """Registered identity with a heartbeat: an intake that this process leaves half-done can be swept."""
    hub: Hub
    background: BackgroundDuties
    acceptor: Acceptor
    waiters: Waiters
    upstreams: Upstreams
    halts: Halts
    kickoffs: Kickoffs
    limits: ProviderLimits
    quotas: OwnerQuotas
    queue_figures: QueueFigures
    metrics: ProcessMetrics
    """Figures of this process and its worker processes."""
    memory: MemoryBudget
    """Memory for requests and answers."""
    key_watch: KeyWatch
    ticks: Ticks
    cursors: PageCursors | None = None
    """Maker of cursors, once its secret was read."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the server is going down: long polls and streams end soon after."""
    exports: Shares = field(init=False)
    """Places for sheets that are being written."""

    def __post_init__(self) -> None:
        self.exports = Shares(self.config.serve.max_exports)

    async def read_cursors(self, connection: Connection) -> PageCursors:
        """The maker of cursors. Its secret is the installation's: it is read once."""
        if self.cursors is None:
            self.cursors = await read_cursors(connection)
        return self.cursors

    @contextmanager
    def count_export(self, owner: str) -> Iterator[None]:
        """Count a sheet while it is written. Each has a connection of its own and a snapshot: beyond an owner's share
        of `max_exports`, 503."""
        if not self.exports.take_now(owner):
            raise busy("As many sheets as may be are being written just now. Try again.")
        try:
            yield
        finally:
            self.exports.give_back(owner)

    def stop(self) -> None:
        """End streams and waits; clients come again elsewhere."""
        self.stopping.set()
        self.hub.stop()
        self.ticks.stop()
        self.kickoffs.stop()
        self.waiters.stop()

    def start_sessions_with(self, workers: SessionWorkers) -> None:
        """Let these workers start requests as they are stored, and report answers to the callers that wait here."""
        workers.on_answers = self.waiters.take
        self.waiters.begin()
        self.acceptor.start_with(workers)

    async def close(self) -> None:
        """Close everything, after the last request."""
        self.stop()
        await self.key_watch.close()
        await self.acceptor.close()
        await self.waiters.close()
        await self.kickoffs.close()
        await self.queue_figures.close()
        await self.upstreams.close()

    def take_identity(self, worker_id: UUID) -> None:
        """Replace the identity: the old one was declared dead."""
        self.worker_id = self.background.worker_id = worker_id


class Camel(msgspec.Struct, rename="camel", kw_only=True):
    """Struct whose fields are camelCase on the wire."""


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a request that takes none: absent, or an empty object. Declare it as `Nothing | None`."""


class Call(Generic[Q, B]):
    """One request, read and checked."""

    __slots__ = ("body", "caller", "memory", "query", "request", "request_id", "server")

    def __init__(
        self, server: Server, caller: Caller, request: Request, request_id: str, memory: Hold, query: Q, body: B
    ) -> None:
        self.server = server
        self.caller = caller
        self.request = request
        self.request_id = request_id
        self.memory = memory
        self.query = query
        self.body = body

    @property
    def path(self) -> Mapping[str, str]:
        """The variable parts of the path."""
        found: dict[str, str] = self.request.path_params
        return found

    @property
    def database(self) -> OwnerConnections:
        """Connections for this call, of which its owner has no more at a time than it leaves to others."""
        return self.server.database.of(self.caller.owner)

    async def quota(self) -> Quota:
        """The limits of the caller's owner. A key of an admin may ask for any priority."""
        quota = await self.server.quotas.read(self.caller.owner)
        return msgspec.structs.replace(quota, max_priority=_HIGHEST_PRIORITY) if self.caller.role == "admin" else quota

    def id(self, kind: str, name: str) -> UUID:
        """The id in the path. One that cannot be an id answers like one that does not exist."""
        text = self.path[name]
        found = parse_id(kind, text)
        if found is None:
            raise not_found(KIND_WORDS[kind], text)
        return found

    def link(self, path: str) -> str:
        """URL of `path` for clients: below the configured public URL, or relative to the root they use."""
        public = self.server.config.public_url
        return f"{public}{path}" if public else path


class Encoded(Response):
    """Response that is encoded already and needs no headers of its own: faster than starlette's."""

    def __init__(self, body: bytes, status: int, media: str) -> None:
        self.status_code = status
        self.body = body
        self.background = None
        self.raw_headers = [(b"content-length", b"%d" % len(body)), (b"content-type", media.encode())]


Handler = Callable[[Call[Any, Any]], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One route. The types of its handler, which takes a `Call[query, body]` and returns the answer, are the checks and
    the documentation.

    A `body` is decoded from JSON: unknown fields answer 422, wrong types 400, each naming the field. `Thing | None`
    may be absent. Without a `body` nothing is read: the handler streams `call.request` itself; say with `stream`
    (media type) or `form` (JSON schema of the multipart fields) what it takes.
    """

    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
    path: str
    handle: Handler
    summary: str
    answer: Any = None
    """Type of the answer, where the handler returns it in a Response."""
    status: int = 200
    media: str = "application/json"
    """Of the answer, where it is not a Struct."""
    role: Literal["user", "admin", "anyone"] = "user"
    dialect: Dialect = "openai"
    form: Mapping[str, Any] | None = None
    stream: str | None = None
    errors: tuple[int, ...] = ()
    """Beyond those that follow from the role, the query and the body."""
    name: str = ""
    """`operationId`; the handler's name if empty."""
    counted: bool = True
    """Whether its requests count against the owner's requests per minute."""
    frees: bool = False
    """Whether it frees room, or protects, so that it has the room kept for that on a full disk. Each DELETE does."""
    query: type[Any] | None = field(init=False)
    body: Any = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "frees", self.frees or self.method == "DELETE")
        hints = get_type_hints(getattr(self.handle, "func", self.handle))  # `func` of a partial
        (call,) = (hint for hint in hints.values() if get_origin(hint) is Call)
        query, body = (None if kind is NoneType else kind for kind in get_args(call))
        object.__setattr__(self, "query", query)
        object.__setattr__(self, "body", body)
        if self.answer is None:
            returned = hints["return"]
            kinds = get_args(returned) if isinstance(returned, UnionType) else (returned,)
            object.__setattr__(self, "answer", next((kind for kind in kinds if kind is not Response), None))

"""The whole API as one ASGI application, composed from the endpoints its modules declare.

Everything that is the same for all routes happens here: request ids, keys, decoding, the shape of errors, the access
log. Nothing of a query, a body, a key or an exception's text is ever logged or answered.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache, partial
from random import getrandbits
from time import monotonic
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from penstock.api import (
    audit,
    batches,
    erasures,
    events,
    files,
    follow,
    health,
    ingestion,
    items,
    job_errors,
    job_kickoff,
    job_operations,
    job_rows,
    jobs,
    keys,
    me,
    messages,
    metrics,
    models,
    passthrough,
    pending,
    preview,
    providers,
    quotas,
    results,
    samples,
    sessions,
    ticks,
    uploads,
    webhooks,
    work,
    workers,
)
from penstock.api.access import SHOWN_PATH_CHARS, count_request, log_access
from penstock.api.auth import Auth, key_ended
from penstock.api.endpoint import Call, Caller, Encoded, Endpoint, Server
from penstock.api.errors import ApiError, Dialect, refusal
from penstock.api.failures import log_error, to_api_error
from penstock.api.guard import DropPace, Guard, SlowReaderError, read_body
from penstock.api.key_watch import KeyWatch
from penstock.api.openapi import document
from penstock.api.reading import check_url
from penstock.api.routes import Reader, Routes
from penstock.api.sign_in import check_origin
from penstock.api.upload_threads import upload_threads
from penstock.config import Config
from penstock.console import views
from penstock.db.embedded.reserve import do_with_reserve
from penstock.db.pool import Pool, open_pool
from penstock.dispatch.providers import Providers
from penstock.limits.sharing import ProviderLimits
from penstock.observe.metrics import ProcessMetrics
from penstock.observe.queue_figures import QueueFigures
from penstock.observe.traces import span
from penstock.pools import POOL
from penstock.server.acceptor import Acceptor
from penstock.server.adapter_scan import AdapterScans
from penstock.server.background import BackgroundDuties
from penstock.server.connections import is_crowded, trust_connection
from penstock.server.halts import Halts
from penstock.server.kickoff import Kickoffs
from penstock.server.memory import Hold, MemoryBudget, MemoryUsedUpError
from penstock.server.quotas import OwnerQuotas
from penstock.server.waiters import Waiters
from penstock.worker.identity import LastingIdentity

_PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)+")
_CLOSED_REQUEST = 499
_SESSION_CONNECTIONS = 3
_UNKNOWN = Caller("", "user", None)

_MODULES = (
    files,
    uploads,
    batches,
    results,
    follow,
    jobs,
    preview,
    job_rows,
    items,
    job_errors,
    samples,
    pending,
    audit,
    me,
    work,
    workers,
    ticks,
    ingestion,
    job_operations,
    job_kickoff,
    messages,
    sessions,
    events,
    passthrough,
    webhooks,
    erasures,
    models,
    providers,
    keys,
    quotas,
    health,
    metrics,
)


def endpoints() -> tuple[Endpoint, ...]:
    """Every route of the API."""
    return tuple(endpoint for module in _MODULES for endpoint in module.ENDPOINTS)


def create_app(server: Server, *, in_process: bool = False, trust_prefix: bool = False) -> Api:
    """Create the application. `in_process` is for a caller who has the database itself: every call is the local
    user's."""
    public = server.config.public_url
    host = urlsplit(public).hostname if public else None
    auth = Auth(server.database, server.config.serve.key_cache_s, public_host=host, in_process=in_process)
    declared = endpoints()
    if server.config.metrics.metrics_public:
        declared = tuple(replace(each, role="anyone") if each.path == metrics.PATH else each for each in declared)
    return Api(server, auth, declared, views.PAGES, trust_prefix=trust_prefix, counted=not in_process)


class Api:
    """The ASGI application."""

    def __init__(
        self,
        server: Server,
        auth: Auth,
        declared: Sequence[Endpoint],
        pages: Sequence[Endpoint] = (),
        *,
        trust_prefix: bool = False,
        counted: bool = True,
    ) -> None:
        """`pages` are for browsers, and not described. `counted` requests are limited in number."""
        self._server = server
        self._counted = counted
        self._auth = auth
        self._trust_prefix = trust_prefix
        self._root_path = server.config.root_path
        self._dropped = DropPace()
        described = Endpoint(
            "GET", "/openapi.json", self._describe, "This description.", answer=dict[str, Any], name="openapi"
        )
        self.endpoints = (*declared, described)
        self._document = cache(partial(document, self.endpoints))
        self._routes = Routes((*self.endpoints, *pages))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1000})
            return
        started = monotonic()
        path = self._mounted(scope)
        dialect: Dialect = "anthropic" if path.startswith("/v1/messages") else "openai"
        request_id = f"req_{getrandbits(96):024x}"  # it names a request and guards nothing
        memory = Hold(self._server.memory)
        guard = Guard(receive, send, self._server.config.serve, _constant_headers(dialect, request_id), memory)
        who, route, refused = _UNKNOWN, None, False
        try:
            response: Response
            try:
                request = Request(scope, guard.receive)
                route, who = await self._admit(request, path)
                if who is not _UNKNOWN:
                    memory.owner = who.owner
                    upload_threads().note_call(who.owner)
                    if who.key_id is not None:
                        self._server.key_watch.begin(who.key_id, guard)
                    trust_connection(scope, who.owner)
                response = await self._answer(route, who, request, request_id, memory)
                guard.cover(b"" if isinstance(response, StreamingResponse) else response.body)
            except (ClientDisconnect, SlowReaderError):
                if not guard.shut_out:
                    raise
                response = Response()
            except Exception as error:
                # Every failure is answered in the shape of the client's dialect.
                response = refusal(to_api_error(error, request_id), dialect, request_id)
                refused = True
            # Not where it was caught: with the exception goes what was read of the request.
            if refused and not (who is _UNKNOWN and is_crowded(scope)):
                await guard.linger(self._dropped, who.owner)
            # A stream is begun all the same, and broken off: it holds what only it can let go.
            if guard.shut_out and not isinstance(response, StreamingResponse):
                response = refusal(key_ended(), dialect, request_id)
                guard.open_for_refusal()
            await _send(response, scope, guard)
        except (ClientDisconnect, SlowReaderError, MemoryUsedUpError):
            pass  # nobody is left to be answered, or no memory for it; without an end, the connection is closed
        except Exception as error:
            # Too late for another answer: the connection is cut.
            log_error(error, request_id)
        finally:
            if who.key_id is not None:
                self._server.key_watch.end(who.key_id, guard)
            memory.release()
            seconds = monotonic() - started
            log_access(scope["method"], path, guard, who, seconds, request_id)
            count_request(route.endpoint if isinstance(route, Reader) else None, guard, seconds)

    def _mounted(self, scope: Scope) -> str:
        """The path as the routes know it: what a proxy put before it is taken off, if it left it there."""
        prefix = self._root_path
        if self._trust_prefix:
            for name, value in scope["headers"]:
                told = value.decode("latin-1").rstrip("/")
                if name == b"x-forwarded-prefix" and _PREFIX.fullmatch(told):
                    prefix = told
        path: str = scope["path"]
        if prefix:
            scope["root_path"] = prefix
            if path == prefix or path.startswith(f"{prefix}/"):
                path = path[len(prefix) :] or "/"
        return path

    async def _admit(self, request: Request, path: str) -> tuple[Reader | Response, Caller]:
        """Find the endpoint and the caller. Keys are checked first: a caller without one does not learn which routes
        exist."""
        check_url(request.scope)
        method = request.method
        found = self._routes.find(path)
        if found is None or (path == "/" and not views.wants_page(request.headers)):
            who = await self._auth.identify(request.headers)
            if self._counted:
                await self._server.quotas.admit(who.owner)
            raise ApiError(404, f"Invalid URL ({method} {path[:SHOWN_PATH_CHARS]})", code="unknown_url")
        methods, request.scope["path_params"] = found
        route = methods.get("GET" if method == "HEAD" else method)
        if route is not None and route.endpoint.role == "anyone":
            return route, _UNKNOWN
        who = await self._auth.identify(request.headers)
        if who.signed_in:
            check_origin(request, self._server.config.public_url)
        if self._counted and (route is None or route.endpoint.counted):
            admit = partial(self._server.quotas.admit, who.owner)
            frees = route is not None and route.endpoint.frees
            await (do_with_reserve(self._server.config.data_dir, admit) if frees else admit())
        if route is None:
            allowed = ", ".join(sorted({*methods, "OPTIONS", *(["HEAD"] if "GET" in methods else [])}))
            if method == "OPTIONS":
                return Response(status_code=204, headers={"allow": allowed}), who
            raise ApiError(
                405,
                f"{method} is not among this path's methods.",
                code="method_not_allowed",
                headers={"allow": allowed},
            )
        if route.endpoint.role == "admin" and who.role != "admin":
            raise ApiError(403, "This needs an admin's key.", type="permission_error", code="forbidden")
        return route, who

    async def _answer(
        self, reader: Reader | Response, who: Caller, request: Request, request_id: str, memory: Hold
    ) -> Response:
        if isinstance(reader, Response):
            return reader
        endpoint = reader.endpoint
        query = reader.query.read(request.scope["query_string"]) if reader.query else None
        body = None
        if reader.body is not None:
            content = await read_body(request, self._server.config.serve.max_json_bytes, memory)
            body = reader.body.read(content, request.headers.get("content-type"))
        with span(f"{endpoint.method} {endpoint.path}", "SERVER", caller=request.headers):
            handle = partial(endpoint.handle, Call(self._server, who, request, request_id, memory, query, body))
            data_dir = self._server.config.data_dir
            answer = await (do_with_reserve(data_dir, handle) if endpoint.frees else handle())
        if isinstance(answer, Response):
            return answer
        return Encoded(msgspec.json.encode(answer), endpoint.status, endpoint.media)

    async def _describe(self, call: Call[None, None]) -> Response:
        prefix = self._server.config.public_url or call.request.scope.get("root_path") or "/"
        return Response(
            msgspec.json.encode({**self._document(), "servers": [{"url": prefix}]}), media_type="application/json"
        )


def _constant_headers(dialect: Dialect, request_id: str) -> list[tuple[bytes, bytes]]:
    headers = [(b"x-request-id", request_id.encode()), (b"x-content-type-options", b"nosniff")]
    if dialect == "anthropic":
        headers.append((b"request-id", request_id.encode()))
    return headers


async def _send(response: Response, scope: Scope, guard: Guard) -> None:
    if scope["method"] == "HEAD":
        await guard.send(
            {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
        )
        await guard.send({"type": "http.response.body", "body": b""})
        return
    await response(scope, guard.receive, guard.send)


def make_server(
    config: Config,
    conninfo: str,
    database: Pool,
    known: Providers,
    worker_id: UUID,
    background: BackgroundDuties,
    sessions_database: Pool | None = None,
) -> Server:
    """Make what handlers share, to be closed after the last request. `sessions_database` is for the statements that the
    callers of all sessions wait for."""
    sessions_database = sessions_database or database
    limits = ProviderLimits(config, database)
    memory = MemoryBudget(config.serve.request_memory_bytes)
    return Server(
        config,
        conninfo,
        database,
        known,
        worker_id,
        follow.Hub(database, memory),
        background,
        Acceptor(sessions_database, config.sessions),
        Waiters(sessions_database, conninfo),
        passthrough.Upstreams(config, limits),
        Halts(database),
        Kickoffs(config, conninfo, database, known, limits),
        limits,
        OwnerQuotas(database, config.quotas, config.serve.key_cache_s),
        QueueFigures(config, database),
        ProcessMetrics(),
        memory,
        KeyWatch(database, config.serve.key_cache_s),
        ticks.Ticks(database, config.liveness.heartbeat_grace_s),
    )


@asynccontextmanager
async def open_server(config: Config, conninfo: str, known: Providers) -> AsyncIterator[Server]:
    """Open everything the application needs, for as long as the context lasts. The database must be migrated."""
    limits = replace(config.database, pool_max=config.serve.api_pool_max)
    # Statements that store requests and find answers serve many callers at once: they do not queue behind single calls.
    few = replace(config.database, pool_max=_SESSION_CONNECTIONS)
    async with (
        await open_pool(conninfo, limits, name="penstock serve") as database,
        await open_pool(conninfo, few, name="penstock sessions", planned_once=True) as sessions_database,
        LastingIdentity(database, POOL, config.liveness) as identity,
        BackgroundDuties(
            config,
            conninfo,
            database,
            known,
            describe=events.describe_request,
            scans=AdapterScans(config, conninfo, database, known, config.adapters),
        ) as background,
    ):
        background.worker_id = identity.id
        server = make_server(config, conninfo, database, known, identity.id, background, sessions_database)
        identity.on_change = server.take_identity
        async with server.limits.running():
            try:
                yield server
            finally:
                await server.close()

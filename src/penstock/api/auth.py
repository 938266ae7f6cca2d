"""Authentication of callers: by API key, or as the one user of a server that has no keys."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from functools import lru_cache
from hmac import compare_digest
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from penstock.api.endpoint import Caller
from penstock.api.errors import ApiError
from penstock.api.keys import KEY, FoundKey, find_key, find_signed_in, has_any_key, hash_of
from penstock.api.sign_in import host_of, token_in
from penstock.db.pool import Connection, Pool, borrowed
from penstock.server.listener import is_loopback

LOCAL = Caller("local", "admin", None)
"""Caller, and owner of everything, on a server without keys."""

Look = Callable[[Connection, bytes], Coroutine[Any, Any, FoundKey | None]]
"""Looks a key up by a hash: its own, or that of a sign-in."""

_MAX_REMEMBERED = 10_000
_ANY_KEY = b""
_OWN_SITES = (b"none", b"same-origin")


class Auth:
    """Authentication: finds the caller of a request. Answers of the database are remembered for half of `cache_s`: the
    other half is for requests under way (`key_watch.py`)."""

    def __init__(self, database: Pool, cache_s: float, *, public_host: str | None = None, in_process: bool = False):
        self._database = database
        self._cache_s = cache_s / 2
        self._public_host = public_host
        self._in_process = in_process
        self._keys: dict[bytes, tuple[float, FoundKey | None]] = {}
        self._keyless_until = -1.0
        self._has_keys = False
        self._asking: dict[bytes, asyncio.Task[FoundKey | None]] = {}
        """Queries under way: for a key, by its hash; and whether there are any keys, by `_ANY_KEY`."""

    async def identify(self, headers: Headers) -> Caller:
        """The caller, or 401."""
        if self._in_process:
            return LOCAL
        first = dict(reversed(headers.raw))  # the first header of each name
        presented = _keys_in(first)
        for secret in presented:
            # A text that cannot be a key is not worth a query.
            if KEY.fullmatch(secret):
                key = await self._find(secret)
                # One key, even a revoked one, is enough to know that this server is not a single user's.
                self._has_keys = self._has_keys or key is not None
                if key is not None and key.usable:
                    return Caller(key.owner, key.role, key.id)
        if await self.single_user():
            self._refuse_web_pages(first)
            return LOCAL
        token = None if presented else token_in(first)
        if token is not None:
            key = await self._find(token, find_signed_in)
            if key is not None and key.usable:
                return Caller(key.owner, key.role, key.id, signed_in=True)
            raise _refused("You are not signed in any more.", code="signed_out")
        if not presented:
            raise _refused("You didn't provide an API key. Send it as 'Authorization: Bearer sk-penstock-...'.")
        raise _refused("Incorrect API key provided: it is unknown, expired or revoked.", code="invalid_api_key")

    async def single_user(self) -> bool:
        """Whether no key was ever made. Once there was one, the server never goes back to a single user."""
        if self._has_keys:
            return False
        if monotonic() > self._keyless_until:
            await self._ask_once(_ANY_KEY, self._ask_for_any)
        return not self._has_keys

    async def _ask_for_any(self) -> None:
        now = monotonic()
        async with borrowed(self._database) as connection:
            self._has_keys = await has_any_key(connection) or self._has_keys
        self._keyless_until = now + self._cache_s

    async def _find(self, secret: str, look: Look = find_key) -> FoundKey | None:
        digest = hash_of(secret)
        known = self._keys.get(digest)
        if known is None or known[0] < monotonic():
            key = await self._ask_once(digest, lambda: self._ask_for(digest, look))
        else:
            key = known[1]
        return key if key is not None and compare_digest(key.hash, digest) else None

    async def _ask_for(self, digest: bytes, look: Look) -> FoundKey | None:
        now = monotonic()
        async with borrowed(self._database) as connection:
            found = await look(connection, digest)
        if len(self._keys) >= _MAX_REMEMBERED:
            self._keys.clear()
        self._keys[digest] = (now + self._cache_s, found)
        return found

    async def _ask_once(self, what: bytes, ask: Callable[[], Coroutine[Any, Any, FoundKey | None]]) -> FoundKey | None:
        """Share one query among all callers that need its answer now: a thousand callers at once would keep every
        connection busy with the same query. If the database is away they all fail together, not one after the other."""
        if not self._cache_s:
            return await ask()  # the answer to a query that began earlier may be out of date
        asking = self._asking.get(what)
        if asking is None:
            asking = self._asking[what] = asyncio.create_task(ask(), name="find API key")
            asking.add_done_callback(lambda done: self._on_answer(what, done))
        return await asyncio.shield(asking)

    def _on_answer(self, what: bytes, done: asyncio.Task[FoundKey | None]) -> None:
        del self._asking[what]
        if not done.cancelled():
            done.exception()  # raised in the callers that still wait; there may be none left

    def _refuse_web_pages(self, headers: Mapping[bytes, bytes]) -> None:
        """Refuse web pages of other sites. Without keys, a page in the user's browser could call too, by a name that
        leads to this machine (DNS rebinding) or across sites. Both show in the headers, which a page cannot forge."""
        host, origin = headers.get(b"host", b"").decode("latin-1"), headers.get(b"origin")
        if not self._own_name(host):
            raise _refused("Without API keys this server answers only to loopback names.")
        # Without an Origin, as of an image or a link, the browser still says whose page it is.
        site = headers.get(b"sec-fetch-site", b"none").lower()
        if site not in _OWN_SITES if origin is None else host_of(origin.decode("latin-1")) != host:
            raise _refused("Without API keys this server answers no other site's pages.")

    def _own_name(self, host: str) -> bool:
        name = _name_of(host)
        return name in ("localhost", self._public_host) or is_loopback(name)


@lru_cache(maxsize=256)
def _name_of(host: str) -> str:
    """Name in a Host header, without the port; empty if the header is not valid."""
    try:
        parts = urlsplit(f"//{host}")
        name, _ = parts.hostname or "", parts.port  # which is looked at only when asked for
    except ValueError:
        return ""
    return name


def _keys_in(headers: Mapping[bytes, bytes]) -> list[str]:
    """Keys in a request's headers: clients of either dialect put the key in different headers, some in two."""
    found = []
    scheme, _, value = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if scheme.lower() == "bearer":
        found.append(value.strip())
    found += [headers[name].decode("latin-1").strip() for name in (b"x-api-key", b"api-key") if name in headers]
    return [secret for secret in found if secret]


def key_ended() -> ApiError:
    """401: the key was revoked, or has expired, while the request was under way."""
    return _refused("The API key was revoked, or has expired, meanwhile.", code="invalid_api_key")


def _refused(message: str, code: str | None = None) -> ApiError:
    return ApiError(401, message, code=code, headers={"www-authenticate": "Bearer"})

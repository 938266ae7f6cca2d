"""Who asks: API keys, or the one user of a server that has none."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Coroutine, Mapping
from functools import lru_cache
from hmac import compare_digest
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from penstock.api.endpoint import Caller
from penstock.api.errors import ApiError
from penstock.api.keys import KEY, FoundKey, any_key, find_key, hash_of
from penstock.db.pool import Pool, borrowed

LOCAL = Caller("local", "admin", None)
"""Whose everything is on a server without keys."""

_MAX_REMEMBERED = 10_000
_ANY_KEY = b""


class Auth:
    """Decides who a request is from. What the database said is remembered for `cache_s`."""

    def __init__(self, database: Pool, cache_s: float, *, public_host: str | None = None, in_process: bool = False):
        self._database = database
        self._cache_s = cache_s
        self._public_host = public_host
        self._in_process = in_process
        self._keys: dict[bytes, tuple[float, FoundKey | None]] = {}
        self._keyless_until = -1.0
        self._has_keys = False
        self._asking: dict[bytes, asyncio.Task[FoundKey | None]] = {}
        """Questions to the database that are under way: for keys by their hash, and whether there are any."""

    async def identify(self, headers: Headers) -> Caller:
        """The caller, or 401."""
        if self._in_process:
            return LOCAL
        told = dict(reversed(headers.raw))  # the first of each
        presented = _presented(told)
        for secret in presented:
            # What cannot be a key is not worth a look into the database.
            if KEY.fullmatch(secret):
                key = await self._find(secret)
                # One key, even an old one, is enough to know that this server is nobody's alone.
                self._has_keys = self._has_keys or key is not None
                if key is not None and key.usable:
                    return Caller(key.owner, key.role, key.id)
        if await self.single_user():
            self._refuse_strangers(told)
            return LOCAL
        if not presented:
            raise _refused("You didn't provide an API key. Send it as 'Authorization: Bearer sk-penstock-...'.")
        raise _refused("Incorrect API key provided: it is unknown, expired or revoked.", code="invalid_api_key")

    async def single_user(self) -> bool:
        """Whether no key was ever made. Once there was one, there is no way back."""
        if self._has_keys:
            return False
        if monotonic() > self._keyless_until:
            await self._once(_ANY_KEY, self._ask_for_any)
        return not self._has_keys

    async def _ask_for_any(self) -> None:
        now = monotonic()
        async with borrowed(self._database) as connection:
            self._has_keys = await any_key(connection) or self._has_keys
        self._keyless_until = now + self._cache_s

    async def _find(self, secret: str) -> FoundKey | None:
        digest = hash_of(secret)
        known = self._keys.get(digest)
        if known is None or known[0] < monotonic():
            key = await self._once(digest, lambda: self._ask_for(digest))
        else:
            key = known[1]
        return key if key is not None and compare_digest(key.hash, digest) else None

    async def _ask_for(self, digest: bytes) -> FoundKey | None:
        now = monotonic()
        async with borrowed(self._database) as connection:
            found = await find_key(connection, digest)
        if len(self._keys) >= _MAX_REMEMBERED:
            self._keys.clear()
        self._keys[digest] = (now + self._cache_s, found)
        return found

    async def _once(self, what: bytes, ask: Callable[[], Coroutine[Any, Any, FoundKey | None]]) -> FoundKey | None:
        """One asks for all who want to know at the moment: a thousand callers at once would keep every connection busy
        with the same question. If the database is away they all hear of it, and do not find out one after the other."""
        if not self._cache_s:
            return await ask()  # an answer that was on its way already is not today's
        asking = self._asking.get(what)
        if asking is None:
            asking = self._asking[what] = asyncio.create_task(ask(), name="who asks")
            asking.add_done_callback(lambda done: self._answered(what, done))
        return await asyncio.shield(asking)

    def _answered(self, what: bytes, done: asyncio.Task[FoundKey | None]) -> None:
        del self._asking[what]
        if not done.cancelled():
            done.exception()  # whoever still waits is told; it may be that nobody does

    def _refuse_strangers(self, told: Mapping[bytes, bytes]) -> None:
        """Without keys, a web page in the user's browser could ask too, by a name that leads to this machine (DNS
        rebinding) or across sites. Both show in the headers, which a page cannot forge."""
        host, origin = told.get(b"host", b"").decode("latin-1"), told.get(b"origin")
        if not self._own_name(host):
            raise _refused("Without API keys this server answers only to loopback names.")
        if origin is not None and urlsplit(origin.decode("latin-1")).netloc != host:
            raise _refused("Without API keys this server answers no other site's pages.")

    def _own_name(self, host: str) -> bool:
        name = _name_of(host)
        return name in ("localhost", self._public_host) or is_loopback(name)


@lru_cache(maxsize=256)
def _name_of(host: str) -> str:
    """A Host header without its port; empty if it is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


@lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    """Whether an address, or the name localhost, is this machine and nobody else."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _presented(told: Mapping[bytes, bytes]) -> list[str]:
    """Every key in the request: clients of either dialect put it in different places, some in two."""
    found = []
    scheme, _, value = told.get(b"authorization", b"").decode("latin-1").partition(" ")
    if scheme.lower() == "bearer":
        found.append(value.strip())
    found += [told[name].decode("latin-1").strip() for name in (b"x-api-key", b"api-key") if name in told]
    return [secret for secret in found if secret]


def _refused(message: str, code: str | None = None) -> ApiError:
    return ApiError(401, message, code=code, headers={"www-authenticate": "Bearer"})

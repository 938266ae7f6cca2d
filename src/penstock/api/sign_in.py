"""Sign-in of browsers: an API key is shown once, and a cookie stands for it from then on.

A browser sends its cookies with every request, also with those that another site's page makes it send. So a request
that comes by the cookie and changes something must say that a page of this origin made it: by the headers that only
browsers set, and by one that no page of another origin can add without the server being asked first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from penstock.api import keys
from penstock.api.endpoint import Call, Endpoint
from penstock.api.errors import ApiError
from penstock.db.pool import borrowed

COOKIE: Final = "penstock_console"
HEADER: Final = "x-penstock-console"
_NAME: Final = COOKIE.encode()
_LIFE_S: Final = 12 * 3_600
_MAX_TOKEN_CHARS: Final = 100
_SAFE: Final = ("GET", "HEAD", "OPTIONS")


class SignIn(msgspec.Struct, forbid_unknown_fields=True):
    key: Annotated[str, msgspec.Meta(max_length=200)]


def token_in(headers: Mapping[bytes, bytes]) -> str | None:
    """The token of a sign-in among a request's cookies."""
    for cookie in headers.get(b"cookie", b"").split(b";"):
        name, _, value = cookie.strip().partition(b"=")
        if name == _NAME:
            return value.decode() if 0 < len(value) <= _MAX_TOKEN_CHARS and value.isascii() else None
    return None


def host_of(origin: str) -> str | None:
    """Host in an Origin header, with the port; None if the header is not valid."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def check_origin(request: Request, public_url: str | None) -> None:
    """Refuse what changes something unless a page of this origin asks for it."""
    if request.method in _SAFE:
        return
    if request.headers.get(HEADER) != "1" or not _is_same_origin(request.headers, public_url):
        raise ApiError(403, "Only the console itself may do this.", type="permission_error", code="cross_site")


def _is_same_origin(headers: Headers, public_url: str | None) -> bool:
    """Whether a page of this origin sent the request. Where they trust the way, browsers say so themselves; elsewhere
    they tell the page's origin, with every request that is not a plain GET."""
    if (site := headers.get("sec-fetch-site")) is not None:
        return site == "same-origin"
    origin = host_of(headers.get("origin", ""))
    return bool(origin) and origin in (headers.get("host"), urlsplit(public_url or "").netloc)


async def begin_session(call: Call[None, SignIn]) -> Response:
    check_origin(call.request, call.server.config.public_url)
    secret = call.body.key.strip()
    async with borrowed(call.database) as connection:
        found = await keys.find_key(connection, keys.hash_of(secret)) if keys.KEY.fullmatch(secret) else None
        if found is None or not found.usable:
            raise ApiError(401, "This API key is unknown, expired or revoked.", code="invalid_api_key")
        token = await keys.sign_in(connection, found.id, _LIFE_S)
    return _with_cookie(call, token, _LIFE_S)


async def end_session(call: Call[None, None]) -> Response:
    check_origin(call.request, call.server.config.public_url)
    token = token_in(dict(call.request.headers.raw))
    if token is not None:
        async with borrowed(call.database) as connection:
            await keys.sign_out(connection, token)
    return _with_cookie(call, "", 0)


def _with_cookie(call: Call[Any, Any], token: str, life_s: int) -> Response:
    answer = Response(status_code=204, headers={"cache-control": "no-store"})
    public = call.server.config.public_url or call.request.headers.get("origin", "")
    answer.set_cookie(
        COOKIE,
        token,
        max_age=life_s,
        path=f"{call.request.scope.get('root_path', '')}/",
        secure=public.startswith("https:"),
        httponly=True,
        samesite="strict",
    )
    return answer


PAGES = (
    Endpoint("POST", "/console/session", begin_session, "Sign in.", role="anyone", status=204),
    Endpoint("DELETE", "/console/session", end_session, "Sign out.", role="anyone", status=204),
)

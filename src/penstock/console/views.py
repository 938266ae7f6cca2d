"""Views of the console: its page and its files. Everything it shows, it asks of the API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from starlette.responses import Response

from penstock.api import sign_in
from penstock.api.endpoint import Call, Endpoint
from penstock.api.errors import ApiError
from penstock.console.files import INDEX, StaticFile, StaticFiles, import_map_hash

# Scripts and styles are files of this server, with one exception: the import map, which no browser loads from a file.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'{import_map}; style-src 'self'; img-src 'self'; font-src 'self'; "
    "connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_NOTHING_POLICY: Final = "default-src 'none'; frame-ancestors 'none'; sandbox"
_HEADERS: Final = {
    "cache-control": "no-cache",  # names do not change with the content: a browser asks each time, by the ETag
    "vary": "accept-encoding",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}

_files = StaticFiles()


def wants_page(headers: Mapping[str, str]) -> bool:
    """Whether a browser asks for a page to show."""
    return "text/html" in headers.get("accept", "")


async def go_to_console(call: Call[None, None]) -> Response:
    # Relative to the path asked for: a proxy may have put more before it than this server knows.
    path = call.request.scope["path"]
    target = "console/" if path.endswith(("/", "/console")) else f"{call.request.scope['root_path']}/console/"
    return Response(status_code=307, headers={"location": target, "cache-control": "no-cache"})


async def show_page(call: Call[None, None]) -> Response:
    page = _find(INDEX)
    allowed = import_map_hash(page.content)
    policy = _POLICY.format(import_map=f" {allowed}" if allowed else "")
    return _send(call, page, policy)


async def send_file(call: Call[None, None]) -> Response:
    return _send(call, _find(call.path["name"]), _NOTHING_POLICY)


def _find(name: str) -> StaticFile:
    found = _files.find(name)
    if found is None:
        raise ApiError(404, "The console has no such file.", code="unknown_url")
    return found


def _send(call: Call[None, None], file: StaticFile, policy: str) -> Response:
    asked = call.request.headers
    headers = {**_HEADERS, "etag": file.etag, "content-security-policy": policy, "content-type": file.media}
    if file.etag in asked.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if file.packed is not None and "gzip" in asked.get("accept-encoding", ""):
        return Response(file.packed, headers={**headers, "content-encoding": "gzip"})
    return Response(file.content, headers=headers)


PAGES = (
    Endpoint("GET", "/", go_to_console, "To the console.", role="anyone", status=307),
    Endpoint("GET", "/console", go_to_console, "To the console.", role="anyone", status=307, name="go_from_console"),
    Endpoint("GET", "/console/", show_page, "The console.", role="anyone", media="text/html"),
    Endpoint("GET", "/console/static/{name:path}", send_file, "A file of the console.", role="anyone"),
    *sign_in.PAGES,
)
"""Routes for browsers, which are no part of the API's description."""

"""Requests once they are over: the access log, and what is counted of them."""

from __future__ import annotations

import logging

from penstock.api.endpoint import Caller, Endpoint
from penstock.api.guard import Guard
from penstock.observe import catalogue

_access = logging.getLogger("penstock.access")

SHOWN_PATH_CHARS = 200
_CLOSED_REQUEST = 499


def log_access(method: str, path: str, guard: Guard, who: Caller, seconds: float, request_id: str) -> None:
    """Log a request that was answered, or given up."""
    if not _access.isEnabledFor(logging.INFO):
        return
    shown = path[:SHOWN_PATH_CHARS].encode("ascii", "backslashreplace").decode()
    if not shown.isprintable():
        shown = ascii(shown)[1:-1]
    status = (guard.status or _CLOSED_REQUEST) if guard.complete else f"{guard.status or _CLOSED_REQUEST}-"
    _access.info(
        "%s %s %s %s %d bytes %.0f ms %s",
        status,
        method,
        shown,
        who.owner or "-",
        guard.sent_bytes,
        seconds * 1000,
        request_id,
    )


def count_request(endpoint: Endpoint | None, guard: Guard, seconds: float) -> None:
    """Count a request by its route as it is declared. One that was refused, or has no route, has no path."""
    method, path = (endpoint.method, endpoint.path) if endpoint is not None else ("", "")
    catalogue.API_REQUESTS.add((method, path, catalogue.status_label(guard.status or _CLOSED_REQUEST)))
    catalogue.API_SECONDS.add((method, path), seconds)

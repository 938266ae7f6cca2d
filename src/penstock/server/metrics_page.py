"""Metrics page of `penstock worker`, on a port of its own: figures of its processes, none of the database's."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from penstock.observe.metrics import ProcessMetrics
from penstock.observe.page import CONTENT_TYPE, write_page


class MetricsPage:
    """ASGI application that answers `GET /metrics`, and nothing else."""

    def __init__(self, metrics: ProcessMetrics) -> None:
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 -- no body is read
        if scope["type"] != "http":
            return
        found = scope["path"] == "/metrics" and scope["method"] in ("GET", "HEAD")
        body = write_page(self._metrics.total()) if found else b"Figures for Prometheus are at /metrics.\n"
        headers = [
            (b"content-type", CONTENT_TYPE.encode() if found else b"text/plain"),
            (b"content-length", b"%d" % len(body)),
        ]
        await send({"type": "http.response.start", "status": 200 if found else 404, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

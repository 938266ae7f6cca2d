"""Metrics for Prometheus: figures of this process and its worker processes, and of the database."""

from __future__ import annotations

from starlette.responses import Response

from penstock.api.endpoint import Call, Endpoint
from penstock.observe.page import CONTENT_TYPE, write_page

PATH = "/metrics"


async def _metrics(call: Call[None, None]) -> Response:
    server = call.server
    page = write_page(server.metrics.total(await server.queue_figures.samples()))
    return Response(page, headers={"content-type": CONTENT_TYPE, "cache-control": "no-store"})


ENDPOINTS = (Endpoint("GET", PATH, _metrics, "Figures for Prometheus.", media="text/plain", role="admin"),)

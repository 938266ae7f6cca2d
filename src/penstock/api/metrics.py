"""Metrics for Prometheus: figures of this process and its worker processes, and of the database."""

from __future__ import annotations

import asyncio

from starlette.responses import Response

from penstock.api.endpoint import Call, Endpoint
from penstock.observe.page import CONTENT_TYPE, write_page

PATH = "/metrics"


async def _metrics(call: Call[None, None]) -> Response:
    server = call.server
    total = server.metrics.total(await server.queue_figures.samples())
    page = await asyncio.to_thread(write_page, total)  # milliseconds in which requests would wait
    return Response(page, headers={"content-type": CONTENT_TYPE, "cache-control": "no-store"})


ENDPOINTS = (Endpoint("GET", PATH, _metrics, "Figures for Prometheus.", media="text/plain", role="admin"),)

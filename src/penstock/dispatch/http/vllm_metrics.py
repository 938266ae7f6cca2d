"""vLLM's metrics, read from an upstream that publishes them: its own queue says what latency only hints at."""

from __future__ import annotations

import asyncio
import dataclasses
import re

from penstock.adapt.concurrency import Pressure
from penstock.config import MIB, DispatchLimits
from penstock.dispatch.http.client import HttpClient
from penstock.dispatch.http.connect import ConnectOptions
from penstock.dispatch.http.errors import TransportError

_NAMES = rb"num_requests_running|num_requests_waiting|kv_cache_usage_perc"
_LINE = re.compile(rb"^vllm:(" + _NAMES + rb")(?:\{[^}\n]*\})? (\S+)", re.MULTILINE)
_EVERY_S = 1.0
_PATIENCE_S = 2.0
_MAX_BYTES = 4 * MIB


class VllmMetrics:
    """Pressure on one upstream, looked up every second. None while its page does not answer."""

    def __init__(self, url: str, limits: DispatchLimits, options: ConnectOptions) -> None:
        self.pressure: Pressure | None = None
        self._url = url
        self._client = HttpClient(dataclasses.replace(limits, max_response_bytes=_MAX_BYTES), {}, options)

    async def run(self) -> None:
        try:
            while True:
                self.pressure = await self._look()
                await asyncio.sleep(_EVERY_S)
        finally:
            await self._client.close()

    async def _look(self) -> Pressure | None:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                answer = await self._client.request("GET", self._url, {}, None)
        except (TransportError, TimeoutError):
            return None
        return parse_pressure(answer.body) if answer.status == 200 else None


def parse_pressure(page: bytes) -> Pressure | None:
    """Calls that run and wait, summed up over engines, and how full the fullest cache is; None if the page says nothing
    of them."""
    sums: dict[bytes, float] = {}
    for name, text in _LINE.findall(page):
        try:
            value = float(text)
        except ValueError:
            continue
        sums[name] = max(sums.get(name, 0.0), value) if name.startswith(b"kv_") else sums.get(name, 0.0) + value
    if b"num_requests_running" not in sums:
        return None
    return Pressure(
        sums[b"num_requests_running"], sums.get(b"num_requests_waiting", 0.0), sums.get(b"kv_cache_usage_perc", 0.0)
    )

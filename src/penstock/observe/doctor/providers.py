"""Checks of the providers: keys and files, the way there, and an answer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from http import HTTPStatus

from penstock.dispatch.providers import Provider
from penstock.errors import PenstockError
from penstock.observe.doctor.finding import Finding, Installation, refused

_ANSWER_WITHIN_S = 10.0
_REFUSALS = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


async def check_providers(installation: Installation) -> list[Finding]:
    if not installation.providers:
        seen = "none is configured: `penstock serve` would not start"
        if installation.config.processors:
            return [Finding("providers", "ok", "none; processors are configured")]
        return [Finding("providers", "warning", seen, "Add [[providers]] to penstock.toml (docs/serve.md).")]
    return await asyncio.gather(*(_check(installation, provider) for provider in installation.providers))


async def _check(installation: Installation, provider: Provider) -> Finding:
    check = f"provider {provider.name}"
    limits = replace(installation.config.dispatch, connect_timeout_s=_ANSWER_WITHIN_S / 2)
    try:
        provider.check()
        async with (
            provider.processor(limits, installation.config.retry) as processor,
            asyncio.timeout(_ANSWER_WITHIN_S),
        ):
            status = await processor.probe()
    except PenstockError as error:
        return refused(check, error)
    except TimeoutError:
        status = None
    if status is None:
        seen = f"{provider.base_url} takes connections, but gave no answer to GET /models"
        return Finding(check, "warning", seen, "Look at the upstream: is it overloaded, or still starting?")
    if status in _REFUSALS:
        seen = f"{provider.base_url} refuses the key: HTTP {status}"
        return Finding(check, "problem", seen, "Mend the key in api_key_env or api_key_file.")
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        seen = f"{provider.base_url} answers HTTP {status}"
        return Finding(check, "warning", seen, "Look at the upstream.")
    return Finding(check, "ok", f"{provider.base_url} answers")

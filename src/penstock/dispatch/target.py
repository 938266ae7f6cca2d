"""What a run calls: an HTTP endpoint or a Python function. Plain values, so that worker processes can be told."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from penstock.config import Config
from penstock.dispatch.dispatcher import Dispatcher
from penstock.dispatch.http.connect import ConnectOptions, Proxy, uses_tls
from penstock.errors import UsageError
from penstock.validators import checked_key, checked_url, read_secret_file, read_secret_variable

if TYPE_CHECKING:
    from penstock.dispatch.http.processor import HttpProcessor
    from penstock.dispatch.throttle import Throttle

_DEFAULT_KEY_VARIABLE = "OPENAI_API_KEY"


@dataclass(frozen=True, slots=True)
class Target:
    """Either `base_url` or `processor` is set. Keys are named here, never held."""

    base_url: str | None = None
    processor: str | None = None
    api_key_env: str | None = None
    api_key_file: str | None = None
    ca_file: str | None = None
    proxy: str | None = None
    max_rpm: int | None = None
    max_tpm: int | None = None
    values: bool = False
    """Whether the function gets the bodies of items (`penstock.map`), not the items."""
    definition: dict[str, Any] | None = None
    """What is asked of the endpoint for each row, where the input is a table (`dispatch.rows.definition`)."""

    def __str__(self) -> str:
        return self.base_url or self.processor or ""

    @property
    def route(self) -> str | None:
        """The one route of all lanes, or None where each line's model says it."""
        return self.processor if self.definition is None else str(self.definition["model"])

    def api_key(self) -> str | None:
        """The key, read now: from a file, or from the environment. Naming a variable makes it required."""
        if self.api_key_file is not None:
            place = f"--api-key-file {self.api_key_file}"
            return checked_key(read_secret_file(self.api_key_file, place), place)
        name = self.api_key_env or _DEFAULT_KEY_VARIABLE
        if self.api_key_env is None and not os.environ.get(name, "").strip():
            return None
        return checked_key(read_secret_variable(name, f"--api-key-env {name}: the variable"), name)

    @property
    def provider(self) -> str:
        """Name under which the endpoint's limits are kept: its URL, and which key it is called with."""
        key = self.api_key()
        return f"{self.base_url} {sha256(key.encode()).hexdigest()[:8]}" if key else str(self.base_url)

    def _http(self, config: Config, throttle: Throttle | None = None) -> HttpProcessor:
        from penstock.dispatch.http.processor import HttpProcessor

        options = ConnectOptions(ca_file=self.ca_file, proxy=self.proxy)
        limits = (config.dispatch, config.retry)
        return HttpProcessor(str(self.base_url), self.api_key(), *limits, options=options, throttle=throttle)

    @contextlib.asynccontextmanager
    async def dispatcher(self, config: Config, throttle: Throttle | None = None) -> AsyncIterator[Dispatcher]:
        """What the worker drives. Calls of an endpoint start as the throttle allows."""
        if self.processor is not None:
            from penstock.dispatch.loading import load_processor
            from penstock.dispatch.python import PythonProcessor

            function = load_processor(self.processor)
            async with PythonProcessor(function, config.dispatch, config.retry, values=self.values) as processor:
                yield processor.dispatcher()
        else:
            from penstock.dispatch.rows.call import provider_dispatcher

            async with self._http(config, throttle) as http:
                yield provider_dispatcher(http)

    async def check(self, config: Config) -> None:
        """Fail now, with a clear message, rather than after the file was stored."""
        if self.processor is not None:
            from penstock.dispatch.loading import load_processor

            load_processor(self.processor)
        else:
            async with self._http(config) as processor:
                await processor.probe()


def make_target(
    base_url: str | None,
    processor: str | None,
    api_key_env: str | None,
    api_key_file: str | None,
    ca_file: str | None = None,
    proxy: str | None = None,
    max_rpm: int | None = None,
    max_tpm: int | None = None,
) -> Target:
    """The target of a command's options."""
    if (base_url is None) == (processor is None):
        raise UsageError(
            "give either --base-url or --processor",
            hint="--base-url http://127.0.0.1:8000/v1 calls an endpoint, --processor module:function a function.",
        )
    if base_url is not None:
        base_url = checked_url("--base-url", base_url, "For example --base-url http://127.0.0.1:8000/v1")
    check_connect_flags(base_url, ca_file, proxy)
    if base_url is None and (max_rpm or max_tpm):
        raise UsageError("--rpm and --tpm are for --base-url", hint="A function's calls are bounded by --concurrency.")
    return Target(base_url, processor, api_key_env, api_key_file, ca_file, proxy, max_rpm, max_tpm)


def check_connect_flags(base_url: str | None, ca_file: str | None, proxy: str | None) -> None:
    """Refuse --ca-file and --proxy where they mean nothing, cannot be used, or give a password away."""
    if ca_file is not None:
        if not uses_tls(base_url or ""):
            raise UsageError("--ca-file without an https:// --base-url", hint="Only https:// shows a certificate.")
        ConnectOptions(ca_file=ca_file).tls()
    if proxy is None:
        return
    if base_url is None:
        raise UsageError("--proxy without --base-url", hint="It is the way to that endpoint.")
    if Proxy.parse(proxy).authorization is not None:
        raise UsageError(
            "--proxy must not carry credentials, which every user of this machine could read",
            hint="Name the proxy in a provider of penstock.toml (docs/serve.md).",
        )

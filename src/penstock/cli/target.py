"""What a run calls: an HTTP endpoint or a Python function. Plain values, so that worker processes can be told."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from penstock.config import Config
from penstock.dispatch.pool import Dispatcher
from penstock.errors import UsageError

_DEFAULT_KEY_VARIABLE = "OPENAI_API_KEY"


@dataclass(frozen=True, slots=True)
class Target:
    """Either `base_url` or `processor` is set. Keys are named here, never held."""

    base_url: str | None = None
    processor: str | None = None
    api_key_env: str | None = None
    api_key_file: str | None = None

    def __str__(self) -> str:
        return self.base_url or self.processor or ""

    @property
    def route(self) -> str | None:
        """The one route of all lanes, or None where the model says it."""
        return self.processor

    def api_key(self) -> str | None:
        """The key, read now: from a file, or from the environment. Naming a variable makes it required."""
        if self.api_key_file is not None:
            try:
                key = Path(self.api_key_file).read_text("utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else "it is not text"
                raise UsageError(f"--api-key-file {self.api_key_file}: cannot be read: {reason}") from error
            return _checked(key, f"--api-key-file {self.api_key_file}")
        name = self.api_key_env or _DEFAULT_KEY_VARIABLE
        key = os.environ.get(name, "").strip()
        if not key:
            if self.api_key_env is not None:
                raise UsageError(
                    f"--api-key-env {name}: the variable is not set",
                    hint=f"Set it before the command: export {name}=...",
                )
            return None
        return _checked(key, name)

    @contextlib.asynccontextmanager
    async def dispatcher(self, config: Config) -> AsyncIterator[Dispatcher]:
        """What the worker drives."""
        if self.processor is not None:
            from penstock.dispatch.python import PythonProcessor, load_processor

            async with PythonProcessor(load_processor(self.processor), config.dispatch, config.retry) as processor:
                yield processor.dispatcher()
        else:
            from penstock.dispatch.http import HttpProcessor

            async with HttpProcessor(str(self.base_url), self.api_key(), config.dispatch, config.retry) as processor:
                yield processor.dispatcher()

    async def check(self, config: Config) -> None:
        """Fail now, with a clear message, rather than after the file was stored."""
        if self.processor is not None:
            from penstock.dispatch.python import load_processor

            load_processor(self.processor)
        else:
            from penstock.dispatch.http import HttpProcessor

            async with HttpProcessor(str(self.base_url), self.api_key(), config.dispatch, config.retry) as processor:
                await processor.probe()


def make_target(
    base_url: str | None, processor: str | None, api_key_env: str | None, api_key_file: str | None
) -> Target:
    """The target of a command's options."""
    if (base_url is None) == (processor is None):
        raise UsageError(
            "give either --base-url or --processor",
            hint="--base-url http://127.0.0.1:8000/v1 calls an endpoint, --processor module:function a function.",
        )
    if base_url is not None:
        base_url = checked_url(
            "--base-url",
            base_url,
            "For example --base-url http://127.0.0.1:8000/v1",
            "The key comes from the environment (--api-key-env) or a file (--api-key-file).",
        )
    return Target(base_url, processor, api_key_env, api_key_file)


def checked_url(option: str, url: str, example: str, where_the_key_is: str) -> str:
    """The URL without a slash at its end; refused if it could not be called, or holds a secret."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port
    except ValueError:
        valid = False
    if not valid:
        raise UsageError(f"{option} {url}: not an http(s) URL", hint=example)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise UsageError(f"{option} must not carry credentials, a query or a fragment", hint=where_the_key_is)
    return url.rstrip("/")


def _checked(key: str, place: str) -> str:
    if not key or not key.isascii() or not key.isprintable():
        raise UsageError(f"{place}: does not hold a usable API key", hint="A key is one line of plain text.")
    return key

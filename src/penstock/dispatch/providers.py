"""Providers: which endpoint serves which model. Tenants name models; only the operator names hosts.

[[providers]]
name = "local"
base_url = "http://127.0.0.1:8000/v1"
models = ["llama-*", "qwen3-32b"]
api_key_env = "LOCAL_KEY"
max_concurrency = 256
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

from penstock.config import Config, DispatchLimits, RetryLimits
from penstock.config_tables import TableEntry, read_entries
from penstock.dispatch.http.connect import ConnectOptions, Proxy, uses_tls
from penstock.dispatch.http.processor import HttpProcessor
from penstock.dispatch.http.streaming import Streams
from penstock.dispatch.rows_paths import RowsPath
from penstock.dispatch.throttle import Throttle
from penstock.errors import PenstockError, UsageError
from penstock.pools import batch_pool, is_session_pool, session_pool
from penstock.validators import checked_base, checked_headers, checked_key, read_secret_file, read_secret_variable

_log = logging.getLogger("penstock.providers")

DEFAULT_NAME = "default"
_DEFAULT_KEY_VARIABLE = "OPENAI_API_KEY"
_TIMEOUTS = ("connect_timeout_s", "first_byte_timeout_s", "idle_timeout_s", "attempt_timeout_s")
_TLS_FILES = ("ca_file", "client_cert_file", "client_key_file")
_FIELDS = (
    *("name", "base_url", "models", "api_key_env", "api_key_file", "max_concurrency", "max_rpm", "max_tpm", "headers"),
    *("rows_paths", "metrics_url", *_TLS_FILES, "proxy", *_TIMEOUTS),
)
_MAX_CONCURRENCY = 100_000
_WILD = frozenset("*?[")
"""Characters that make a model's name a pattern."""
_MAX_PER_MINUTE = 10**12
_HINT = "docs/serve.md shows a provider with every field."


@dataclass(frozen=True, slots=True)
class Provider:
    """One upstream. Keys are named here, never held."""

    name: str
    base_url: str
    models: tuple[str, ...]
    api_key_env: str | None = None
    api_key_file: str | None = None
    max_concurrency: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeouts: Mapping[str, float] = field(default_factory=dict)
    options: ConnectOptions = field(default_factory=ConnectOptions)
    rows_paths: tuple[RowsPath, ...] = ()
    """What jobs may ask of it beside chat completions. Whoever makes a job uses the operator's key."""
    max_rpm: int | None = None
    max_tpm: int | None = None
    """Calls and tokens a minute, of each model, over all processes."""
    metrics_url: str | None = None
    """Where it says in vLLM's metrics how many calls wait in its own queue."""

    @property
    def pool(self) -> str:
        """The pool of its lanes and workers."""
        return batch_pool(self.name)

    @property
    def session_pool(self) -> str:
        """The pool of the sessions whose next request is for it."""
        return session_pool(self.name)

    @property
    def names_patterns(self) -> bool:
        """Whether it serves models that the configuration does not name outright."""
        return any(set(model) & _WILD for model in self.models)

    def serves(self, model: str) -> bool:
        return any(fnmatchcase(model, pattern) for pattern in self.models)

    def api_key(self) -> str | None:
        """The key, read now. One that is named must be there."""
        if self.api_key_file is not None:
            place = f"provider '{self.name}': api_key_file {self.api_key_file}"
            return checked_key(read_secret_file(self.api_key_file, place, _HINT), place)
        if self.api_key_env is None:
            return None
        what = f"provider '{self.name}': the variable {self.api_key_env} (api_key_env)"
        return checked_key(read_secret_variable(self.api_key_env, what), f"provider '{self.name}': {self.api_key_env}")

    def check(self) -> None:
        """Fail now, if its key or one of its files cannot be used, rather than at the first call."""
        self.api_key()
        try:
            if uses_tls(self.base_url):
                self.options.tls()
        except UsageError as error:
            raise UsageError(f"provider '{self.name}': {error.message}", hint=error.hint) from None

    def processor(
        self,
        dispatch: DispatchLimits,
        retry: RetryLimits,
        *,
        throttle: Throttle | None = None,
        streams: Streams | None = None,
    ) -> HttpProcessor:
        """What calls it, as the throttle allows, with its key as it is by then."""
        key = KeyInUse(self)
        told: dict[str, Any] = {**self.timeouts}
        return HttpProcessor(
            self.base_url,
            key(),
            dataclasses.replace(dispatch, **told),
            retry,
            self.headers,
            options=self.options,
            name=self.name,
            current_key=key if self.api_key_file is not None else None,
            streams=streams,
            throttle=throttle,
        )

    def as_dict(self) -> dict[str, Any]:
        """As in the file: `parse([provider.as_dict()], ...)` gives it again."""
        told = dataclasses.asdict(self)
        told.update(told.pop("timeouts"), **told.pop("options"), models=list(self.models))
        told["rows_paths"] = [str(path) for path in self.rows_paths]
        return {name: value for name, value in told.items() if value is not None}


class KeyInUse:
    """A provider's key, read again whenever its file has changed. What cannot be read leaves the last one in use."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider
        self._file = None if provider.api_key_file is None else Path(provider.api_key_file)
        self._seen = self._stamp()
        self._key = provider.api_key()

    def __call__(self) -> str | None:
        # A look at a file costs a few microseconds, a call that is refused for its old key halts the provider.
        stamp = self._stamp()
        if stamp != self._seen:
            self._seen = stamp
            try:
                self._key = self._provider.api_key()
            except PenstockError as error:
                _log.warning("%s; going on with the key it had before", error.message)
        return self._key

    def _stamp(self) -> tuple[int, ...]:
        try:
            found = self._file.stat() if self._file is not None else None
        except OSError:
            found = None
        return (found.st_mtime_ns, found.st_ino, found.st_size) if found is not None else ()


class Providers:
    """All of them, in order: the first that serves a model gets it."""

    def __init__(self, providers: Iterable[Provider]) -> None:
        self._all = tuple(providers)
        self._provider_of = lru_cache(maxsize=10_000)(self._find)

    def __iter__(self) -> Iterator[Provider]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def _find(self, model: str) -> Provider | None:
        return next((provider for provider in self._all if provider.serves(model)), None)

    def provider_of(self, model: str) -> Provider | None:
        """Who serves this model; None if nobody does."""
        return self._provider_of(model)

    def pool_of(self, model: str) -> str | None:
        """The pool whose workers can call this model; None if nobody serves it."""
        provider = self._provider_of(model)
        return None if provider is None else provider.pool

    @property
    def pools(self) -> list[str]:
        """Those of all of them, for batches and for sessions."""
        return [pool for provider in self._all for pool in (provider.pool, provider.session_pool)]

    def pool_instead(self, pool: str, model: str) -> str | None:
        """The pool of the same kind that has this model now; None if nobody serves it."""
        provider = self._provider_of(model)
        if provider is None:
            return None
        return provider.pool if not is_session_pool(pool) else provider.session_pool

    @property
    def models(self) -> list[tuple[str, str]]:
        """(model, provider) of every model that is named outright rather than by a pattern."""
        found: dict[str, str] = {}
        for provider in self._all:
            for model in provider.models:
                if not set(model) & _WILD:
                    found.setdefault(model, provider.name)
        return list(found.items())


def single(
    base_url: str,
    api_key_env: str | None,
    api_key_file: str | None = None,
    options: ConnectOptions = ConnectOptions(),  # noqa: B008 -- frozen
    rows_paths: Iterable[str] = (),
) -> Provider:
    """`--base-url URL`: one provider for every model."""
    if api_key_env is None and api_key_file is None and os.environ.get(_DEFAULT_KEY_VARIABLE, "").strip():
        api_key_env = _DEFAULT_KEY_VARIABLE
    allowed = tuple(map(RowsPath.parse, rows_paths))
    base_url = checked_base(base_url)
    return Provider(DEFAULT_NAME, base_url, ("*",), api_key_env, api_key_file, options=options, rows_paths=allowed)


def parse(entries: Any, file: str) -> tuple[Provider, ...]:
    """The `[[providers]]` of a configuration file. Errors name the file, the entry and the field."""
    return read_entries("providers", entries, file, lambda *entry: _Entry(*entry).parse(), "the providers' work")


class _Entry(TableEntry):
    kind = "providers"
    fields = _FIELDS
    hint = _HINT

    def parse(self) -> Provider:
        name = self.name()
        env, file = self.text("api_key_env"), self.text("api_key_file")
        if env and file:
            raise self.wrong("api_key_file", "api_key_env is given too", "Give one of them.")
        base_url = self._checked("base_url", lambda: checked_base(self.text("base_url", required=True)))
        return Provider(
            name,
            base_url,
            self._models(),
            env or None,
            file or None,
            self.whole_number("max_concurrency", 1, _MAX_CONCURRENCY),
            self._headers(),
            self._timeouts(),
            self._options(base_url),
            self._rows_paths(),
            self.whole_number("max_rpm", 1, _MAX_PER_MINUTE),
            self.whole_number("max_tpm", 1, _MAX_PER_MINUTE),
            self._metrics_url(),
        )

    def _checked(self, name: str, check: Any) -> Any:
        try:
            return check()
        except UsageError as error:
            if error.message.startswith(self.file):
                raise
            raise self.wrong(name, error.message, error.hint) from error

    def _metrics_url(self) -> str | None:
        url = self.text("metrics_url") or None
        if url is not None:
            self._checked("metrics_url", lambda: checked_base(url))
        return url

    def _models(self) -> tuple[str, ...]:
        models = self.table.get("models")
        if models is None:
            raise self.wrong("models", "is missing", 'models = ["*"] serves every model.')
        if not isinstance(models, list) or not models or not all(isinstance(m, str) and m.strip() for m in models):
            raise self.wrong("models", "is not a list of names", 'For example models = ["llama-*", "qwen3-32b"].')
        return tuple(models)

    def _rows_paths(self) -> tuple[RowsPath, ...]:
        paths = self.table.get("rows_paths", [])
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            raise self.wrong("rows_paths", "is not a list of texts", 'For example rows_paths = ["GET /prices/"].')
        return tuple(self._checked("rows_paths", lambda path=path: RowsPath.parse(path)) for path in paths)

    def _headers(self) -> dict[str, str]:
        headers = self.table.get("headers", {})
        # Values are never shown: they may be secrets.
        if not isinstance(headers, dict) or not all(isinstance(value, str) for value in headers.values()):
            raise self.wrong("headers", "is not a table of texts", 'For example headers = { "x-team" = "search" }.')
        self._checked("headers", lambda: checked_headers(headers))
        return headers

    def _options(self, base_url: str) -> ConnectOptions:
        files = {name: self.text(name) or None for name in _TLS_FILES}
        if files["client_key_file"] and not files["client_cert_file"]:
            raise self.wrong("client_key_file", "client_cert_file is missing", "A key belongs to a certificate.")
        for name, path in files.items():
            if path and not uses_tls(base_url):
                raise self.wrong(name, "base_url is http://, where no certificate is shown", "Is it https://?")
        proxy = self.text("proxy") or None
        if proxy is not None:
            self._checked("proxy", lambda: Proxy.parse(proxy))
        return ConnectOptions(**files, proxy=proxy)

    def _timeouts(self) -> dict[str, float]:
        known = {entry.name: entry.metadata for entry in dataclasses.fields(DispatchLimits)}
        told = {name: self.any_number(name, known[name]["low"], known[name]["high"]) for name in _TIMEOUTS}
        return {name: value for name, value in told.items() if value is not None}


def longest_attempt_s(config: Config, providers: Iterable[Provider]) -> float:
    """The longest time that anything allows a call: these providers, the configured processors, the settings."""
    by_provider = (provider.timeouts.get("attempt_timeout_s", 0.0) for provider in providers)
    by_processor = (processor.attempt_timeout_s or 0.0 for processor in config.processors)
    return max((config.dispatch.attempt_timeout_s, *by_provider, *by_processor))


def with_longest_timeout(config: Config, longest_s: float) -> Config:
    """The settings of a worker, which judges every worker's leases: none counts as stuck before this time, whoever's
    call it is. What a call itself is allowed is in the settings of its provider or processor."""
    return dataclasses.replace(config, dispatch=dataclasses.replace(config.dispatch, attempt_timeout_s=longest_s))

"""Sinks: receivers to which the answers of sessions go as CloudEvents. Only the operator names them.

[[sinks]]
name = "crm"
url = "https://crm.example.net/events"
secret_env = "CRM_SINK_SECRET"
mode = "structured"
requests = "events"
types = ["com.penstock.session.request.completed"]
owners = ["crm"]
source = "https://llm.example.net"
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast, get_args

from penstock.config_tables import TableEntry, read_entries
from penstock.deliver.addresses import AddressRefused, parse_url
from penstock.errors import UsageError
from penstock.sessions.cloudevents import Mode
from penstock.validators import read_secret_file, read_secret_variable

Requests = Literal["events", "all"]

REQUEST_TYPE = "com.penstock.session.request"
"""Type of an event that brings a request."""
TYPES = tuple(f"{REQUEST_TYPE}.{status}" for status in ("completed", "failed", "cancelled"))
"""Types of the events that bring the answer."""

_SOURCE = re.compile(r"[\x21-\x7e]{1,512}")
_SECRET_PREFIX = "whsec_"  # noqa: S105 -- what comes before one
_SECRET_MIN_BYTES = 16
_HINT = "docs/sessions.md shows a sink with every field."

_C = TypeVar("_C", bound=str)


@dataclass(frozen=True, slots=True)
class Sink:
    """Sink: one receiver. Its secret is named here, never held."""

    name: str
    url: str
    secret_env: str | None = None
    secret_file: str | None = None
    mode: Mode = "structured"
    requests: Requests = "events"
    """Whether it gets the answers to the requests that came in as events, or to all."""
    types: tuple[str, ...] = TYPES
    owners: tuple[str, ...] = ()
    """Owners whose answers it gets; everybody's if empty."""
    source: str | None = None
    """Source that the events name; the server's public URL if not given."""

    def wants(self, owner: str, *, from_event: bool) -> bool:
        listed = not self.owners or owner in self.owners
        return listed and (from_event or self.requests == "all")

    def secret(self) -> bytes:
        """The signing key, read now: `whsec_` and base64 as receivers are given it, or plain text."""
        text = self._secret_text()
        try:
            encoded = text.startswith(_SECRET_PREFIX)
            key = base64.b64decode(text.removeprefix(_SECRET_PREFIX), validate=True) if encoded else text.encode()
        except binascii.Error:
            raise UsageError(f"sink '{self.name}': its secret is not base64 behind whsec_", hint=_HINT) from None
        if len(key) < _SECRET_MIN_BYTES:
            raise UsageError(
                f"sink '{self.name}': its secret is shorter than {_SECRET_MIN_BYTES} bytes",
                hint='Make one: echo "whsec_$(openssl rand -base64 24)"',
            )
        return key

    def _secret_text(self) -> str:
        if self.secret_file is not None:
            return read_secret_file(self.secret_file, f"sink '{self.name}': secret_file {self.secret_file}", _HINT)
        name = self.secret_env or ""
        return read_secret_variable(name, f"sink '{self.name}': the variable {name} (secret_env)")


def any_wants(sinks: Iterable[Sink], owner: str, *, from_event: bool) -> bool:
    """Whether any sink wants the answer to an owner's request."""
    return any(sink.wants(owner, from_event=from_event) for sink in sinks)


def parse(entries: Any, file: str) -> tuple[Sink, ...]:
    """The `[[sinks]]` of a configuration file. Errors name the file, the entry and the field."""
    return read_entries("sinks", entries, file, lambda *entry: _SinkEntry(*entry).parse(), "the sinks' deliveries")


class _SinkEntry(TableEntry):
    kind = "sinks"
    fields = ("name", "url", "secret_env", "secret_file", "mode", "requests", "types", "owners", "source")
    hint = _HINT

    def parse(self) -> Sink:
        name = self.name()
        env, file = self.text("secret_env"), self.text("secret_file")
        if bool(env) == bool(file):
            what = "secret_env is given too" if env else "neither secret_env nor secret_file is given"
            raise self.wrong("secret_file", what, "Give one of them: every delivery is signed.")
        source = self.text("source")
        if source and not _SOURCE.fullmatch(source):
            raise self.wrong("source", f"'{source}' is not a URI", "For example https://llm.example.net")
        return Sink(
            name,
            self._url(),
            env or None,
            file or None,
            self._choice("mode", get_args(Mode), "structured"),
            self._choice("requests", get_args(Requests), "events"),
            self._types(),
            self._texts("owners"),
            source or None,
        )

    def _url(self) -> str:
        url = self.text("url", required=True)
        try:
            parse_url(url)
        except AddressRefused as refusal:
            raise self.wrong("url", str(refusal)) from None
        return url

    def _choice(self, name: str, choices: tuple[_C, ...], default: _C) -> _C:
        value = self.table.get(name, default)
        if value not in choices:
            raise self.wrong(name, f"{value!r} is not one of {', '.join(choices)}")
        return cast(_C, value)

    def _texts(self, name: str) -> tuple[str, ...]:
        values = self.table.get(name, [])
        if not isinstance(values, list) or not all(isinstance(value, str) and value for value in values):
            raise self.wrong(name, "is not a list of texts", f'For example {name} = ["one", "two"].')
        return tuple(values)

    def _types(self) -> tuple[str, ...]:
        types = self._texts("types") or TYPES
        for type_ in types:
            if type_ not in TYPES:
                raise self.wrong("types", f"'{type_}' is none", f"They are {', '.join(TYPES)}.")
        return types

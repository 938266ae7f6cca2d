"""Validators of configured URLs, headers and API keys, and of numbers that JSON has not. Secrets are never shown.

URLs that tenants choose are checked by `deliver/addresses.py`, which is stricter: such a URL may be an attack.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from penstock.errors import UsageError

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
# Set by Penstock, or not to be set at all: they say where a message ends and which host it is for.
_RESERVED_HEADERS = frozenset(
    {
        "connection",
        "content-length",
        "expect",
        "host",
        "idempotency-key",
        "keep-alive",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
CARRIES_SECRETS = re.compile(r"authorization|cookie|api-?key|token|secret|password|credential", re.IGNORECASE)
"""Names of headers that hold secrets."""
_BLANK = re.compile(r"[\x00-\x20]")
_KEY_PLACES = "The key comes from the environment (--api-key-env) or a file (--api-key-file)."


def _split(url: str) -> SplitResult | None:
    """The parts of a URL with http or https and a host; None if it is none."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return None
    return parts if parts.scheme in ("http", "https") and parts.hostname else None


def checked_url(option: str, url: str, example: str, where_the_key_is: str = _KEY_PLACES) -> str:
    """The URL of an option without a slash at its end; refused if it could not be called, or holds a secret."""
    parts = _split(url)
    if parts is None:
        raise UsageError(f"{option} {url}: not an http(s) URL", hint=example)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise UsageError(f"{option} must not carry credentials, a query or a fragment", hint=where_the_key_is)
    return url.rstrip("/")


def checked_base(base_url: str) -> str:
    """The URL of an upstream without a slash at its end; refused if it could not be called, or holds a secret."""
    trimmed = base_url.strip().rstrip("/")
    parts = _split(trimmed)
    if parts is None or _BLANK.search(trimmed):
        raise UsageError(f"'{base_url}' is not an http:// or https:// URL", hint="Write it as https://host/v1")
    if "@" in parts.netloc:
        raise UsageError("the base URL contains a user name or password", hint=_KEY_PLACES)
    if parts.query or parts.fragment:
        raise UsageError(f"'{base_url}' has a query or a fragment", hint="Write it as https://host/v1")
    return trimmed


def checked_public_url(value: object, place: str) -> str:
    """The URL by which a server is known, without a slash at its end; `place` says where it was set."""
    url = str(value)
    parts = _split(url)
    if parts is None or "@" in parts.netloc or parts.query or parts.fragment:
        raise UsageError(f"{place}: not the URL of a server", hint="For example https://batch.example.org/penstock")
    return url.rstrip("/")


def names_this_machine(host: str) -> bool:
    """Whether a host name or address is this machine's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def checked_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers by their names in lower case; refused if one of them could not be sent."""
    checked = {}
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name):
            raise UsageError(f"{name!r} is not a header name")
        if name.lower() in _RESERVED_HEADERS:
            raise UsageError(f"the header {name} cannot be set", hint="Penstock or the connection sets it.")
        checked[name.lower()] = checked_value(value, f"the header {name}")
    return checked


def checked_value(value: str, what: str) -> str:
    """A header's value that can be sent; else the error names `what`."""
    if not _is_plain(value):
        raise UsageError(f"{what} contains a line break or another character that a header cannot hold")
    return value


def checked_key(key: str, place: str) -> str:
    """An API key that can be sent; else the error names `place`."""
    if not key or not _is_plain(key):
        raise UsageError(f"{place}: does not hold a usable API key", hint="A key is one line of plain text.")
    return key


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable()


def read_secret_file(path: str, place: str, hint: str | None = None) -> str:
    """Read a secret from a file; errors begin with `place`, which says where the file was named."""
    try:
        return Path(path).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"{place}: cannot be read: {reason}", hint=hint) from error


def read_secret_variable(name: str, what: str) -> str:
    """Read a secret from the environment; the error names `what`."""
    secret = os.environ.get(name, "").strip()
    if not secret:
        raise UsageError(f"{what} is not set", hint=f"Set it before the command: export {name}=...")
    return secret


def find_no_number(value: Any) -> str | None:
    """NaN or an infinity somewhere in the value. The encoder would write null: a wrong result would look right."""
    left = [value]
    while left:
        found = left.pop()
        if isinstance(found, float) and not math.isfinite(found):
            return str(found)
        if isinstance(found, dict):
            left += found.values()
        elif isinstance(found, list | tuple):
            left += found
    return None

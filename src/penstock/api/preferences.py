"""The header `Prefer`, as in RFC 7240."""

from __future__ import annotations

from collections.abc import Iterable


def read_preferences(headers: Iterable[str]) -> dict[str, str]:
    """Names and values, the first of each name. A pattern over such a header could take minutes for a hostile one."""
    found: dict[str, str] = {}
    for header in headers:
        for part in header.split(","):
            name, _, value = part.partition(";")[0].partition("=")
            found.setdefault(name.strip().lower(), value.strip().removeprefix('"').removesuffix('"'))
    return found


def wait_s_of(preferences: dict[str, str]) -> float | None:
    """Seconds that `wait=N` asks for."""
    text = preferences.get("wait", "")
    return float(text) if text.isascii() and text.isdigit() and len(text) <= 6 else None

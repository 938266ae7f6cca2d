"""Items to feed to processors, without a database."""

from __future__ import annotations

from uuid import UUID

from penstock.model import Item, Lease

BATCH = UUID("01234567-89ab-cdef-0123-456789abcdef")


def make_item(
    raw: bytes = b'{"model": "m"}',
    *,
    url: str = "/v1/chat/completions",
    attempt: int = 1,
    line: int = 1,
    route: str = "m",
) -> Item:
    lease = Lease(7, 1, 3, BATCH, route, url, 1, 1, attempt, ((line, line + 1),))
    return Item(lease, line, line, f"id-{line}", raw)


def make_items(count: int, route: str = "m") -> list[Item]:
    return [make_item(line=line, route=route) for line in range(1, count + 1)]

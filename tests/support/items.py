"""Items to feed to processors, without a database."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

from penstock.model import ROWS, Item, Lease

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


def make_row(row: dict[str, Any], *, attempt: int = 1, line: int = 1, image: bytes | None = None) -> Item:
    """Item of a job, as the body loader makes it."""
    raw = json.dumps({"row": row, "raw": [str(value) for value in row.values()]}).encode()
    item = make_item(raw, url=ROWS, attempt=attempt, line=line)
    item.image = image
    return item

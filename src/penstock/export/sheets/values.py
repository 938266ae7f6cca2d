"""Values of a sheet's cells: JSON values, as the stored rows and results have them."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

Value: TypeAlias = str | int | float | bool | list[Any] | dict[str, Any] | None


def json_text(value: list[Any] | dict[str, Any]) -> str:
    """Text of a cell that holds a list or an object."""
    return msgspec.json.encode(value).decode()

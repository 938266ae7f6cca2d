"""Penstock: durable request processing on PostgreSQL.

`map` calls a function on every row, durably; `connect` is a client of a server or a database. What a Python processor
needs is here too: `Item`, and the exceptions by which it says anything other than "done". Nothing else is promised."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.dispatch.signals import Fail, NotFound, Retry, Skip, chunk
    from penstock.errors import PenstockError, UsageError
    from penstock.library.client import Batch, Client, Session, connect
    from penstock.library.map import Map, map  # noqa: A004 -- called as `penstock.map`
    from penstock.library.result import Result, RowFailed
    from penstock.model import Item

__version__ = "0.1.0"
__all__ = [
    "Batch",
    "Client",
    "Fail",
    "Item",
    "Map",
    "NotFound",
    "PenstockError",
    "Result",
    "Retry",
    "RowFailed",
    "Session",
    "Skip",
    "UsageError",
    "__version__",
    "chunk",
    "connect",
    "map",
]

# Loaded on first use: `penstock --help` must not pay for the engine.
_HOMES = {
    "penstock.dispatch.signals": ("Fail", "NotFound", "Retry", "Skip", "chunk"),
    "penstock.errors": ("PenstockError", "UsageError"),
    "penstock.library.client": ("Batch", "Client", "Session", "connect"),
    "penstock.library.map": ("Map", "map"),
    "penstock.library.result": ("Result", "RowFailed"),
    "penstock.model": ("Item",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

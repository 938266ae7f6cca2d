"""Penstock: durable request processing on PostgreSQL.

What a Python processor needs is here: `Item`, and the exceptions by which it says anything other
than "done"."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.dispatch.signals import Fail, NotFound, Retry, Skip, chunk
    from penstock.model import Item

__version__ = "0.1.0"
__all__ = ["Fail", "Item", "NotFound", "Retry", "Skip", "__version__", "chunk"]

# Loaded on first use: `penstock --help` must not pay for the engine.
_HOMES = {
    "Item": "penstock.model",
    "Fail": "penstock.dispatch.signals",
    "NotFound": "penstock.dispatch.signals",
    "Retry": "penstock.dispatch.signals",
    "Skip": "penstock.dispatch.signals",
    "chunk": "penstock.dispatch.signals",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

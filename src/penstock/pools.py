"""Pools: which workers a lane is for. A provider has two, one for batches and one for sessions."""

from __future__ import annotations

POOL = "serve"
SESSION_POOL = "session"


def batch_pool(provider: str) -> str:
    """The pool of a provider's batches."""
    return f"{POOL}:{provider}"


def session_pool(provider: str) -> str:
    """The pool of a provider's sessions."""
    return f"{SESSION_POOL}:{provider}"


def is_session_pool(pool: str) -> bool:
    return pool.startswith(f"{SESSION_POOL}:")


def provider_in(pool: str) -> str | None:
    """The provider whose work such a pool holds; None for a pool of another kind."""
    kind, _, name = pool.partition(":")
    return name if name and kind in (POOL, SESSION_POOL) else None


def pools_beside(pool: str) -> list[str]:
    """All pools of the provider whose work such a pool holds; a pool of another kind has no other beside it."""
    provider = provider_in(pool)
    return [pool] if provider is None else [batch_pool(provider), session_pool(provider)]

"""Findings of an examination, and what is examined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from penstock.config import Config
from penstock.db.pool import Connection
from penstock.dispatch.providers import Provider
from penstock.errors import PenstockError
from penstock.observe.logs import redacted

Result = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check: what was seen, and what to do about it."""

    check: str
    result: Result
    seen: str
    remedy: str | None = None


@dataclass(frozen=True, slots=True)
class Installation:
    """Configuration under examination, as a server with so many worker processes would have it."""

    config: Config
    providers: tuple[Provider, ...]
    workers: int

    @property
    def connections(self) -> int:
        """Database connections of such a server at its busiest."""
        # Of the API, of sessions' statements, and one to listen and one for longer duties.
        server = self.config.serve.api_pool_max + 2 + 2
        if not self.workers:
            return server
        sessions = 2 * (len(self.providers) + 1)
        per_worker = 1 + max(self.config.database.pool_max, 2 * (2 * len(self.providers) + 1))
        per_processor = 1 + max(self.config.database.pool_max, 2 * (len(self.config.processors) + 1))
        per_process = per_worker + (per_processor if self.config.processors else 0)
        return server + sessions + self.workers * per_process


@dataclass(frozen=True, slots=True)
class Database:
    """Database under examination."""

    connection: Connection
    conninfo: str
    pooled: bool
    """Whether a pooler answers for the server."""


Report = Callable[[Finding], None]


def refused(check: str, error: PenstockError) -> Finding:
    """Problem that an error of Penstock's own describes."""
    return Finding(check, "problem", redacted(error.message), error.hint)


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"

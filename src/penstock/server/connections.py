"""Connections of clients: how many there may be, and who has to go when there are too many.

A connection is a stranger's until a request on it has shown a key. Strangers have half of the connections: beyond that
the oldest of them is closed, one that is not being answered if there is any. Owners of keys share the connections: each
has at most four for every one that it leaves free. So whoever has a key gets in, however many connections without one
are open, and however many another owner has. Descriptors are shared too: clients get half of what the server does not
need for itself, because each of their calls may need a connection to a provider.
"""

from __future__ import annotations

import resource
from typing import Protocol

from starlette.types import Scope

from penstock.config import Config
from penstock.errors import PenstockError
from penstock.shares import Shares

CONNECTION = "penstock.connection"
"""Extension of a request's scope: the connection that it came by, where there is one."""
_PER_FREE = 4
"""Connections that an owner may have for each that is free: four fifths of all, alone."""


def trust_connection(scope: Scope, owner: str) -> None:
    """The request has shown a key of that owner, so its connection is no stranger's any more. Raises
    TooManyConnectionsError."""
    connection: Connection | None = scope.get("extensions", {}).get(CONNECTION)
    if connection is not None:
        connection.trust(owner)


def is_crowded(scope: Scope) -> bool:
    """Whether strangers have as many connections as they may."""
    connection: Connection | None = scope.get("extensions", {}).get(CONNECTION)
    return connection is not None and connection.clients.crowded


class TooManyConnectionsError(Exception):
    """The owner has as many connections as it may."""


_OWN_DESCRIPTORS = 160
"""Of a server: its log, its listener, heartbeat, notices, worker processes, files of uploads and their connections."""
_FEWEST_CLIENTS = 16


class Connection(Protocol):
    clients: Connections

    @property
    def answering(self) -> bool:
        """Whether a request of it is being answered."""

    def trust(self, owner: str) -> None:
        """A key of that owner was shown on it. Raises TooManyConnectionsError if it is one too many."""

    def cut(self) -> None:
        """Close it at once."""


class Connections:
    """The connections of a server: a stranger's, or an owner's."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._strangers: dict[Connection, None] = {}
        self._owners: dict[Connection, str] = {}
        self._shares = Shares(most, per_free=_PER_FREE)

    @property
    def crowded(self) -> bool:
        """Whether strangers have as many connections as they may."""
        return len(self._strangers) >= max(1, self.most // 2)

    def begin(self, connection: Connection, count: int) -> bool:
        """Take a new connection, of so many that are open now with it; False if there is no room."""
        full = count > self.most
        if (full or self.crowded) and not self._cut_oldest() and full:
            return False
        self._strangers[connection] = None
        return True

    def trust(self, connection: Connection, owner: str) -> None:
        """A key of that owner was shown on a stranger's. Raises TooManyConnectionsError."""
        if connection not in self._strangers:
            return  # it ended while the key was looked up
        if not self._shares.take_now(owner):
            raise TooManyConnectionsError
        del self._strangers[connection]
        self._owners[connection] = owner

    def end(self, connection: Connection) -> None:
        self._strangers.pop(connection, None)
        owner = self._owners.pop(connection, None)
        if owner is not None:
            self._shares.give_back(owner)

    def _cut_oldest(self) -> bool:
        """Close a stranger's, if there is one."""
        idle = (each for each in self._strangers if not each.answering)
        oldest = next(idle, None) or next(iter(self._strangers), None)
        if oldest is None:
            return False
        self._strangers.pop(oldest)
        oldest.cut()
        return True


def raise_descriptor_limit() -> int:
    """Raise the limit on open files to the most that the system allows, and return it: every connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):
        return soft
    return hard


def count_clients(config: Config, descriptors: int) -> int:
    """How many clients may be connected at once with so many descriptors. Raises PenstockError if these are too few."""
    serve = config.serve
    own = _OWN_DESCRIPTORS + serve.api_pool_max + serve.max_exports
    clients = (descriptors - own) // 2
    if clients < _FEWEST_CLIENTS:
        raise PenstockError(
            f"the limit of {descriptors:,} open files is too low: the server itself needs {own}",
            hint=f"Raise it to {own + 2 * _FEWEST_CLIENTS:,} or more: ulimit -n, or LimitNOFILE of its unit.",
        )
    return min(serve.max_connections, clients)

"""Connections of clients: how many there may be, and who has to go when there are too many.

A connection is a stranger's until a request on it has shown a key. Strangers have half of the connections: beyond that
the oldest of them that is not being answered is closed. So whoever has a key gets in, however many connections without
one are open. Descriptors are shared the same way: clients get half of what the server does not need for itself,
because each of their calls may need a connection to a provider.
"""

from __future__ import annotations

import resource
from typing import Protocol

from starlette.types import Scope

from penstock.config import Config
from penstock.errors import PenstockError

TRUST = "penstock.trust"
"""Extension of a request's scope: called when the request has shown a key."""


def trust_connection(scope: Scope) -> None:
    """The request has shown a key, so its connection is no stranger's any more."""
    trust = scope.get("extensions", {}).get(TRUST)
    if trust is not None:
        trust()


_OWN_DESCRIPTORS = 160
"""Of a server: its log, its listener, heartbeat, notices, worker processes, files of uploads and their connections."""
_FEWEST_CLIENTS = 16


class Connection(Protocol):
    @property
    def answering(self) -> bool:
        """Whether a request of it is being answered."""

    def cut(self) -> None:
        """Close it at once."""


class Connections:
    """The connections of a server that are a stranger's."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._strangers: dict[Connection, None] = {}

    def begin(self, connection: Connection, count: int) -> bool:
        """Take a new connection, of so many that are open now with it; False if there is no room."""
        full, crowded = count > self.most, len(self._strangers) >= max(1, self.most // 2)
        if (full or crowded) and not self._cut_oldest() and full:
            return False
        self._strangers[connection] = None
        return True

    def trust(self, connection: Connection) -> None:
        """A key was shown on it."""
        self._strangers.pop(connection, None)

    def end(self, connection: Connection) -> None:
        self._strangers.pop(connection, None)

    def _cut_oldest(self) -> bool:
        """Close the oldest that is not being answered; of strangers there may be none."""
        oldest = next((each for each in self._strangers if not each.answering), None)
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

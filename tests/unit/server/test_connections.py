"""Who has to go when there are too many connections."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from penstock.server.connections import Connections, TooManyConnectionsError


@dataclass(eq=False)
class One:
    clients: Connections
    answering: bool = False
    was_cut: bool = False

    def trust(self, owner: str) -> None:
        self.clients.trust(self, owner)

    def cut(self) -> None:
        self.was_cut = True


def opened(clients: Connections, count: int, owner: str | None = None, *, answering: bool = False) -> list[One]:
    found = []
    for _ in range(count):
        one = One(clients, answering)
        assert clients.begin(one, 1)
        if owner is not None:
            one.trust(owner)
        found.append(one)
    return found


def test_strangers_that_are_being_answered_go_last() -> None:
    clients = Connections(10)
    (known,) = opened(clients, 1, "a", answering=True)
    busy, idle = opened(clients, 4, answering=True), opened(clients, 1)
    assert clients.crowded
    opened(clients, 1)
    assert (idle[0].was_cut, any(one.was_cut for one in busy)) == (True, False)
    newest = opened(clients, 1, answering=True)
    newest += opened(clients, 1, answering=True)
    assert [one.was_cut for one in (*busy, *newest)] == [True, False, False, False, False, False]
    assert not known.was_cut


def test_an_owner_has_four_connections_for_each_that_it_leaves_free() -> None:
    clients = Connections(100)
    first = opened(clients, 80, "a")
    with pytest.raises(TooManyConnectionsError):
        opened(clients, 1, "a")
    opened(clients, 16, "b")
    with pytest.raises(TooManyConnectionsError):
        opened(clients, 1, "b")
    opened(clients, 1, "c")
    clients.end(first[0])
    opened(clients, 1, "c")


def test_a_connection_that_ended_before_its_key_was_known_takes_no_place() -> None:
    clients = Connections(5)
    for _ in range(20):
        (one,) = opened(clients, 1)
        clients.end(one)
        one.trust("a")
    opened(clients, 4, "a")

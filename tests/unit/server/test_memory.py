"""The budget of memory and the shares of its owners; and the share that clients have of descriptors."""

from __future__ import annotations

import pytest

from penstock.config import Config
from penstock.errors import PenstockError
from penstock.server.connections import count_clients
from penstock.server.memory import Hold, MemoryBudget, MemoryUsedUpError


def fill(budget: MemoryBudget, owner: str) -> Hold:
    """Hold as much as the owner may, in small steps."""
    hold = Hold(budget, owner)
    try:
        while True:
            hold.grow(1)
    except MemoryUsedUpError:
        return hold


def test_an_owner_holds_as_much_as_it_leaves() -> None:
    budget = MemoryBudget(1_200)
    holds = [fill(budget, "a")]
    assert holds[0].held_bytes == 600
    holds += [fill(budget, owner) for owner in ("b", "c", "d")]
    assert [hold.held_bytes for hold in holds] == [600, 300, 150, 75]
    assert fill(budget, "newcomer").held_bytes > 0
    for hold in holds:
        hold.release()
    assert budget.held_by("a") == 0


def test_a_refused_step_changes_nothing() -> None:
    budget = MemoryBudget(100)
    hold = Hold(budget, "a")
    hold.grow(40)
    with pytest.raises(MemoryUsedUpError):
        hold.grow(11)
    assert (hold.held_bytes, budget.free_bytes) == (40, 60)
    other = Hold(budget, "b")
    with pytest.raises(MemoryUsedUpError):
        other.grow(31)
    other.grow(30)
    hold.release()
    hold.owner = "c"
    hold.resize(10)
    assert (budget.held_by("a"), budget.held_by("c"), budget.free_bytes) == (0, 10, 60)


def test_clients_have_half_of_the_descriptors_that_are_left() -> None:
    config = Config()
    assert count_clients(config, 1_000_000) == config.serve.max_connections
    few = count_clients(config, 1_024)
    assert 400 <= few <= 450
    with pytest.raises(PenstockError, match="limit of 180 open files is too low"):
        count_clients(config, 180)

"""Pressure on a worker's machine: whether memory or CPU is short, and how much smaller claims should be then."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_FACTOR = 0.25
_MEMORY_SHORT, _MEMORY_ENOUGH = 0.05, 0.20
"""Shares of memory that are free: at the one claims are smallest, from the other on they are not made smaller."""
_LAG_ENOUGH_S, _LAG_LONG_S = 0.05, 0.5
"""How late the event loop is: up to the one claims are not made smaller, from the other on they are smallest."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The machine as it is now."""

    available_bytes: int
    """Memory that can be had without swapping: psutil's `available`."""
    total_bytes: int
    limit_bytes: int | None = None
    """The memory limit of the control group, if there is one."""
    used_bytes: int = 0
    """What the control group uses of it."""
    loop_lag_s: float = 0.0
    """How much later than asked for a timer fires: the CPU is short, or something holds the event loop up."""

    @property
    def free_share(self) -> float:
        """The share of memory that is free, on the machine or below the limit, whichever is less."""
        free = self.available_bytes / self.total_bytes
        if self.limit_bytes is None or self.limit_bytes >= self.total_bytes:
            return free
        return min(free, max(0, self.limit_bytes - self.used_bytes) / self.limit_bytes)


def claim_factor(figures: Figures) -> float:
    """By what to multiply the size of claims: 1 while there is enough of everything, LEAST_FACTOR when something is
    short, in between on a straight line. The scarcest counts."""
    memory = _share(figures.free_share, _MEMORY_SHORT, _MEMORY_ENOUGH)
    cpu = 1 - _share(figures.loop_lag_s, _LAG_ENOUGH_S, _LAG_LONG_S)
    return LEAST_FACTOR + (1 - LEAST_FACTOR) * min(memory, cpu)


def _share(value: float, low: float, high: float) -> float:
    """Where a value lies between two others, from 0 to 1."""
    return min(max((value - low) / (high - low), 0.0), 1.0)

"""Shares of a limit: each process gets what it wants, and where that is too much, as much as every other."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

_K = TypeVar("_K", bound=Hashable)


def apportion(limit: int, wants: Mapping[_K, int]) -> dict[_K, int]:
    """Whole shares that add up to `limit` at most; what none of them wants is shared out too, so that each has some to
    spare. The order of `wants` decides who gets the odd ones: it must be the same wherever this is asked."""
    shares = dict.fromkeys(wants, 0)
    if not wants:
        return shares
    left = max(0, limit)
    open_ = [key for key, want in wants.items() if want > 0]
    while left and open_:
        each, odd = divmod(left, len(open_))
        granted = 0
        for number, key in enumerate(open_):
            more = min(wants[key] - shares[key], each + (number < odd))
            shares[key] += more
            granted += more
        left -= granted
        open_ = [key for key in open_ if wants[key] > shares[key]]
    each, odd = divmod(left, len(shares))
    return {key: share + each + (number < odd) for number, (key, share) in enumerate(shares.items())}


def apportion_rate(rate: float, wants: Mapping[_K, int]) -> dict[_K, float]:
    """Parts of a rate, in proportion to what is wanted; a process that wants nothing keeps enough for a single call."""
    weights = {key: max(want, 0.05) for key, want in wants.items()}
    total = sum(weights.values())
    return {key: rate * weight / total for key, weight in weights.items()}

"""Whether a run takes its time: `make test-all` has every order, size and example of which `make test` has some."""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest

_VARIABLE = "PENSTOCK_TEST_ALL"


def be_thorough() -> None:
    """From now on, here and in the processes started here."""
    os.environ[_VARIABLE] = "1"


def thorough() -> bool:
    return _VARIABLE in os.environ


def as_thorough() -> list[str]:
    """Arguments of a run that is started here and takes as much time."""
    return ["--all"] if thorough() else []


def some(values: Iterable[object], count: int) -> list[object]:
    """Values of a parameter: the first so many in every run, the others only in a thorough one."""
    return [
        value if number < count else pytest.param(value, marks=pytest.mark.again) for number, value in enumerate(values)
    ]

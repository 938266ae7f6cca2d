"""Whether a run takes its time: `make test-all` has every order, size and example of which `make test` has some."""

from __future__ import annotations

import os

_VARIABLE = "PENSTOCK_TEST_ALL"


def be_thorough() -> None:
    """From now on, here and in the processes started here."""
    os.environ[_VARIABLE] = "1"


def thorough() -> bool:
    return _VARIABLE in os.environ

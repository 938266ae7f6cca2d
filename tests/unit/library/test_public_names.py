"""What is public: every name of `penstock.__all__` is there, and no other."""

from __future__ import annotations

import inspect

import penstock


def test_every_public_name_is_there_and_described() -> None:
    for name in penstock.__all__:
        found = getattr(penstock, name)
        if name != "__version__":
            assert inspect.getdoc(found), name
    assert dir(penstock) == sorted(penstock.__all__)

"""Repeated ids are found, exactly, in memory and from the spill."""

from __future__ import annotations

import errno
import tempfile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PenstockError
from penstock.intake.unique import Duplicate, UniqueIds


def repeated(ids: list[str], limit: int, **bounds: int) -> tuple[list[Duplicate], bool]:
    unique = UniqueIds(**bounds)
    try:
        for at in range(0, len(ids), 3):
            unique.add([custom_id.encode() for custom_id in ids[at : at + 3]])
        return unique.duplicates(limit)
    finally:
        unique.close()


def repeated_naively(ids: list[str], limit: int) -> tuple[list[Duplicate], bool]:
    first: dict[str, int] = {}
    found = []
    for line, custom_id in enumerate(ids, 1):
        if custom_id and first.setdefault(custom_id, line) != line:
            found.append(Duplicate(line, first[custom_id], custom_id))
    return found[:limit], len(found) > limit


BOUNDS = [{}, {"run_ids": 5}, {"run_ids": 5, "set_ids": 1}]


@pytest.mark.parametrize("bounds", BOUNDS)
@given(
    ids=st.lists(st.text(st.sampled_from("abé \n"), max_size=2), max_size=200),
    limit=st.integers(min_value=1, max_value=30),
)
def test_the_same_repeats_are_found_however_little_memory_there_is(
    bounds: dict[str, int], ids: list[str], limit: int
) -> None:
    assert repeated(ids, limit, **bounds) == repeated_naively(ids, limit)


def test_many_ids_spill_and_the_one_repeat_among_them_is_found() -> None:
    ids = [f"request-{number}" for number in range(20_000)]
    assert repeated([*ids, "request-7"], 20, run_ids=1000, set_ids=100) == (
        [Duplicate(20_001, 8, "request-7")],
        False,
    )


def test_a_full_disk_says_where_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(PenstockError, match="No space left on device") as caught:
        repeated(["a"] * 10, 20, run_ids=5)
    assert caught.value.message.startswith(tempfile.gettempdir())
    assert caught.value.hint is not None
    assert "TMPDIR" in caught.value.hint

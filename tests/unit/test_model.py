from __future__ import annotations

import pytest

from penstock.model import ID_PREFIX, BatchState, batch_public_id, new_id, parse_id, public_id


def test_ids_sort_by_the_time_they_were_made() -> None:
    ids = [new_id() for _ in range(1_000)]
    assert ids == sorted(ids)
    assert len(set(ids)) == len(ids)
    assert {(made.version, made.variant) for made in ids} == {(7, "specified in RFC 4122")}


@pytest.mark.parametrize("kind", sorted(ID_PREFIX))
def test_a_public_id_can_be_read_back(kind: str) -> None:
    made = new_id()
    assert parse_id(kind, public_id(kind, made)) == made


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "file-",
            "file-1",
            "file-" + "A" * 32,
            "file-" + "a" * 33,
            "file-" + "a" * 32 + "\n",
            "batch_" + "a" * 32,
        ),
        *("a" * 32, "file-" + "\u0661" * 32, "file-file-" + "a" * 32, "file-0000-" + "a" * 27),
    ],
)
def test_nothing_else_is_an_id(text: str) -> None:
    assert parse_id("file", text) is None


def test_batches_keep_their_names() -> None:
    made = new_id()
    assert batch_public_id(made) == public_id("batch", made) == f"batch_{made.hex}"


def test_a_batch_ends_in_one_of_four_ways() -> None:
    assert {state for state in BatchState if state.terminal} == {"completed", "failed", "cancelled", "expired"}

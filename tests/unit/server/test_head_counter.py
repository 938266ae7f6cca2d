"""Counting what the parser of a connection holds."""

from __future__ import annotations

from penstock.server.head_counter import HeadCounter


def test_a_head_in_pieces_is_counted_until_it_is_whole() -> None:
    heads = HeadCounter(100)
    heads.begin()
    heads.line(10)
    heads.piece(60)
    assert (heads.is_open, heads.too_large, heads.untold_bytes) == (True, False, 50)
    heads.piece(40)
    assert (heads.too_large, heads.untold_bytes) == (False, 90)
    heads.line(80)
    heads.end()
    heads.piece(20)
    assert (heads.is_open, heads.too_large, heads.untold_bytes, heads.head_bytes) == (False, False, 0, 90)
    heads.line(11)  # a trailer
    assert heads.too_large


def test_pieces_without_an_end_become_too_large() -> None:
    heads = HeadCounter(100)
    for _ in range(2):
        heads.piece(50)
        assert not heads.too_large
    heads.piece(1)
    assert heads.too_large


def test_many_requests_in_one_piece_are_not_one_large_head() -> None:
    heads = HeadCounter(100)
    for _ in range(20):
        heads.begin()
        heads.line(40)
        heads.end()
        heads.body(10)
        heads.end()
    heads.begin()
    heads.piece(20 * 60 + 30)
    assert not heads.too_large
    assert heads.is_open
    assert 30 <= heads.untold_bytes < 20 * 60, "what follows them is held, and not told"
    heads.piece(90)
    assert not heads.too_large, "where it began is not known"
    heads.piece(11)
    assert heads.too_large


def test_a_body_in_small_chunks_is_no_head() -> None:
    heads = HeadCounter(100)
    heads.begin()
    heads.end()
    for _ in range(50):
        heads.body(1)
        heads.piece(6)
    assert not heads.too_large
    assert heads.untold_bytes == 5

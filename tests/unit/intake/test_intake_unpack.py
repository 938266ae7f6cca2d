"""Plain, gzip and zstd by their first bytes; damage and bombs refused."""

from __future__ import annotations

import gzip
import tracemalloc
from collections import deque
from collections.abc import Callable

import pytest
import zstandard

from penstock.config import IntakeLimits
from penstock.intake.refusal import IntakeRefused
from penstock.intake.unpack import PIECE_BYTES, Unpacker

DATA = b"".join(b'{"line": %d}\n' % number for number in range(20_000))
MIB = 1024 * 1024


def unpacked(raw: bytes, *, chunk: int = 4096, limits: IntakeLimits | None = None) -> bytes:
    unpacker = Unpacker("in.jsonl", limits or IntakeLimits())
    pieces: list[bytes] = []
    for at in range(0, len(raw), chunk):
        pieces += unpacker.feed(raw[at : at + chunk])
    pieces += unpacker.finish()
    assert max(map(len, pieces), default=0) <= max(chunk, PIECE_BYTES)
    return b"".join(pieces)


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


FORMS: dict[str, Callable[[bytes], bytes]] = {
    "plain": lambda data: data,
    "gzip": gzip.compress,
    "gzip members": lambda data: gzip.compress(data[:1000]) + gzip.compress(data[1000:]),
    "gzip padded": lambda data: gzip.compress(data) + bytes(512),
    "zstd": zstd,
    "zstd frames": lambda data: zstd(data[:1000]) + zstd(data[1000:]),
    "zstd skippable frame first": lambda data: b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc" + zstd(data),
}


@pytest.mark.parametrize("chunk", [1, 4096, 1 << 22])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_back_the_data(form: str, chunk: int) -> None:
    assert unpacked(FORMS[form](DATA), chunk=chunk) == DATA


@pytest.mark.parametrize("data", [b"", b"{}", b"{}\n"])
def test_the_shortest_files(data: bytes) -> None:
    assert unpacked(data) == data
    assert unpacked(gzip.compress(data)) == data
    assert unpacked(zstd(data)) == data


@pytest.mark.parametrize("form", [gzip.compress, zstd])
@pytest.mark.parametrize("cut", [1, 9, 1000])
def test_a_file_cut_short_is_refused(form: Callable[[bytes], bytes], cut: int) -> None:
    with pytest.raises(IntakeRefused, match="ends in the middle") as caught:
        unpacked(form(DATA)[:-cut])
    assert caught.value.code == "corrupt_file"


@pytest.mark.parametrize("form", [gzip.compress, zstd])
def test_a_damaged_file_is_refused(form: Callable[[bytes], bytes]) -> None:
    raw = bytearray(form(DATA))
    raw[len(raw) // 2] ^= 0xFF
    raw[-3] ^= 0xFF
    with pytest.raises(IntakeRefused, match=r"damaged near byte|ends in the middle") as caught:
        unpacked(bytes(raw))
    assert caught.value.code == "corrupt_file"


@pytest.mark.parametrize("form", [gzip.compress, zstd])
def test_what_follows_compressed_data_must_be_compressed_data(form: Callable[[bytes], bytes]) -> None:
    with pytest.raises(IntakeRefused, match="damaged"):
        unpacked(form(DATA) + b"some text that is neither")


@pytest.mark.parametrize(
    ("start", "kind"),
    [(b"PK\x03\x04rest", "zip"), (b"BZh91AY", "bzip2"), (b"\xfd7zXZ\x00\x00", "xz"), (b"\xff\xfe{\x00", "UTF-16")],
)
def test_other_formats_are_named(start: bytes, kind: str) -> None:
    with pytest.raises(IntakeRefused, match=kind) as caught:
        unpacked(start)
    assert caught.value.code == "unsupported_format"


def test_the_size_limit_counts_what_comes_out() -> None:
    limits = IntakeLimits(max_file_bytes=len(DATA))
    assert unpacked(gzip.compress(DATA), limits=limits) == DATA
    with pytest.raises(IntakeRefused, match="max_file_bytes"):
        unpacked(gzip.compress(DATA + b"\n"), limits=limits)


@pytest.mark.parametrize("form", [lambda data: gzip.compress(data, 9), zstandard.ZstdCompressor(level=19).compress])
def test_a_bomb_is_refused_before_it_takes_memory(form: Callable[[bytes], bytes]) -> None:
    bomb = form(bytes(256 * MIB))
    tracemalloc.start()
    try:
        unpacker = Unpacker("in.jsonl", IntakeLimits(max_compression_ratio=500))
        with pytest.raises(IntakeRefused, match="max_compression_ratio"):
            deque(unpacker.feed(bomb), maxlen=0)
        assert tracemalloc.get_traced_memory()[1] < 64 * MIB
    finally:
        tracemalloc.stop()

from __future__ import annotations

import struct
import zipfile
import zlib
from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.export.sheets import zip_stream
from penstock.export.sheets.zip_stream import ZipStream

contents = st.lists(st.lists(st.binary(max_size=200) | st.just(b"<c/>" * 5_000), max_size=4), max_size=4)


def archive(parts: list[list[bytes]], **limits: int) -> bytes:
    stream = ZipStream(**limits)
    sent = []
    for number, chunks in enumerate(parts):
        sent += [stream.open(f"part{number}"), *map(stream.write, chunks), stream.close()]
    return b"".join([*sent, stream.end()])


def read_front_to_back(file: bytes) -> list[bytes]:
    """Contents of the parts as a reader gets them that cannot seek, checked against what follows each of them."""
    found = []
    while file.startswith(b"PK\3\4"):
        name_bytes, extra_bytes = struct.unpack_from("<2H", file, 26)
        inflate = zlib.decompressobj(-zlib.MAX_WBITS)
        deflated = file[30 + name_bytes + extra_bytes :]
        content = inflate.decompress(deflated)
        deflated_bytes = len(deflated) - len(inflate.unused_data)
        file = inflate.unused_data
        assert struct.unpack_from("<4s3I", file) == (b"PK\7\x08", zlib.crc32(content), deflated_bytes, len(content))
        file = file[16:]
        found.append(content)
    return found


@given(contents, st.sampled_from([0, 1, 300, zip_stream.IN_64_BITS]))
def test_readers_that_seek_and_readers_that_do_not_get_every_part(parts: list[list[bytes]], zip64_offset: int) -> None:
    file = archive(parts, zip64_offset=zip64_offset)
    expected = [b"".join(chunks) for chunks in parts]
    assert read_front_to_back(file) == expected
    with zipfile.ZipFile(BytesIO(file)) as read:
        assert read.testzip() is None
        assert read.namelist() == [f"part{number}" for number in range(len(parts))]
        assert [read.read(name) for name in read.namelist()] == expected


def test_offsets_have_64_bits_from_where_they_need_them() -> None:
    parts = [[b"a" * 100], [b"b"], [b"c"]]
    assert b"PK\6\6" not in archive(parts)
    with zipfile.ZipFile(BytesIO(archive(parts, zip64_offset=60))) as read:
        assert [part.extract_version for part in read.infolist()] == [20, 20, 45]
        assert read.read("part2") == b"c"


def test_a_part_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zip_stream, "MAX_PART_BYTES", 9)
    with pytest.raises(AssertionError, match="part0 has 10 bytes"):
        archive([[b"0123456789"]])

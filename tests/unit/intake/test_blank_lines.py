"""Blank lines cost next to nothing, whoever reads them, and are counted: a small file can hold hundreds of millions."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import closing
from itertools import accumulate
from time import thread_time

import pytest

from penstock.config import IntakeLimits, TableLimits
from penstock.intake.jsonl import JsonlParser
from penstock.intake.reader import CHUNK_BYTES
from penstock.intake.refusal import IntakeRefused
from penstock.intake.tables.csv_table import CsvTable
from penstock.intake.tables.jsonl_table import JsonlTable
from penstock.intake.tables.table import TableSpec

SIZE = 2 * 1024 * 1024


def read_requests(data: bytes) -> None:
    parser = JsonlParser("x", 1, IntakeLimits(), lambda _rows, _count: None)
    with closing(parser):
        for at in range(0, len(data), CHUNK_BYTES):
            parser.feed(data[at : at + CHUNK_BYTES])
        parser.finish()


def read_csv(data: bytes) -> None:
    for _ in CsvTable(io.BytesIO(data), "x.csv", TableSpec(), TableLimits(), IntakeLimits()).rows():
        pass


def read_jsonl(data: bytes) -> None:
    for _ in JsonlTable(io.BytesIO(data), "x.jsonl", TableSpec(), TableLimits(), IntakeLimits()).rows():
        pass


def numbered(line: bytes) -> list[bytes]:
    return [line % number for number in range(SIZE // 60)]


REQUEST = b'{"custom_id":"r%d","url":"/v1/x","body":{"model":"m","messages":[]}}\n'
READERS = {
    "requests": (read_requests, REQUEST, b'{"custom_id":"r0"}\n'),
    "csv": (read_csv, b"%d,some text that is as long as a cell of a table is\n", b"one cell\n"),
    "jsonl": (read_jsonl, b'{"a":%d,"b":"some text that is as long as one is"}\n', b"not JSON\n"),
}


def cost(read: Callable[[bytes], None], data: bytes) -> float:
    before = thread_time()
    read(data)
    return thread_time() - before


@pytest.mark.parametrize("blank", [b"\n", b"\r\n", b" \n"])
@pytest.mark.parametrize("kind", list(READERS))
def test_blank_lines_cost_no_more_than_others_of_their_size(kind: str, blank: bytes) -> None:
    read, line, _ = READERS[kind]
    lines = numbered(line)
    assert cost(read, lines[0] + blank * (SIZE // len(blank)) + lines[1]) < cost(read, b"".join(lines))


@pytest.mark.parametrize("blank", [b"\n", b"\r\n", b" \t\n"])
@pytest.mark.parametrize("kind", list(READERS))
def test_lines_behind_blank_ones_have_their_number(kind: str, blank: bytes) -> None:
    read, line, bad = READERS[kind]
    # Runs of many lengths, so that pieces are cut everywhere in them.
    lengths = [1, 0, 70_000, 3, 131_072, 131_071, 2, 400_000]
    good = [line % number for number in range(len(lengths))]
    data = b"".join(each + blank * length for each, length in zip(good, lengths, strict=True))
    with pytest.raises(IntakeRefused) as refused:
        read(data + bad)
    (found,) = refused.value.bad_lines
    assert found.line == list(accumulate(lengths))[-1] + len(lengths) + 1


def test_duplicates_behind_blank_lines_have_theirs() -> None:
    with pytest.raises(IntakeRefused) as refused:
        read_requests(REQUEST % 1 + b"\n" * 1_000_000 + REQUEST % 2 + b"\n" * 500_000 + REQUEST % 1)
    (found,) = refused.value.bad_lines
    assert found.line == 1_500_003
    assert "line 1;" in found.reason

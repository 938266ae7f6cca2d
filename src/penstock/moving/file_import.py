"""One file of the old system becomes a file with templates, its bodies byte for byte."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from psycopg import Connection

from penstock.config import IntakeLimits
from penstock.db import sql
from penstock.errors import PenstockError
from penstock.intake.explain import Fault
from penstock.intake.rows import FileLanes, Lane, pack_rows
from penstock.model import public_id
from penstock.moving.rows import SEPARATOR, LineOrder, custom_id_of
from penstock.moving.source import Source, SourceFile, SourceLine
from penstock.moving.target import SEGMENT_BYTES, SEGMENT_ROWS, SQL, copy_packed, step
from penstock.moving.watch import Watch

_COPY_TEMPLATES = sql.load("penstock.intake", "intake.sql")["copy_templates"]


@dataclass(frozen=True, slots=True)
class FileFigures:
    """What was stored of a file."""

    lines: int
    body_bytes: int
    named: int
    """Lines that had no custom id and got one."""


def import_file(
    source: Source, target: Connection, file: SourceFile, owner: str, limits: IntakeLimits, watch: Watch
) -> FileFigures | None:
    """Bring a file over; None if it was imported before."""
    with source.snapshot(), step(target) as writer:
        if target.execute(SQL["read_import"], {"id": file.id}).fetchone() is not None:
            return None
        (source_id,) = target.execute(SQL["next_source"]).fetchall()[0]
        lanes = FileLanes(source_id, limits)
        reader = _LineReader(file, lanes)
        for segment in _segments(source.lines(file.id), reader):
            writer.submit(partial(_copy_templates, segment.pack()))
            watch.add(len(segment.bodies))
        writer.flush()
        _insert(target, file, owner, source_id, lanes)
        return FileFigures(sum(lane.total for lane in lanes.values()), reader.body_bytes, reader.named)


@dataclass(slots=True)
class _Segment:
    """Lines that are written together, column by column."""

    numbers: list[int] = field(default_factory=list)
    custom_ids: list[bytes] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    lanes: list[Lane] = field(default_factory=list)

    def pack(self) -> bytes:
        rows: list[bytes] = []
        pack_rows(rows, self.numbers, self.custom_ids, self.bodies, self.lanes)
        return b"".join(rows)


def _segments(lines: Iterable[SourceLine], reader: _LineReader) -> Iterator[_Segment]:
    segment, size = _Segment(), 0
    for line in lines:
        number, custom_id, lane = reader.place(line.number, line.goes_to, line.custom_id)
        body = line.body
        segment.numbers.append(number)
        segment.custom_ids.append(custom_id)
        segment.bodies.append(body)
        segment.lanes.append(lane)
        reader.body_bytes += len(body)
        size += len(body) + 100
        if size >= SEGMENT_BYTES or len(segment.bodies) >= SEGMENT_ROWS:
            yield segment
            segment, size = _Segment(), 0
    yield segment


def _copy_templates(packed: bytes, connection: Connection) -> None:
    copy_packed(connection, _COPY_TEMPLATES, packed)


def _insert(target: Connection, file: SourceFile, owner: str, source_id: int, lanes: FileLanes) -> None:
    listed = lanes.listed()
    lines = sum(lane.total for lane in listed)
    about = {
        "id": file.id,
        "source_id": source_id,
        "owner": owner,
        "filename": file.name or f"{file.id}.jsonl",
        "lines": lines,
        "bytes": max(file.size_bytes, 0),
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "source_lanes": [lane.source_lane for lane in listed],
        "routes": [lane.route for lane in listed],
        "endpoints": [lane.endpoint for lane in listed],
        "totals": [lane.total for lane in listed],
    }
    target.execute(SQL["insert_file"], about)
    figures = json.dumps({"lines": lines})
    target.execute(SQL["record_import"], {"id": file.id, "kind": "file", "figures": figures})


class _LineReader:
    """Places the lines of a file: number, custom id, lane."""

    def __init__(self, file: SourceFile, lanes: FileLanes) -> None:
        self._file = file
        self._lanes = lanes
        self._order = LineOrder()
        self._known: dict[bytes, Lane] = {}
        self.named = 0
        self.body_bytes = 0

    def place(self, number: int, goes_to: bytes, custom_id: bytes | None) -> tuple[int, bytes, Lane]:
        line = self._order.next(number)
        lane = self._known.get(goes_to)
        if lane is None:
            lane = self._known[goes_to] = self._open(line, goes_to.decode())
        if custom_id is None:
            self.named += 1
        return line, custom_id_of(custom_id, line), lane

    def _open(self, line: int, goes_to: str) -> Lane:
        path, model, method = split_target(goes_to)
        if method.upper() != "POST":
            raise self._refusal(line, f"its method is {method}; Penstock sends POST")
        lane = self._lanes.open(path, model)
        if isinstance(lane, Fault):
            raise self._refusal(line, f"{lane.field}: {lane.reason}")
        return lane

    def _refusal(self, line: int, why: str) -> PenstockError:
        return PenstockError(
            f"line {line} of {public_id('file', self._file.id)} ({self._file.name}) cannot be taken over: {why}",
            hint="Nothing of this file was stored. Mend or delete the line in the source, or name other batches"
            " with --only.",
        )


def split_target(goes_to: str) -> tuple[str, str, str]:
    """Path, model and method. A separator inside of them is part of the model, which is then refused."""
    path, _, rest = goes_to.partition(SEPARATOR)
    model, _, method = rest.rpartition(SEPARATOR)
    return path, model, method

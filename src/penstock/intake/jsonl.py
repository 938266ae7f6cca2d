"""JSON Lines in, packed template rows out.

A push parser without I/O: `feed` takes the file's plain bytes in chunks of any size and hands rows
to its sink, ready for a binary COPY; `finish` judges the file as a whole. Every line passes through
one loop, `_parse`, whose checks are cheap screens; whatever does not pass them is looked at again,
slowly, in `explain`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from struct import Struct
from typing import Final, Literal

import msgspec

from penstock.config import IntakeLimits
from penstock.intake import explain
from penstock.intake.explain import Fault
from penstock.intake.refusal import BadLine, IntakeRefused
from penstock.intake.unique import UniqueIds

DEFAULT_ROUTE: Final = "default"
_MAX_INT4 = 2**31 - 1
_BOM = b"\xef\xbb\xbf"

# One row of penstock.templates as COPY reads it: a count of fields, then each as length and bytes.
# What is the same for all rows of a lane comes first: source_id, source_lane, the length of ordinal.
_LANE_START = Struct("!hiqiii")
_FIELDS = 7
_NULL = -1
_PIECES_PER_ROW = 2

_MAX_DIGITS = 4300
"""Python, and what is built on it, refuses to read a longer integer."""
_DIGIT_STRIDE = 256
_DIGITS_SAMPLED = re.compile(rb"[0-9]{%d}" % (_MAX_DIGITS // _DIGIT_STRIDE))

# Quotes before the body: two for each key and each string. A line that has all its keys and no more
# quotes than these has each key once and no other.
_QUOTES = 8 + 2
_QUOTES_WITH_METHOD = _QUOTES + 4
_SPACE, _OPEN = b" {"
_NOT_DECODED = (msgspec.DecodeError, RecursionError, UnicodeDecodeError, IndexError)


class _Head(msgspec.Struct, gc=False):
    """A line whose body has been replaced by a number."""

    custom_id: str
    url: str
    body: int
    method: Literal["POST"] | msgspec.UnsetType = msgspec.UNSET


class _Line(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: Literal["POST"] | msgspec.UnsetType = msgspec.UNSET


class _Body(msgspec.Struct, gc=False):
    model: str = DEFAULT_ROUTE


class _Id(msgspec.Struct):
    custom_id: str


_decode_head = msgspec.json.Decoder(_Head).decode
_decode_line = msgspec.json.Decoder(_Line).decode
_decode_body = msgspec.json.Decoder(_Body).decode
_decode_id = msgspec.json.Decoder(_Id).decode


class _RowStarts(dict[int, Callable[..., bytes]]):
    """Packs a row up to its body, for each length of custom_id: ordinal, line, custom_id, summary."""

    def __missing__(self, length: int) -> Callable[..., bytes]:
        pack = self[length] = Struct(f"!{_LANE_START.size}siiii{length}sii").pack
        return pack


_row_starts = _RowStarts()


@dataclass(frozen=True, slots=True)
class FileLane:
    """The file's requests for one (url, model): what a batch makes a lane from."""

    source_lane: int
    route: str
    endpoint: str
    total: int


@dataclass(slots=True)
class _Lane:
    row_start: bytes
    total: int = 0


Sink = Callable[[bytes, int], None]
"""Takes packed rows, and how many they are."""


class JsonlParser:
    """Checks every line, gives each its place in its lane, and finds what is wrong with the file."""

    def __init__(self, name: str, source_id: int, limits: IntakeLimits, sink: Sink) -> None:
        self._name = name
        self._source_id = source_id
        self._limits = limits
        self._sink = sink
        self._lanes: dict[tuple[str, str], _Lane] = {}
        self._unique = UniqueIds()
        self._ids: list[bytes] = []
        self._id_lines: list[int] = []
        self._bad: list[BadLine] = []
        self._held: list[bytes] = []
        """Pieces of the line that has not ended yet."""
        self._held_bytes = 0
        self._started = False
        self._line = 0
        """Physical lines so far."""
        self.requests = 0
        """Lines so far that are neither blank nor bad."""

    @property
    def lanes(self) -> list[FileLane]:
        return [
            FileLane(at, route, endpoint, lane.total)
            for at, ((endpoint, route), lane) in enumerate(self._lanes.items())
        ]

    @property
    def hopeless(self) -> bool:
        """More bad lines than will be reported: reading on would change nothing."""
        return len(self._bad) > self._limits.max_reported_lines

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the file, cut anywhere."""
        start, end = 0, chunk.rfind(b"\n")
        if end >= 0:
            if self._held_bytes > self._limits.max_line_bytes:
                self._drop_long_line()
                start = chunk.find(b"\n") + 1
            if start <= end:
                self._held.append(chunk[start:end])
                self._parse(self._take_held())
            start = end + 1
        self._hold(chunk[start:])

    def finish(self) -> None:
        """Parse the last line, which needs no newline, and refuse the file if anything is wrong."""
        if self._held_bytes > self._limits.max_line_bytes:
            self._drop_long_line()
        elif self._held_bytes:
            self._parse(self._take_held())
        self._unique.add(self._ids, self._id_lines)
        self._judge()

    def close(self) -> None:
        self._unique.close()

    def _hold(self, piece: bytes) -> None:
        self._held_bytes += len(piece)
        if self._held_bytes <= self._limits.max_line_bytes:
            self._held.append(piece)
        else:
            self._held.clear()  # the line is refused: only its end is still of interest

    def _take_held(self) -> bytes:
        block = b"".join(self._held)
        self._held.clear()
        self._held_bytes = 0
        if not self._started:
            self._started = True
            block = block.removeprefix(_BOM)
        if b"\r" in block:
            block = block.replace(b"\r\n", b"\n").removesuffix(b"\r")
        return block

    def _drop_long_line(self) -> None:
        self._take_held()
        self._line += 1
        self._note(self._line, explain.too_long(self._limits))

    def _parse(self, block: bytes) -> None:
        """Take a block of whole lines. This loop is the cost of intake: every call in it counts.

        A line is cut at its body, so that each byte is decoded once: if what stands before the body is
        an object once a number takes the body's place, and the body is an object, then so is the line.
        A line that is written differently, or fails a check, is looked at closely.
        """
        max_id_chars, max_nesting = self._limits.max_custom_id_chars, self._limits.max_nesting
        long = min(_MAX_DIGITS, self._limits.max_line_bytes)
        lanes, row_starts, unset = self._lanes, _row_starts, msgspec.UNSET
        # The decoder takes values it skips without a look at their UTF-8. Looking at the whole block
        # costs next to nothing; only a bad one is looked at line by line.
        bad_utf8 = not _is_utf8(block)
        rows: list[bytes] = []
        number = self._line
        for line in block.split(b"\n"):
            number += 1
            try:
                start = line.find(b'"body":') + 7
                if line[start] == _SPACE:
                    start += 1
                head = line[:start]
                body = line[start:-1]
                request = _decode_head(head + b"0}")
                custom_id = request.custom_id.encode()
                lane = lanes.get((request.url, _decode_body(body).model))
                if (
                    body[0] != _OPEN
                    or not line.endswith(b"}}")
                    or head.count(b'"') != (_QUOTES if request.method is unset else _QUOTES_WITH_METHOD)
                    or not 0 < len(request.custom_id) <= max_id_chars
                    or b"\0" in custom_id
                    or body.count(b"{") + body.count(b"[") >= max_nesting
                    or (len(line) > long and self._is_bad_long(line))
                    or (bad_utf8 and not _is_utf8(line))
                ):
                    lane = None
            except _NOT_DECODED:
                lane = None
            if lane is None:
                closely = self._look_closely(number, line)
                if closely is None:
                    continue
                custom_id, lane, body = closely
            length = len(custom_id)
            rows += (
                row_starts[length](lane.row_start, lane.total, 4, number, length, custom_id, _NULL, len(body)),
                body,
            )
            lane.total += 1
            self._ids.append(custom_id)
            self._id_lines.append(number)
        self._line = number
        self._pass_on(rows)

    def _pass_on(self, rows: list[bytes]) -> None:
        self._unique.add(self._ids, self._id_lines)
        self._ids.clear()
        self._id_lines.clear()
        count = len(rows) // _PIECES_PER_ROW
        self.requests += count
        if self.requests > self._limits.max_lines or self._line > _MAX_INT4:
            raise IntakeRefused(
                f"{self._name}: more than {min(self._limits.max_lines, _MAX_INT4):,} requests (max_lines)",
                code="too_many_tasks",
                hint="Split the file, or raise max_lines.",
            )
        if count and not self._bad:
            self._sink(b"".join(rows), count)

    def _is_bad_long(self, line: bytes) -> bool:
        if len(line) > self._limits.max_line_bytes:
            return True
        # A sample of every so many bytes shows a run of digits this long; few lines have one.
        return bool(_DIGITS_SAMPLED.search(line[::_DIGIT_STRIDE]) and explain.number_fault(line))

    def _look_closely(self, number: int, line: bytes) -> tuple[bytes, _Lane, bytes] | None:
        """The same decision, whatever the order of keys and whichever unknown ones are there."""
        if self.hopeless or explain.is_blank(line):
            return None
        try:
            if self._is_bad_long(line) or not _is_utf8(line):
                raise msgspec.DecodeError
            request = _decode_line(line)
            model = _decode_body(request.body).model
        except _NOT_DECODED:
            self._note(number, explain.explain(line, self._limits), _custom_id_of(line))
            return None
        lane = (
            explain.shape_fault(line, self._limits)
            or explain.custom_id_fault(request.custom_id, self._limits)
            or self._lane_of(request.url, model)
        )
        if isinstance(lane, Fault):
            self._note(number, lane, request.custom_id)
            return None
        return request.custom_id.encode(), lane, bytes(request.body)

    def _lane_of(self, url: str, model: str) -> _Lane | Fault:
        lane = self._lanes.get((url, model))
        if lane is not None:
            return lane
        if fault := explain.url_fault(url) or explain.model_fault(model):
            return fault
        if len(self._lanes) == self._limits.max_routes_per_file:
            return explain.too_many_routes(url, model, self._limits)
        row_start = _LANE_START.pack(_FIELDS, 8, self._source_id, 4, len(self._lanes), 4)
        lane = self._lanes[url, model] = _Lane(row_start)
        return lane

    def _note(self, number: int, fault: Fault, custom_id: str = "") -> None:
        if not self.hopeless:
            self._bad.append(BadLine(number, fault.field, fault.reason, fault.code))
        # A bad line's id still counts: both faults show in one go.
        if explain.custom_id_fault(custom_id, self._limits) is None:
            self._ids.append(custom_id.encode())
            self._id_lines.append(number)

    def _judge(self) -> None:
        limit = self._limits.max_reported_lines
        duplicates, more = self._unique.duplicates(limit)
        bad = {entry.line: entry for entry in self._bad}
        for line, first_line, custom_id in duplicates:
            reason = f"{explain.quoted(custom_id)} is already used on line {first_line}; expected once in the file"
            bad.setdefault(line, BadLine(line, "custom_id", reason, "duplicate_custom_id"))
        if bad:
            listed = [bad[line] for line in sorted(bad)]
            raise IntakeRefused.for_lines(self._name, listed[:limit], more=more or len(listed) > limit)
        if not self.requests:
            raise IntakeRefused(
                f"{self._name}: holds no requests",
                code="empty_file",
                hint="Expected one JSON object per line, with custom_id, url and body.",
            )


def _custom_id_of(line: bytes) -> str:
    try:
        return _decode_id(line).custom_id
    except _NOT_DECODED:
        return ""


def _is_utf8(text: bytes) -> bool:
    if text.isascii():
        return True
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True

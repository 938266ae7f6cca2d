"""JSON Lines in, packed template rows out.

A push parser without I/O: `feed` takes the file's plain bytes in chunks of any size and hands rows
to its sink, ready for a binary COPY; `finish` judges the file as a whole. Blocks of lines written
alike are taken at once; any other line is looked at closely, and `explain` says what is wrong with a
bad one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, Literal, NamedTuple

import msgspec

from penstock.config import IntakeLimits
from penstock.intake import explain
from penstock.intake.explain import Fault
from penstock.intake.refusal import BadLine, IntakeRefused
from penstock.intake.rows import PIECES_PER_ROW, FileLane, FileLanes, Lane, RowSink, pack_rows
from penstock.intake.unique import UniqueIds

DEFAULT_ROUTE: Final = "default"
_MAX_LINE = 2**31 - 2**28
"""Line numbers are int4; the rest is room for the lines of one more block."""
_BOM = b"\xef\xbb\xbf"

_MAX_DIGITS = 4300
"""Python, and what is built on it, refuses to read a longer integer."""
_DIGIT_STRIDE = 256
_DIGITS_SAMPLED = re.compile(rb"[0-9]{%d}" % (_MAX_DIGITS // _DIGIT_STRIDE))

_PLAIN = rb"[ !#-\[\]-~]"
"""What means itself in a JSON string: printable ASCII but quote and backslash."""
_CLOSE = ord("}")
_BLANK_LINES = re.compile(rb"\n[ \t\r\n]*\n")
"""From the end of a line to the end of the last blank one behind it."""
_NOT_DECODED = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


class _Line(msgspec.Struct, gc=False):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: Literal["POST"] | msgspec.UnsetType = msgspec.UNSET


class _Body(msgspec.Struct, gc=False):
    model: str = DEFAULT_ROUTE


class _BodyWithModel(msgspec.Struct, gc=False):
    model: str
    stream: bool | None = None

    def __post_init__(self) -> None:
        if self.stream:
            raise ValueError("a batch keeps whole answers")


class _WholeBody(_BodyWithModel, gc=False):
    """Body of a request to an endpoint, which is to answer as a whole."""

    model: str = DEFAULT_ROUTE


class _Id(msgspec.Struct):
    custom_id: str


_decode_line = msgspec.json.Decoder(_Line).decode
_decode_body = msgspec.json.Decoder(_Body).decode
_decode_whole_body = msgspec.json.Decoder(_WholeBody).decode
_decode_body_with_model = msgspec.json.Decoder(_BodyWithModel).decode
_decode_id = msgspec.json.Decoder(_Id).decode


class _Shape(NamedTuple):
    """How a file writes its lines, learnt from one that was found good.

    Files are written by programs, so one line's shape is nearly always the next one's: a line of the
    same shape differs in custom_id and body alone, and need not be decoded but for its body.
    """

    before_id: bytes
    find: Callable[[bytes], list[tuple[bytes, bytes]]]
    """The custom_id and body of every line of this shape in a block."""
    other_bytes: int
    """Length of a line and its newline, without those two."""
    url: str


_NO_SHAPE = _Shape(b"", lambda _: [], 0, "")
_MAX_HEAD_BYTES = 2048


class Found(NamedTuple):
    """What is found in a line."""

    custom_id: bytes
    lane: Lane | None
    """None for a line that is not taken. Its custom_id still counts: all faults show in one go."""
    body: bytes


NOTHING = Found(b"", None, b"")


class JsonlParser:
    """Checks every line, gives each its place in its lane, and finds what is wrong with the file."""

    _whole_answers = True
    """An endpoint is called with the bodies: none may ask for a streamed answer."""
    _expected = "Expected one JSON object per line, with custom_id, url and body."

    def __init__(
        self,
        name: str,
        source_id: int,
        limits: IntakeLimits,
        sink: RowSink,
        *,
        model_required: bool = False,
        skip_lines: int = 0,
    ) -> None:
        """`skip_lines` come before the first one: they are counted, and not seen here."""
        self._name = name
        self._limits = limits
        self._sink = sink
        self._model_required = model_required
        self._decode_body: Callable[[bytes], _Body | _BodyWithModel] = _decode_body
        if model_required:
            self._decode_body = _decode_body_with_model
        elif self._whole_answers:
            self._decode_body = _decode_whole_body
        self._lanes = FileLanes(source_id, limits)
        self._unique = UniqueIds()
        self._shape = _NO_SHAPE
        self._last_head: tuple[bytes, bytes] | None = None
        self._bad: list[BadLine] = []
        self._held: list[bytes] = []
        """Pieces of the line that has not ended yet."""
        self._held_bytes = 0
        self._started = False
        self._line = skip_lines
        """Physical lines so far."""
        self.requests = 0
        """Lines so far that are neither blank nor bad."""

    @property
    def lanes(self) -> list[FileLane]:
        return self._lanes.listed()

    @property
    def held_bytes(self) -> int:
        """Bytes of the line that has not ended; none if it is longer than a line may be."""
        return sum(map(len, self._held)) if self._held_bytes <= self._limits.max_line_bytes else 0

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
        if b"\r" in block:  # of line ends: a bare one is no part of a valid line
            block = block.replace(b"\r\n", b"\n").removesuffix(b"\r")
        return block

    def _drop_long_line(self) -> None:
        self._take_held()
        self._line += 1
        self._note(self._line, explain.too_long(self._limits))
        self._unique.add([b""])

    def _parse(self, block: bytes) -> None:
        """Take a block of whole lines: all at once if they are alike, else what is between blank lines."""
        if not self._take_alike_lines(block):
            start = 0
            for blank in _BLANK_LINES.finditer(block):  # millions of them are no work
                self._parse_lines(block[start : blank.start()])
                self._skip(block.count(b"\n", *blank.span()) - 1)
                start = blank.end()
            self._parse_lines(block[start:])

    def _parse_lines(self, block: bytes) -> None:
        """Take whole lines: all at once if they are alike, else one by one."""
        if explain.is_blank(block):
            self._skip(block.count(b"\n") + 1)
        elif not self._take_alike_lines(block):
            ids: list[bytes] = []
            rows: list[bytes] = []
            for line in block.split(b"\n"):
                if not self._take_alike(line, ids, rows):
                    self._take_closely(line, ids, rows)
            self._unique.add(ids)
            self._pass_on(rows)

    def _take_alike_lines(self, block: bytes) -> bool:
        ids: list[bytes] = []
        rows: list[bytes] = []
        if not self._take_alike(block, ids, rows):
            return False
        self._unique.add(ids)
        self._pass_on(rows)
        return True

    def _skip(self, lines: int) -> None:
        self._line += lines
        self._unique.skip(lines)
        self._pass_on([])

    def _take_alike(self, block: bytes, ids: list[bytes], rows: list[bytes]) -> bool:
        """Take the block if all its lines have the expected shape and nothing about them is unusual.

        Nearly all lines come this way: what is done here is what intake costs. A check that `_look_closely` makes must
        be made here too, or leave the block to it.
        """
        shape, lanes, decode_body = self._shape, self._lanes, self._decode_body
        if not block.startswith(shape.before_id):
            return False
        found = shape.find(block)
        new_ids, bodies = [custom_id for custom_id, _ in found], [body for _, body in found]
        size = sum(map(len, new_ids)) + sum(map(len, bodies)) + len(found) * shape.other_bytes - 1
        # The decoder takes values it skips without a look at their UTF-8.
        if size != len(block) or not _is_utf8(block) or self._are_unusual(bodies):
            return False
        try:
            body_lanes = [lanes[shape.url, decode_body(body).model] for body in bodies]
        except (KeyError, *_NOT_DECODED):
            return False
        ids += new_ids
        pack_rows(rows, range(self._line + 1, self._line + len(found) + 1), new_ids, bodies, body_lanes)
        self._line += len(found)
        return True

    def _are_unusual(self, bodies: list[bytes]) -> bool:
        max_nesting, longest = self._limits.max_nesting, max(map(len, bodies))
        longest_line = longest + self._shape.other_bytes + self._limits.max_custom_id_chars
        if longest_line > self._limits.max_line_bytes or (longest > _MAX_DIGITS and any(map(_has_long_number, bodies))):
            return True
        # A value nests no deeper than it has brackets; counting ends where the last one opens.
        return any(
            body.count(b"[", 0, body.rfind(b"[") + 1) + body.count(b"{", 0, body.rfind(b"{") + 1) >= max_nesting
            or body[-1] != _CLOSE
            for body in bodies
        )

    def _take_closely(self, line: bytes, ids: list[bytes], rows: list[bytes]) -> None:
        custom_id, lane, body = self._look_closely(self._line + 1, line)
        ids.append(custom_id)
        if lane is not None:
            pack_rows(rows, [self._line + 1], [custom_id], [body], [lane])
        self._line += 1

    def _pass_on(self, rows: list[bytes]) -> None:
        count = len(rows) // PIECES_PER_ROW
        self.requests += count
        if self.requests > self._limits.max_lines or self._line > _MAX_LINE:
            found = f"{self._limits.max_lines:,} requests (max_lines)"
            found = found if self._line <= _MAX_LINE else f"{_MAX_LINE:,} lines"
            raise IntakeRefused(
                f"{self._name}: more than {found}", code="too_many_tasks", hint="Split the file into several."
            )
        if count and not self._bad:
            self._sink(b"".join(rows), count)

    def _look_closely(self, number: int, line: bytes) -> Found:
        """Decide on a line of any shape."""
        if self.hopeless or explain.is_blank(line):
            return NOTHING
        try:
            if len(line) > self._limits.max_line_bytes or _has_long_number(line) or not _is_utf8(line):
                raise msgspec.DecodeError
            request = _decode_line(line)
            model = self._decode_body(request.body).model
        except _NOT_DECODED:
            return self._note(number, self._explained(line), _custom_id_of(line))
        lane = (
            explain.shape_fault(line, self._limits)
            or explain.custom_id_fault(request.custom_id, self._limits)
            or self._lanes.open(request.url, model)
        )
        if isinstance(lane, Fault):
            return self._note(number, lane, request.custom_id)
        found = Found(request.custom_id.encode(), lane, bytes(request.body))
        self._learn_shape(line, found, request.url)
        return found

    def _explained(self, line: bytes) -> Fault:
        return explain.explain(
            line, self._limits, model_required=self._model_required, whole_answers=self._whole_answers
        )

    def _learn_shape(self, line: bytes, found: Found, url: str) -> None:
        """Expect the shape of a good line of the next ones, if the body comes last."""
        head, quoted = line[: -len(found.body) - 1], b'"%b"' % found.custom_id
        if (
            len(head) > _MAX_HEAD_BYTES
            or not line.endswith(found.body + b"}")
            or not re.fullmatch(_PLAIN + b"+", found.custom_id)
        ):
            return
        before_id, _, after_id = head.partition(quoted)
        # Compiling a pattern takes as long as a hundred lines: it must have been seen twice in a row.
        if (before_id, after_id) != self._last_head:
            self._last_head = before_id, after_id
            return
        # The same text may stand elsewhere in the head: another one in its place must be the new id.
        try:
            other = _decode_line(before_id + b'"%b~"' % found.custom_id + after_id + b"{}}")
        except _NOT_DECODED:
            return
        if other.custom_id.encode() != found.custom_id + b"~" or other.url != url:
            return
        longest_id = b"%d" % self._limits.max_custom_id_chars
        pattern = b'^%b"(%b{1,%b})"%b(\\{.*)\\}$' % (re.escape(before_id), _PLAIN, longest_id, re.escape(after_id))
        find = re.compile(pattern, re.MULTILINE).findall
        self._shape = _Shape(before_id, find, len(head) - len(found.custom_id) + 2, url)

    def _note(self, number: int, fault: Fault, custom_id: str = "") -> Found:
        if not self.hopeless:
            self._bad.append(BadLine(number, fault.field, fault.reason, fault.code))
        if explain.custom_id_fault(custom_id, self._limits) is not None:
            return NOTHING
        return Found(custom_id.encode(), None, b"")

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
                hint=self._expected,
            )


def _has_long_number(text: bytes) -> bool:
    # A sample of every so many bytes shows a run of digits this long; few lines have one.
    return bool(_DIGITS_SAMPLED.search(text[::_DIGIT_STRIDE]) and explain.number_fault(text))


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

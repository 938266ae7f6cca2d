"""Request bodies that may be large: taken as they arrive and handed on in pieces, never kept.

A form's text fields may come before or after its file. The file's bytes go to a sink, which blocks and therefore runs
in a thread; while it works on one piece the next is read, and no more, so that a client is never faster than the
database.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Protocol, Self, TypeVar

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from penstock.api.errors import ApiError
from penstock.api.upload_threads import UploadWork
from penstock.tasks import ignore_result

# Mistakes in a form are told to its sender, not to the log.
logging.getLogger("python_multipart").setLevel(logging.ERROR)

PIECE_BYTES = 256 * 1024
"""The least that is handed to a sink at once, so that small network reads do not each cost a thread's turn."""

_T = TypeVar("_T")

_UPLOAD_BYTES = 1024 * 1024
"""What an upload holds beside its bytes: compressors, mostly. So those that wait for a thread are bounded too."""

_MAX_PARTS = 32
_MAX_FIELD_BYTES = 16 * 1024
_MAX_HEADERS = 8
_MAX_HEADER_BYTES = 4 * 1024
_MAX_FILENAME_CHARS = 255


class Sink(Protocol):
    """Where the bytes go."""

    @property
    def held_bytes(self) -> int:
        """How much of them is in memory."""

    def feed(self, data: bytes, /) -> None: ...

    def close(self) -> None: ...


class Feeder:
    """Gathers what arrives into pieces worth a turn in a thread, and closes the sink in the end.

    The sink works on one piece while the next is gathered. What it raises is raised with the next piece, or by `flush`.
    """

    def __init__(self, sink: Sink, work: UploadWork) -> None:
        self._sink = sink
        self._work = work
        self._memory = work.memory
        self._pieces: list[bytes] = []
        self._size = 0
        self._feeding: asyncio.Task[None] | None = None

    async def put(self, data: bytes) -> None:
        if data:
            self._pieces.append(data)
            self._size += len(data)
            if self._size >= PIECE_BYTES:
                await self._hand_on()

    async def flush(self) -> None:
        """Wait until the sink has taken everything."""
        await self._hand_on()
        await self._fed()

    async def finish(self, work: Callable[[], _T]) -> _T:
        """Run the end of the sink's work: it is stopped if the client goes."""
        return await self._work.run_for_client(work)

    async def __aenter__(self) -> Self:
        self._count_memory()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._work.stop()
        if self._feeding is not None:
            await asyncio.wait({self._feeding})
            ignore_result(self._feeding)
        await self._work.close(self._sink.close)

    async def _hand_on(self) -> None:
        await self._fed()
        self._count_memory()
        if self._pieces:
            self._feeding = asyncio.create_task(self._work.run(partial(self._feed, self._pieces)))
            self._pieces, self._size = [], 0

    def _count_memory(self) -> None:
        if self._memory is not None:
            self._memory.resize(_UPLOAD_BYTES + self._size + self._sink.held_bytes)

    def _feed(self, pieces: list[bytes]) -> None:
        for piece in pieces:
            self._sink.feed(piece)

    async def _fed(self) -> None:
        if self._feeding is not None:
            await asyncio.wait({self._feeding})  # not the task itself: a cancelled caller must not leave it behind
            self._feeding.result()
            self._feeding = None


class Form:
    """A multipart/form-data body as it arrives."""

    def __init__(
        self,
        content_type: str,
        file_field: str,
        text_fields: frozenset[str] = frozenset(),
        max_field_bytes: int = _MAX_FIELD_BYTES,
        *,
        max_files: int = 1,
        instead: str | None = None,
    ) -> None:
        """`max_files` is how often the file's field may be given, `instead` a text field that may be in its place."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not boundary:
            raise ApiError(
                400,
                "Send this as multipart/form-data with a boundary; 'Content-Type' says otherwise.",
                param=file_field,
            )
        self.fields: dict[str, str] = {}
        self.files: list[tuple[str, int]] = []
        """Name and size of each file so far; the last of them may still be arriving."""
        self.ended = False
        self._file_field = file_field
        self._text_fields = text_fields
        self._max_field_bytes = max_field_bytes
        self._instead = instead
        self._max_files = max_files
        self._parts = 0
        self._beyond = 0
        self._headers: dict[bytes, bytes] = {}
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._name: str | None = None
        self._value = bytearray()
        self._file: list[bytes] = []
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._part_begins,
                    "on_part_data": self._part_data,
                    "on_part_end": self._part_ends,
                    "on_header_field": self._header_field,
                    "on_header_value": self._header_value_data,
                    "on_header_end": self._header_ends,
                    "on_headers_finished": self._headers_end,
                    "on_end": self._end,
                },
                max_header_count=_MAX_HEADERS,
                max_header_size=_MAX_HEADER_BYTES,
            )
        except FormParserError as error:
            raise ApiError(400, f"The multipart body cannot be read: {error}") from None

    @property
    def filename(self) -> str | None:
        """Name of the first file; known once it has begun."""
        return clean_filename(self.files[0][0]) if self.files else None

    def write(self, data: bytes) -> list[bytes]:
        """Take some of the body; what of it belongs to the file, or to several, one after the other."""
        if self.ended:
            self._beyond += len(data)
            if self._beyond > _MAX_FIELD_BYTES:
                raise ApiError(400, "The multipart body goes on after its last boundary.")
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise ApiError(400, f"The multipart body cannot be read: {error}") from None
        pieces, self._file = self._file, []
        return pieces

    def finish(self) -> None:
        """The body is over. One without its last boundary was cut."""
        if not self.ended:
            raise ApiError(400, "The multipart body ends before its last boundary.")
        if not self.files and self._instead not in self.fields:
            raise missing(self._file_field)

    # -- told by the parser

    def _part_begins(self) -> None:
        self._parts += 1
        if self._parts > _MAX_PARTS + len(self.files):
            raise ApiError(400, f"The form has more than {_MAX_PARTS} fields.")
        self._headers = {}
        self._name = None
        self._value = bytearray()

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _header_value_data(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _header_ends(self) -> None:
        self._headers[bytes(self._header_name).lower()] = bytes(self._header_value)
        self._header_name.clear()
        self._header_value.clear()

    def _headers_end(self) -> None:
        kind, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        if kind != b"form-data" or b"name" not in options:
            raise ApiError(400, "A part of the form has no name.")
        try:
            name, filename = options[b"name"].decode(), options.get(b"filename", b"").decode()
        except UnicodeDecodeError:
            raise ApiError(400, "A name in the form is not UTF-8 text.") from None
        if name == self._file_field:
            self._file_begins(name, filename)
        elif name not in self._text_fields:
            shown = clean_filename(name)
            raise ApiError(422, f"Unknown parameter: '{shown}'.", param=shown, code="unknown_parameter")
        elif name in self.fields:
            raise ApiError(400, f"'{name}' is given twice.", param=name)
        self._name = name

    def _file_begins(self, field: str, name: str) -> None:
        if len(self.files) == self._max_files:
            often = "twice" if self._max_files == 1 else f"more than {self._max_files:,} times"
            raise ApiError(400, f"'{field}' is given {often}.", param=field)
        self.files.append((clean_path(name), 0))

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == self._file_field:
            self._file.append(data[start:end])
            name, size = self.files[-1]
            self.files[-1] = name, size + end - start
            return
        self._value += data[start:end]
        if len(self._value) > self._max_field_bytes:
            raise ApiError(400, f"'{self._name}' is longer than {self._max_field_bytes} bytes.", param=self._name)

    def _part_ends(self) -> None:
        if self._name is not None and self._name != self._file_field:
            try:
                self.fields[self._name] = self._value.decode()
            except UnicodeDecodeError:
                raise ApiError(400, f"'{self._name}' is not UTF-8 text.", param=self._name) from None

    def _end(self) -> None:
        self.ended = True


def clean_filename(name: str) -> str:
    """A name that can be stored and shown: no directories, no control characters; `upload` if nothing is left."""
    base = name.replace("\\", "/").rsplit("/", 1)[-1]
    kept = "".join(c for c in base if c.isprintable())[:_MAX_FILENAME_CHARS].strip()
    return kept if kept not in ("", ".", "..") else "upload"


def clean_path(name: str) -> str:
    """A path that can be stored and shown: below here, no control characters; `upload` if nothing is left."""
    parts = name.replace("\\", "/").split("/")
    kept = ["".join(c for c in part if c.isprintable()).strip() for part in parts]
    return "/".join(part for part in kept if part not in ("", ".", "..")) or "upload"


def missing(name: str) -> ApiError:
    return ApiError(400, f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter")


def invalid(name: str, message: str) -> ApiError:
    return ApiError(400, f"Invalid '{name}': {message}", param=name, code="invalid_value")


def idempotency_key(headers: Mapping[str, str]) -> str | None:
    """The key under which a call that is repeated does its work once."""
    key = headers.get("idempotency-key")
    if key is None:
        return None
    if not 1 <= len(key) <= _MAX_FILENAME_CHARS or not key.isascii() or not key.isprintable():
        raise invalid("Idempotency-Key", f"give 1 to {_MAX_FILENAME_CHARS} printable ASCII characters.")
    return key

"""Readers stand in front of the writer: bytes of a file in, packed rows of templates out, all of them checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from penstock.config import IntakeLimits
from penstock.intake.jsonl import JsonlParser
from penstock.intake.rows import FileLane, RowSink
from penstock.intake.unpack import Unpacker

CHUNK_BYTES = 128 * 1024
"""How much is parsed at once: what one chunk becomes in memory is several times its size."""


class Reader(Protocol):
    """Reads one file, from its first byte to its last. Rows go to the sink that the reader was made with."""

    @property
    def requests(self) -> int:
        """Requests found so far."""

    @property
    def hopeless(self) -> bool:
        """Nothing that follows can make the file acceptable: `finish` may be called at once to say why."""

    def feed(self, data: bytes) -> None:
        """Take the next bytes, cut anywhere. Raises IntakeRefused if nothing after them can be read."""

    def finish(self) -> list[FileLane]:
        """The file's lanes; or raises IntakeRefused with all that is wrong."""

    def close(self) -> None: ...


OpenReader = Callable[[int, RowSink], Reader]
"""Makes the reader of a file, given the file's source_id and where its rows go."""


class JsonlReader:
    """Reads JSON Lines: plain, gzip or zstd."""

    def __init__(
        self, name: str, source_id: int, limits: IntakeLimits, sink: RowSink, *, model_required: bool = False
    ) -> None:
        self._unpacker = Unpacker(name, limits)
        self._parser = JsonlParser(name, source_id, limits, sink, model_required=model_required)

    @property
    def requests(self) -> int:
        return self._parser.requests

    @property
    def hopeless(self) -> bool:
        return self._parser.hopeless

    def feed(self, data: bytes) -> None:
        for at in range(0, len(data), CHUNK_BYTES):
            for piece in self._unpacker.feed(data[at : at + CHUNK_BYTES]):
                self._parser.feed(piece)

    def finish(self) -> list[FileLane]:
        if not self.hopeless:
            for piece in self._unpacker.finish():
                self._parser.feed(piece)
        self._parser.finish()
        return self._parser.lanes

    def close(self) -> None:
        self._parser.close()


def jsonl(name: str, limits: IntakeLimits, *, model_required: bool = False) -> OpenReader:
    """Reads a file of that name as JSON Lines. With `model_required`, as the batch API wants them."""
    return lambda source_id, sink: JsonlReader(name, source_id, limits, sink, model_required=model_required)

"""Reader in front of the writer: bytes of a file in, packed rows of templates out, all of them checked."""

from __future__ import annotations

from penstock.config import IntakeLimits
from penstock.intake.function_inputs import FunctionInputParser
from penstock.intake.jsonl import JsonlParser
from penstock.intake.rows import FileLane, RowSink
from penstock.intake.unpack import Unpacker

CHUNK_BYTES = 128 * 1024
"""How much is parsed at once: what one chunk becomes in memory is several times its size."""


class JsonlReader:
    """Reads one file of JSON Lines, plain, gzip or zstd, from its first byte to its last. Its rows go to the sink.

    With `model_required` every line must name a model, as the batch API wants it. With `for_function` a line may be any
    JSON object. `skip_lines` come before the first one: they are counted, and not read here.
    """

    def __init__(
        self,
        name: str,
        source_id: int,
        limits: IntakeLimits,
        sink: RowSink,
        *,
        model_required: bool = False,
        for_function: bool = False,
        skip_lines: int = 0,
    ) -> None:
        self._unpacker = Unpacker(name, limits)
        parser = FunctionInputParser if for_function else JsonlParser
        self._parser = parser(name, source_id, limits, sink, model_required=model_required, skip_lines=skip_lines)

    @property
    def held_bytes(self) -> int:
        return self._parser.held_bytes

    @property
    def hopeless(self) -> bool:
        """Nothing that follows can make the file acceptable: `finish` may be called at once to say why."""
        return self._parser.hopeless

    def feed(self, data: bytes) -> None:
        """Take the next bytes, cut anywhere. Raises IntakeRefused if nothing after them can be read."""
        for at in range(0, len(data), CHUNK_BYTES):
            for piece in self._unpacker.feed(data[at : at + CHUNK_BYTES]):
                self._parser.feed(piece)
                if self.hopeless:  # a little that is compressed can be very much
                    return

    def finish(self) -> list[FileLane]:
        """The file's lanes; or raises IntakeRefused with all that is wrong."""
        if not self.hopeless:
            for piece in self._unpacker.finish():
                self._parser.feed(piece)
        self._parser.finish()
        return self._parser.lanes

    def close(self) -> None:
        self._parser.close()

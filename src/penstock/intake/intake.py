"""A file on its way in, from whichever side: taken as it comes, read while it comes, sealed at its end."""

from __future__ import annotations

from types import TracebackType
from typing import Final, Self
from uuid import UUID

from penstock.config import IntakeLimits
from penstock.intake import sweep
from penstock.intake.files import MESSAGE_BATCH
from penstock.intake.reader import JsonlReader
from penstock.intake.refusal import IntakeRefused
from penstock.intake.rows import FileLane
from penstock.intake.writer import Alongside, FileWriter, StoredFile

BATCH: Final = "batch"
_OF_BATCHES = (BATCH, MESSAGE_BATCH)
_TOO_LARGE = "file_too_large"


class FileIntake:
    """Takes a file's bytes as they arrive. Leaving the `with` block without `finish` stores nothing.

    The calls block, so an event loop runs them in a thread, one at a time. Errors of the database are raised as they
    are. With `keep_bytes` the file can be downloaded again as it came, and has to be what the batch API takes:
    `max_upload_bytes` at most, a model in every line. With `keep_problems` a file that no batch can run over is stored
    too, with what is wrong with it: a batch over it fails with its errors, line by line, as with the hosted services.
    With `for_function` a line may be any JSON object. `skip_lines` come before the first one, and are counted alone.

    `purpose` and `expires_after_s` may be set until `finish`. A purpose that comes only after the bytes has them read
    once more, from the pieces that were kept.
    """

    def __init__(
        self,
        conninfo: str,
        *,
        owner: str,
        worker_id: UUID,
        filename: str,
        limits: IntakeLimits,
        purpose: str | None = BATCH,
        keep_bytes: bool = False,
        keep_problems: bool = False,
        for_function: bool = False,
        skip_lines: int = 0,
        expires_after_s: float | None = None,
        idempotency_key: str | None = None,
        max_stored_bytes: int = 0,
        expected_bytes: int = 0,
    ) -> None:
        self.purpose = purpose
        self.expires_after_s = expires_after_s
        self._filename = filename
        self._limits = limits
        self._keep_bytes = keep_bytes
        self._keep_problems = keep_problems
        self._for_function = for_function
        self._skip_lines = skip_lines
        self._key = idempotency_key
        self._writer = FileWriter(
            conninfo,
            owner=owner,
            worker_id=worker_id,
            filename=filename,
            limits=limits,
            keep_bytes=keep_bytes,
            max_stored_bytes=max_stored_bytes,
            idempotency_key=idempotency_key,
            expected_bytes=expected_bytes,
        )
        self._reads_as_it_comes = purpose in _OF_BATCHES
        self._reader: JsonlReader | None = None
        self._refused: IntakeRefused | None = None
        self._sealed = False

    @property
    def file_id(self) -> UUID:
        return self._writer.file_id

    @property
    def bytes_taken(self) -> int:
        return self._writer.bytes

    @property
    def held_bytes(self) -> int:
        """Bytes in memory: of the line that has not ended, and what is not written yet."""
        return self._writer.held_bytes + (self._reader.held_bytes if self._reader is not None else 0)

    @property
    def hopeless(self) -> bool:
        """No batch will run over the file, whatever follows: `finish` may be called at once to say why."""
        return self._refused is not None or (self._reader is not None and self._reader.hopeless)

    def feed(self, data: bytes) -> None:
        """Take the next bytes, cut anywhere."""
        most = self._limits.max_upload_bytes
        if self._keep_bytes and self._writer.bytes + len(data) > most:
            raise IntakeRefused(
                f"{self._filename}: more than {most:,} bytes (max_upload_bytes)",
                code=_TOO_LARGE,
                hint="Split the file, or compress it with gzip or zstd.",
            )
        self._read_if_wanted(self._writer.take(data))

    def flush(self) -> None:
        """Wait until what was read is stored: no transaction stays open while the input pauses."""
        self._writer.flush()

    def finish(self, alongside: Alongside | None = None) -> StoredFile:
        """The input is at its end: seal the file, or raise IntakeRefused."""
        if self.purpose is None:
            raise ValueError("a file needs a purpose before it is sealed")
        with self._writer.session() as connection:
            self._read_if_wanted(self._writer.take_rest())
            lanes = self._judge() if self.purpose in _OF_BATCHES else []
            self._writer.flush()
            if not lanes and self._writer.rows:
                sweep.discard_templates(connection, self._writer.source_id)
            stored = self._writer.seal(
                lanes,
                purpose=self.purpose,
                refused=self._refused,
                idempotency_key=self._key,
                expires_after_s=self.expires_after_s,
                alongside=alongside,
            )
        self._sealed = not stored.existed
        return stored

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        if not self._sealed:
            self._writer.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_if_wanted(self, pieces: list[bytes]) -> None:
        if self._reads_as_it_comes:
            for piece in pieces:
                self._read(piece)

    def _read(self, piece: bytes) -> None:
        if self.hopeless:
            return
        try:
            self._opened_reader().feed(piece)
        except IntakeRefused as refused:
            self._refuse(refused)

    def _opened_reader(self) -> JsonlReader:
        if self._reader is None:
            self._reader = JsonlReader(
                self._filename,
                self._writer.source_id,
                self._limits,
                self._writer.write,
                model_required=self._keep_bytes,
                for_function=self._for_function,
                skip_lines=self._skip_lines,
            )
        return self._reader

    def _judge(self) -> list[FileLane]:
        """The file's lanes; none if it was refused."""
        if not self._reads_as_it_comes:
            self._writer.flush()
            for chunk in range(self._writer.chunks):
                self._read(self._writer.kept(chunk))
        if self._refused is None:
            try:
                return self._opened_reader().finish()
            except IntakeRefused as refused:
                self._refuse(refused)
        return []

    def _refuse(self, refused: IntakeRefused) -> None:
        # What expands without end is an attack on us, not a mistake in a line.
        if not self._keep_problems or refused.code == _TOO_LARGE:
            raise refused
        self._refused = refused

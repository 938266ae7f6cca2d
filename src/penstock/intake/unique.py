"""Finds custom_ids that a file holds twice, in bounded memory.

Ids wait in memory until there are enough for a run, which goes to an anonymous temporary file,
partitioned by hash. Equal ids meet in the same partition, so at the end each partition is checked
on its own with a set. The ids themselves are kept, not their hashes: the answer is exact, and
nothing has to be asked back from the database.
"""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, chain, compress, product
from typing import IO, NamedTuple

from penstock.errors import PenstockError
from penstock.intake.pace import keep_pace

_PARTITIONS = 64
_RUN_IDS = 65_536
_RUN_BYTES = 8 * 1024 * 1024
_SET_IDS = 262_144

_Segment = tuple[Sequence[bytes], Sequence[int]]


class Duplicate(NamedTuple):
    line: int
    first_line: int
    custom_id: str


class UniqueIds:
    """Takes the custom_id of every line of a file in order, then names those seen twice.

    `run_ids` bounds what waits in memory, `set_ids` what is compared at once: a partition with more
    ids is read several times, a share of them each time.
    """

    def __init__(self, *, run_ids: int = _RUN_IDS, set_ids: int = _SET_IDS) -> None:
        self._run_ids = run_ids
        self._set_ids = set_ids
        self._ids: list[bytes] = []
        self._lines: list[range] = []
        """The lines of the ids waiting."""
        self._next_line = 1
        self._waiting_bytes = 0
        self._written = 0
        """Ids in runs."""
        self._spill: IO[bytes] | None = None
        self._runs: list[array[int]] = []
        """For each run, where each partition's segment starts, and where the last one ends."""

    def add(self, ids: Sequence[bytes]) -> None:
        """The next lines' ids, in UTF-8 and without NUL, which separates them in the file. Empty for
        a line that has none."""
        self._ids += ids
        self._lines.append(range(self._next_line, self._next_line + len(ids)))
        self._next_line += len(ids)
        self._waiting_bytes += sum(map(len, ids))
        if len(self._ids) >= self._run_ids or self._waiting_bytes >= _RUN_BYTES:
            self._write_run()

    def skip(self, lines: int) -> None:
        """Pass over lines that have no id, at no cost."""
        self._next_line += lines

    def duplicates(self, limit: int) -> tuple[list[Duplicate], bool]:
        """The first `limit` repeated lines, in line order, and whether there are more."""
        if self._spill is None:
            found = _repeats([(self._ids, list(chain.from_iterable(self._lines)))], limit)
            return found[:limit], len(found) > limit
        self._write_run()
        first: list[Duplicate] = []
        more = False
        shares = 1 + self._written // _PARTITIONS // self._set_ids
        for partition, share in product(range(_PARTITIONS), range(shares)):
            segments = partial(self._segments, self._spill, partition)
            if shares > 1:
                segments = partial(_shares_of, segments, share, shares)
            first = sorted(first + _repeats_in(segments, limit))
            more = more or len(first) > limit
            del first[limit:]
        return first, more

    def close(self) -> None:
        self._ids, self._lines = [], []
        if self._spill is not None:
            self._spill.close()

    def _write_run(self) -> None:
        ids: list[list[bytes]] = [[] for _ in range(_PARTITIONS)]
        lines: list[list[int]] = [[] for _ in range(_PARTITIONS)]
        for line, custom_id in zip(chain.from_iterable(self._lines), self._ids, strict=True):
            if custom_id:
                partition = hash(custom_id) % _PARTITIONS
                ids[partition].append(custom_id)
                lines[partition].append(line)
        self._written += len(self._ids)
        self._ids, self._lines, self._waiting_bytes = [], [], 0
        segments = [
            b"".join((len(part).to_bytes(4, "little"), array("i", numbers).tobytes(), b"\0".join(part)))
            for part, numbers in zip(ids, lines, strict=True)
        ]
        start = self._runs[-1][-1] if self._runs else 0
        self._runs.append(array("q", accumulate(map(len, segments), initial=start)))
        with _disk_errors():
            if self._spill is None:
                self._spill = tempfile.TemporaryFile(prefix="penstock-ids-")  # noqa: SIM115 - see close
            self._spill.write(b"".join(segments))
            self._spill.flush()

    def _segments(self, spill: IO[bytes], partition: int) -> Iterator[_Segment]:
        for starts in self._runs:
            keep_pace()
            with _disk_errors():
                spill.seek(starts[partition])
                segment = spill.read(starts[partition + 1] - starts[partition])
            if count := int.from_bytes(segment[:4], "little"):
                text = 4 + 4 * count
                yield segment[text:].split(b"\0"), array("i", segment[4:text])


def _repeats_in(segments: Callable[[], Iterator[_Segment]], limit: int) -> list[Duplicate]:
    """Like `_repeats`, at the speed of a set where there are none, which is nearly always."""
    seen: set[bytes] = set()
    count = 0
    for ids, _ in segments():
        seen.update(ids)
        count += len(ids)
    return [] if len(seen) == count else _repeats(segments(), limit)


def _shares_of(segments: Callable[[], Iterator[_Segment]], share: int, shares: int) -> Iterator[_Segment]:
    for ids, lines in segments():
        kept = [hash(custom_id) // _PARTITIONS % shares == share for custom_id in ids]
        yield list(compress(ids, kept)), list(compress(lines, kept))


def _repeats(segments: Iterable[_Segment], limit: int) -> list[Duplicate]:
    """At most `limit + 1` repeats, the first in line order."""
    first_lines: dict[bytes, int] = {}
    found: list[Duplicate] = []
    for custom_id, line in chain.from_iterable(zip(*segment, strict=True) for segment in segments):
        first_line = first_lines.setdefault(custom_id, line)
        if first_line != line and custom_id:
            found.append(Duplicate(line, first_line, custom_id.decode()))
            if len(found) > limit:
                break
    return found


@contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PenstockError(
            f"{tempfile.gettempdir()}: cannot keep the file's custom_ids there while checking that "
            f"they are unique: {error.strerror or error}",
            hint="Free some space, or point TMPDIR at a directory with room for the file's custom_ids.",
        ) from error

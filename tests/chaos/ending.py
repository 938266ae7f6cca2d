"""What is read of results and records: from output files, from a second export, from the database, from logs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from uuid import UUID

import msgspec
import psycopg

from penstock.export.jsonl import errors_path, export_files
from penstock.model import BatchState
from tests.support.history import HistoryWriter, digest_of

_FENCED = re.compile(rb"penstock\.settle: refused (\d+) results")
_APPLIED = re.compile(rb"penstock\.settle: (\d+) results were already applied")
_LOST = re.compile(rb"penstock\.worker: worker \S+ is lost")

_RECORDS = """
SELECT batch_id, line, kind, lease_id
  FROM (SELECT l.batch_id, t.line, CASE WHEN a.not_before IS NULL THEN 'final' ELSE 'retry' END AS kind, a.lease_id,
               a.ended_at AS at
          FROM penstock.attempts a
          JOIN penstock.lanes l ON l.id = a.lane_id
          JOIN penstock.templates t USING (source_id, source_lane, ordinal)
        UNION ALL
        SELECT l.batch_id, t.line, 'reclaim', r.lease_id, r.reclaimed_at
          FROM penstock.reclaims r
          JOIN penstock.lanes l ON l.id = r.lane_id
         CROSS JOIN LATERAL unnest(r.ordinals) AS held
         CROSS JOIN LATERAL generate_series(lower(held), upper(held) - 1) AS o (ordinal)
          JOIN penstock.templates t USING (source_id, source_lane, ordinal)) AS records
 ORDER BY at, lease_id
"""
_LEASES = """
SELECT o.custom_id, o.line, o.lease_id
  FROM penstock.outcomes o JOIN penstock.lanes l ON l.id = o.lane_id
 WHERE l.batch_id = %s
"""


class _Response(msgspec.Struct):
    body: msgspec.Raw


class _Line(msgspec.Struct):
    custom_id: str
    response: _Response | None


_decoder = msgspec.json.Decoder(_Line)


class Reader:
    """Reads results into the history. Every read has a name of its own."""

    def __init__(self, database: str, history: HistoryWriter) -> None:
        self._database = database
        self._history = history

    def batches_of(self, source: Path) -> list[UUID]:
        """What was made of a file: one batch, however many asked for it."""
        with psycopg.connect(self._database) as connection:
            rows = connection.execute(
                "SELECT b.id FROM penstock.batches b JOIN penstock.files f ON f.id = b.file_id WHERE f.filename = %s",
                [source.name],
            ).fetchall()
        return [batch for (batch,) in rows]

    def read(self, batch: UUID, output: Path, name: str) -> None:
        """The output and error files of a batch. The leases, which no file shows, come from the database."""
        unit, read = batch.hex, f"{batch.hex} {name}"
        places = self._places(batch)
        self._history.record("invoke", "export", unit, {"read": read})
        for state, line in _results(output):
            number, lease = places[line.custom_id]
            digest = digest_of(bytes(line.response.body)) if line.response is not None else None
            value = {"read": read, "state": state, "digest": digest, "lease": lease}
            self._history.record("ok", "result", f"{unit}-{number}", value)
        self._history.record("ok", "export", unit, {"read": read})

    def export_again(self, batch: UUID, output: Path) -> None:
        export_files(self._database, batch, BatchState.COMPLETED, output)
        self.read(batch, output, "again")

    def _places(self, batch: UUID) -> dict[str, tuple[int, int]]:
        with psycopg.connect(self._database) as connection:
            rows = connection.execute(_LEASES, [batch]).fetchall()
        return {custom_id: (line, lease) for custom_id, line, lease in rows}


def _results(output: Path) -> Iterator[tuple[str, _Line]]:
    errors = errors_path(output)
    good = output.read_bytes().split(b"\n")[:-1]
    bad = errors.read_bytes().split(b"\n")[:-1] if errors.exists() else []
    for state, lines in (("completed", good), ("failed", bad)):
        for line in lines:
            yield state, _decoder.decode(line)


def note_records(database: str, history: HistoryWriter) -> int:
    """Every attempt that came to nothing and every lease taken back; how many leases that were."""
    with psycopg.connect(database) as connection:
        for batch, line, kind, lease in connection.execute(_RECORDS):
            history.record("info", "attempt", f"{batch.hex}-{line}", {"kind": kind, "lease": lease})
        row = connection.execute("SELECT count(*) FROM penstock.reclaims").fetchone()
    return int(row[0]) if row else 0


def note_logs(logs: Iterable[Path], history: HistoryWriter) -> None:
    """What only workers know: results refused, results written by a flush whose answer was lost."""
    for path in logs:
        text = path.read_bytes()
        for f, pattern in (("fence", _FENCED), ("already_applied", _APPLIED)):
            for count in pattern.findall(text):
                history.record("info", f, path.stem, {"count": int(count)})
        for _ in _LOST.findall(text):
            history.record("info", "lost_identity", path.stem)


def tracebacks(logs: Iterable[Path]) -> int:
    return sum(path.read_bytes().count(b"Traceback (most recent call last)") for path in logs)

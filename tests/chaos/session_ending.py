"""What is read of sessions when a run is over: from the database, from the API, and whether the tables agree."""

from __future__ import annotations

import json
from dataclasses import dataclass
from urllib.request import urlopen

import msgspec
import psycopg

from tests.chaos.callers import Told
from tests.support.history import HistoryWriter, digest_of

_STORED = """
SELECT r.lane_id, r.ordinal, s.key, t.body, o.state::text, o.response, o.lease_id
  FROM penstock.session_requests r
  JOIN penstock.sessions s ON s.id = r.session_id
  JOIN penstock.templates t ON t.source_id = -r.lane_id AND t.source_lane = 0 AND t.ordinal = r.ordinal
  LEFT JOIN penstock.outcomes o ON o.lane_id = r.lane_id AND o.ordinal = r.ordinal
 ORDER BY r.lane_id, r.ordinal
"""
_RECORDS = """
SELECT lane_id, ordinal, kind, lease_id
  FROM (SELECT lane_id, ordinal, CASE WHEN not_before IS NULL THEN 'final' ELSE 'retry' END AS kind, lease_id,
               ended_at AS at
          FROM penstock.attempts
        UNION ALL
        SELECT lane_id, generate_series(lower(held), upper(held) - 1), 'reclaim', lease_id, reclaimed_at
          FROM penstock.reclaims
         CROSS JOIN LATERAL unnest(ordinals) AS held) AS records
 ORDER BY at, lease_id
"""
_DISAGREE = """
SELECT s.key, l.total, l.next, l.busy, l.open, n.requests, n.outcomes, h.leases, h.deferrals
  FROM penstock.sessions s
  JOIN penstock.lanes l ON l.id = s.lane_id
 CROSS JOIN LATERAL (
   SELECT count(*) AS requests, count(o.ordinal) AS outcomes
     FROM penstock.session_requests r
     LEFT JOIN penstock.outcomes o USING (lane_id, ordinal)
    WHERE r.lane_id = l.id) AS n
 CROSS JOIN LATERAL (
   SELECT (SELECT count(*) FROM penstock.leases WHERE lane_id = l.id) AS leases,
          (SELECT count(*) FROM penstock.deferrals WHERE lane_id = l.id) AS deferrals) AS h
 WHERE (l.next, l.busy, l.open, n.requests, n.outcomes, h.leases, h.deferrals)
       <> (l.total, 0, true, l.total, l.total, 0, 0)
"""


class _Named(msgspec.Struct):
    user: str


class _Page(msgspec.Struct):
    data: list[Told]
    has_more: bool
    last_id: str | None


@dataclass(frozen=True, slots=True)
class SessionReader:
    database: str
    history: HistoryWriter

    def read_stored(self) -> dict[str, list[str]]:
        """Every request there is, with its place and its outcome, and every record of its attempts; the lines of each
        session in their order."""
        found: dict[str, list[str]] = {}
        names: dict[tuple[int, int], str] = {}
        with psycopg.connect(self.database) as connection:
            for lane, ordinal, key, body, state, response, lease in connection.execute(_STORED):
                line = names[lane, ordinal] = msgspec.json.decode(body, type=_Named).user
                found.setdefault(key, []).append(line)
                place = {"lines": [line], "session": key, "first": ordinal + 1}
                self.history.record("ok", "upload", line, place)
                if state is not None:
                    digest = digest_of(response) if response is not None else None
                    value = {"read": "stored", "state": state, "digest": digest, "lease": lease}
                    self.history.record("ok", "result", line, value)
            for lane, ordinal, kind, lease in connection.execute(_RECORDS):
                self.history.record("info", "attempt", names[lane, ordinal], {"kind": kind, "lease": lease})
        return found

    def read_again(self, urls: list[str], stored: dict[str, list[str]]) -> None:
        """The same over HTTP, from the replicas in turn."""
        for number, (key, lines) in enumerate(stored.items()):
            after = ""
            while True:
                url = f"{urls[number % len(urls)]}/v1/sessions/{key}/requests?limit=100{after}"
                with urlopen(url, timeout=60) as answer:
                    page = msgspec.json.decode(answer.read(), type=_Page)
                for told in page.data:
                    value = {"read": "listed", "state": told.status, "digest": told.digest}
                    self.history.record("ok", "result", lines[told.sequence - 1], value)
                if not page.has_more:
                    break
                after = f"&after={page.last_id}"

    def reclaims(self) -> int:
        with psycopg.connect(self.database) as connection:
            row = connection.execute("SELECT count(*) FROM penstock.reclaims").fetchone()
        return int(row[0]) if row else 0

    def disagreements(self) -> list[str]:
        """Sessions that are not over, or whose figures are wrong."""
        with psycopg.connect(self.database) as connection:
            cursor = connection.execute(_DISAGREE)
            names = [column.name for column in cursor.description or ()]
            return [json.dumps(dict(zip(names, row, strict=True))) for row in cursor.fetchall()]

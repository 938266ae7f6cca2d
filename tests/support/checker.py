"""The history checker: one pure function from what was seen to what must not have been.

    report = check(read_history(directory), bounds=Bounds(finish_s=90), require=("kill", "reclaim", "fence"))
    assert report.clean, report

A *unit* is what is uploaded at once: a batch, or some requests of a session. A *line* is one input; ids are unique
over the history. The obvious choice is Penstock's own: a batch's id in hex, and `<unit>-<n>` for its n-th line.

Events: `f`, types; key; value. What is marked ? may be missing.

| f, types                            | key             | value
|-------------------------------------|-----------------|-------
| upload: invoke, ok, fail, info      | unit            | lines: ids, or n for `<unit>-1` ... `<unit>-<n>`; session?;
|                                     |                 | first?: its first line's place in the session. Also with ok,
|                                     |                 | which is when clients learn the place
| dispatch: invoke                    | Idempotency-Key | as the upstream saw it. n?: names the call, also in its end;
|                                     |                 | line?: the id that the body names, else the key; attempt?
| dispatch: ok, fail                  | the same        | n?; ok: digest of the body that is about to be sent, status?
|                                     |                 | fail: it hung up without an answer
| export: invoke, ok, fail, info      | unit            | read: an id of its own
| result: (invoke,) ok                | line            | state; digest?: of the stored body; lease?; read?: its export
| status: invoke, ok                  | unit            | total, and what adds up to it: pending, in_flight, completed,
|                                     |                 | failed, not_found, skipped, cancelled, expired
| attempt: info                       | line, or unit   | rows of the database, read at the end in its order. kind:
|                                     | if none is known| retry, given_back, reclaim, fence or final; lease?; count?
| lease: info                         | line            | lease: granted, in this order
| cancel, delete, purge:              | unit            |
|   invoke, ok, fail, info            |                 |
| ask: invoke, ok, fail, info         | line            | a caller who waits for its line's answer. ok: state, digest?,
|                                     |                 | as for a result, which it is too; session, place: as told.
|                                     |                 | fail: it was turned away. info: it left by itself
| kill, stop, cont, cut, swallow,     | process         | a fault; `facts.FAULTS` has all
|   pg_crash, ...: info               |                 |
| heal: info                          |                 | no fault from here to the next
| anything else, such as bisect: info |                 | only counted. count?

A process does one thing at a time: its ok belongs to its last invoke of the same f and key. An operation that never
ended is one whose outcome is unknown.

Invariants: the events they use, and what violates them.

| I1 | upload, dispatch, result, export
|    | lost: an accepted line without a result, its unit neither cancelled, deleted nor purged
|    | unexpected: a dispatch or result of a line that was rejected or never uploaded
|    | partial: of an upload with unknown outcome some lines were taken, and this one has no result
|    | duplicated: twice in one export. two states: results that differ in state
| I2 | result, export, purge
|    | changed: reads of one line that differ in bytes or lease
|    | vanished: read before, and missing from a complete export that began later
|    | after purge: read by a read that began after the purge was confirmed
| I3 | result, dispatch
|    | wrong bytes: a body that the upstream had not sent for this line when it was read
|    | no bytes: completed without a body
| I4 | dispatch, attempt
|    | too many dispatches: more than 1 + retries + give-backs + reclaims on record
|    | different key, shared key: an Idempotency-Key is not one line's, always
| I5 | upload, dispatch, result, attempt; for sessions
|    | overtaken: a later line was dispatched before the accepted attempt of this one had ended
|    | overlap: more other attempts of it were still going on then than are on record as failed, reclaimed, fenced
|    | late dispatch: more of them began after that than are on record as reclaimed or fenced
|    | two at once: more attempts of one line went on together than are on record as given back, reclaimed or fenced;
|    |   of those that were left by their callers and are on record as retried, the end may be noticed a little late
|    | out of order: accepted after another was confirmed, and placed before it. same place: two lines in one
|    | two places: it was told to be in one, and is in another
| I6 | lease, attempt, result
|    | leases not increasing: as granted, or as on record with the outcome's last
|    | settled under a lost lease: one that was fenced or never granted. no lease: the outcome names none
| I7 | status, upload, result
|    | counts do not add up. wrong total: not the number of lines uploaded
|    | count fell: the total or a terminal count, from a read to one that began after it
|    | counts differ from results: when nothing is pending any more
| I8 | dispatch, cancel, delete, stop, cont
|    | dispatched after cancel, dispatched after delete: more than one claim interval after it was confirmed; the
|    | interval starts anew when a process that stood still goes on
| I9 | heal, faults, upload, status, result
|    | not finished: accepted before a heal that left `finish_s` until the next fault, and not seen finished by then
| I10| ask, upload, dispatch, result
|    | unanswered: a caller that stayed never got an answer. turned away: it got something else
|    | another's answer: it got the bytes of another line, or was told another session

An invariant whose events are absent is skipped, and the report says so. Absence may also mean that a run was hollow:
`require` names the kinds of `Report.seen` that must have been seen, or the report is void.
"""

from __future__ import annotations

from bisect import bisect, bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

from tests.support.checker_sessions import Found, callers_answered, session_order
from tests.support.facts import COUNTS, NOT_FINAL, TERMINAL, Facts, Unit
from tests.support.history import Event

SHOWN_PER_KIND = 20


@dataclass(frozen=True, slots=True)
class Bounds:
    """How long things may take."""

    claim_interval_s: float = 1.0
    finish_s: float = 60.0
    """The grace, plus one cycle, plus what the work itself takes."""


@dataclass(frozen=True, slots=True)
class Violation:
    invariant: str
    kind: str
    key: str
    detail: str

    def __str__(self) -> str:
        return f"{self.invariant} {self.kind}: {self.key}: {self.detail}"


@dataclass(slots=True)
class Report:
    violations: list[Violation] = field(default_factory=list)
    """The first of each kind."""
    found: Counter[str] = field(default_factory=Counter)
    """How many there are, by invariant and kind: `I1 lost`."""
    seen: Counter[str] = field(default_factory=Counter)
    """How often each kind of thing happened: upload, accepted, rejected, recovered, unknown; dispatch, answer; retry,
    given_back, reclaim, fence, final; status, export, result; cancel, delete, purge; session, overlap;
    ask, asked, left; and every other f."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Invariants that this history cannot say anything about, and why."""
    missing: tuple[str, ...] = ()
    """What was required and not seen."""

    @property
    def clean(self) -> bool:
        return not self.found and not self.missing

    def __str__(self) -> str:
        lines = [f"void: no {kind} was seen" for kind in self.missing]
        lines += [f"{count} x {name}" for name, count in sorted(self.found.items())]
        lines += [f"  {violation}" for violation in self.violations]
        lines += [f"{name} skipped: {why}" for name, why in sorted(self.skipped.items())]
        lines.append("seen: " + ", ".join(f"{count} {kind}" for kind, count in sorted(self.seen.items())))
        return "\n".join([("clean" if self.clean else "NOT CLEAN"), *lines])


def check(history: Iterable[Event], *, bounds: Bounds | None = None, require: Iterable[str] = ()) -> Report:
    """Judge a history. O(n log n) in its events."""
    facts = Facts(history)
    report = Report(seen=facts.seen)
    sessions = facts.sessions()
    facts.seen["session"] = len(sessions)
    facts.seen["recovered"] = sum(unit.verdict == "info" and unit.taken for unit in facts.units.values())
    limits = bounds or Bounds()
    reads = facts.seen["result"] + facts.seen["export"] + facts.seen["asked"]
    results = "" if reads else "no result was ever read"
    dispatches = "no dispatch was seen" if not facts.seen["dispatch"] else ""
    for invariant, needed, violations in (
        ("I1", results, _exactly_one(facts)),
        ("I2", results, _same_bytes(facts)),
        ("I3", results or dispatches, _bytes_of_upstream(facts)),
        ("I4", dispatches, _bounded_dispatches(facts)),
        ("I5", dispatches or ("" if sessions else "no session was seen"), session_order(facts, sessions)),
        ("I6", results, _leases(facts)),
        ("I7", "" if facts.seen["status"] else "no status was ever read", _counts(facts)),
        ("I8", "" if facts.seen["cancel"] + facts.seen["delete"] else "nothing was cancelled", _endings(facts, limits)),
        ("I9", "" if facts.heals else "nothing was healed", _finished(facts, limits)),
        ("I10", "" if facts.seen["ask"] else "nobody asked", callers_answered(facts)),
    ):
        if needed:
            report.skipped[invariant] = needed
            continue
        for kind, key, detail in violations:
            name = f"{invariant} {kind}"
            report.found[name] += 1
            if report.found[name] <= SHOWN_PER_KIND:
                report.violations.append(Violation(invariant, kind, key, detail))
    report.missing = tuple(kind for kind in require if not facts.seen[kind])
    return report


def _exactly_one(facts: Facts) -> Found:
    for unit in facts.units.values():
        verdict = unit.verdict
        if verdict == "info" and not unit.taken:
            continue
        for line in unit.lines:
            if verdict == "fail":
                if line.results or line.dispatches:
                    yield "unexpected", line.id, f"{unit.key} was rejected"
            elif not line.results and not unit.excused:
                kind = "lost" if verdict == "ok" else "partial"
                yield kind, line.id, f"without a result, though {unit.key} was accepted"
    for line in facts.lines.values():
        if line.unit is None:
            yield "unexpected", line.id, "nobody uploaded it"
        if len(line.results) < 2:
            continue
        reads = [result.read for result in line.results if result.read is not None]
        if len(set(reads)) < len(reads):
            yield "duplicated", line.id, f"{len(reads)} times in {len(set(reads))} exports"
        states = {result.state for result in line.results}
        if len(states) > 1:
            yield "two states", line.id, " and ".join(sorted(states))


def _same_bytes(facts: Facts) -> Found:
    for line in facts.lines.values():
        if len(line.results) > 1:
            digests = {result.digest for result in line.results}
            leases = {result.lease for result in line.results if result.lease is not None}
            if len(digests) > 1 or len(leases) > 1:
                yield "changed", line.id, f"bytes {sorted(map(str, digests))}, leases {sorted(leases)}"
        purged = line.unit.ended("purge") if line.unit else inf
        if purged < inf and any(result.begun > purged for result in line.results):
            yield "after purge", line.id, f"purged at {purged}, read again later"
    for unit in facts.units.values():
        if unit.endings.get("purge") or unit.endings.get("delete"):
            continue
        for name, export in unit.exports.items():
            if export.ended < inf:
                yield from _vanished(unit, name, export.begun)


def _vanished(unit: Unit, export: str, begun: float) -> Found:
    for line in unit.lines:
        known = line.results and line.results[0].t < begun
        if known and all(result.read != export for result in line.results):
            yield "vanished", line.id, f"read at {line.results[0].t}, missing from export {export} begun at {begun}"


def _bytes_of_upstream(facts: Facts) -> Found:
    for line in facts.lines.values():
        for result in line.results:
            if result.digest is None:
                if result.state == "completed":
                    yield "no bytes", line.id, "completed without a body"
                continue
            sent = min((call.ended for call in line.dispatches if call.digest == result.digest), default=inf)
            if sent > result.t:
                said = "never sent" if sent == inf else f"sent at {sent}"
                yield "wrong bytes", line.id, f"{result.digest} was read at {result.t} and {said}"


def _bounded_dispatches(facts: Facts) -> Found:
    excess: defaultdict[str, int] = defaultdict(int)
    users: dict[str, str] = {}
    for line in facts.lines.values():
        for key in {call.key for call in line.dispatches}:
            if users.setdefault(key, line.id) != line.id:
                yield "shared key", line.id, f"{key} is also that of {users[key]}"
        keys = {call.key for call in line.dispatches}
        if len(keys) > 1:
            yield "different key", line.id, ", ".join(sorted(keys))
        allowed = 1 + sum(line.records.get(kind, 0) for kind in NOT_FINAL)
        if len(line.dispatches) <= allowed:
            continue
        if line.unit is not None and line.unit.records:
            excess[line.unit.key] += len(line.dispatches) - allowed
        else:
            yield "too many dispatches", line.id, f"{len(line.dispatches)}, of which {allowed} are on record"
    for key, surplus in excess.items():
        spare = sum(facts.units[key].records.get(kind, 0) for kind in NOT_FINAL)
        if surplus > spare:
            yield (
                "too many dispatches",
                key,
                f"{surplus} more than its lines have on record, of which {spare} as a whole",
            )


def _leases(facts: Facts) -> Found:
    for line in facts.lines.values():
        outcome = next((result for result in line.results if result.state not in ("cancelled", "expired")), None)
        # Callers are not told the lease; who reads the database is.
        settled = next((result.lease for result in line.results if result.lease is not None), None)
        last = [settled] if outcome is not None and settled is not None else []
        for leases in (line.granted, line.released + last):
            if any(after <= before for before, after in pairwise(leases)):
                yield "leases not increasing", line.id, str(leases)
        if outcome is None:
            continue
        if settled is None:
            if facts.seen["lease"] or line.released or line.refused:
                yield "no lease", line.id, "the outcome names none"
        elif settled in line.refused or (line.granted and settled not in line.granted):
            yield "settled under a lost lease", line.id, f"{settled} was fenced or never granted"


def _counts(facts: Facts) -> Found:
    for unit in facts.units.values():
        for read in unit.statuses:
            counts = read.counts
            total = counts.get("total", 0)
            if total != sum(counts.get(name, 0) for name in COUNTS):
                yield "counts do not add up", unit.key, str(counts)
            if unit.session is None and unit.lines and total != len(unit.lines):
                yield "wrong total", unit.key, f"{total} of {len(unit.lines)} lines"
            for name, floor in read.floor.items():
                if counts.get(name, 0) < floor:
                    yield "count fell", unit.key, f"{name} was {floor} and is {counts.get(name, 0)} at {read.ended}"
        if unit.statuses and unit.lines and unit.session is None:
            yield from _exact(unit, max(unit.statuses, key=lambda read: read.ended).counts)


def _exact(unit: Unit, counts: dict[str, int]) -> Found:
    if counts.get("pending", 0) or counts.get("in_flight", 0) or not all(line.results for line in unit.lines):
        return
    states = Counter(line.results[0].state for line in unit.lines)
    shown = {name: counts.get(name, 0) for name in TERMINAL if counts.get(name, 0)}
    if shown != dict(states):
        yield "counts differ from results", unit.key, f"{shown} against {dict(states)}"


def _endings(facts: Facts, bounds: Bounds) -> Found:
    for unit in facts.units.values():
        for how in ("cancel", "delete"):
            confirmed = unit.ended(how)
            if confirmed == inf:
                continue
            last = _deadline(confirmed, bounds.claim_interval_s, facts.frozen)
            for line in unit.lines:
                for call in line.dispatches:
                    if call.begun > last:
                        yield f"dispatched after {how}", line.id, f"at {call.begun}, confirmed at {confirmed}"


def _deadline(start: float, interval_s: float, frozen: Iterable[tuple[float, float]]) -> float:
    """When an interval is over that starts anew whenever a process that stood still goes on."""
    last = start + interval_s
    for since, until in sorted(frozen):
        if since <= last and until > start:
            last = max(last, until + interval_s)
    return last


def _finished(facts: Facts, bounds: Bounds) -> Found:
    faults = facts.faults
    calm = [heal for heal in facts.heals if bisect(faults, heal) == bisect(faults, heal + bounds.finish_s)]
    for unit in facts.units.values():
        at = bisect_left(calm, unit.accepted)
        if unit.verdict != "ok" or unit.excused or at == len(calm):
            continue
        finished = min(_shown_finished(unit), _all_read(unit))
        if finished > calm[at] + bounds.finish_s:
            said = "never" if finished == inf else f"at {finished}"
            yield "not finished", unit.key, f"healed at {calm[at]}, {said} seen finished"


def _shown_finished(unit: Unit) -> float:
    return min(
        (
            read.ended
            for read in unit.statuses
            if not read.counts.get("pending", 0) and not read.counts.get("in_flight", 0) and read.counts.get("total", 0)
        ),
        default=inf,
    )


def _all_read(unit: Unit) -> float:
    return max((line.results[0].t if line.results else inf for line in unit.lines), default=inf)

"""What a history says, event by event: uploads and their lines, dispatches, results, records, reads of counts.

`checker.py` has the vocabulary and judges; nothing is judged here. One pass, in order of time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf

import msgspec

from tests.support.history import BrokenHistoryError, Event, Value, in_order

COUNTS = ("pending", "in_flight", "completed", "failed", "not_found", "skipped", "cancelled", "expired")
TERMINAL = COUNTS[2:]
NOT_FINAL = ("retry", "given_back", "reclaim")
"""Records of attempts after which another was due."""
FAULTS = frozenset(
    {
        *("kill", "stop", "pg_crash"),
        *("cut", "cut_after", "cut_before", "cut_copy", "swallow", "stall_before", "stall_after"),
        *("delay", "throttle", "freeze", "refuse"),
    }
)
_CLIENT_OPERATIONS = frozenset({"upload", "status", "export", "result", "cancel", "delete", "purge"})
_NOTHING: Value = {}


# Structs without garbage collection: there are millions of them, and none refers to another object of ours.


class Dispatch(msgspec.Struct, gc=False):
    """One call as the upstream saw it."""

    key: str
    """Its Idempotency-Key."""
    begun: float
    ended: float = inf
    digest: str | None = None


class Result(msgspec.Struct, gc=False):
    """One line of one read of results."""

    begun: float
    """When the read began."""
    t: float
    read: str | None
    state: str
    digest: str | None
    lease: int | None


@dataclass(slots=True)
class Asking:
    """One caller who waits for an answer."""

    begun: float
    verdict: str = ""
    """ok, fail, info, or nothing: it still waits."""
    digest: str | None = None
    session: str | None = None


@dataclass(slots=True)
class Line:
    """One input, from its upload to every read of its result."""

    id: str
    unit: Unit | None = None
    dispatches: list[Dispatch] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    granted: list[int] = field(default_factory=list)
    """Lease ids, in the order they were granted."""
    released: list[int] = field(default_factory=list)
    """Leases that ended in a retry, a give-back or a reclaim, in that order."""
    refused: list[int] = field(default_factory=list)
    """Leases whose late results were fenced."""
    records: dict[str, int] = field(default_factory=dict)
    """How many retries, give-backs, reclaims and fences are on record."""
    askings: list[Asking] = field(default_factory=list)


@dataclass(slots=True)
class Read:
    """One read of a unit's counts or of its results."""

    begun: float
    ended: float = inf
    counts: dict[str, int] = field(default_factory=dict)
    floor: dict[str, int] = field(default_factory=dict)
    """The highest counts that any read had shown when this one began."""


@dataclass(slots=True)
class Ending:
    begun: int = 0
    failed: int = 0
    confirmed: float = inf


@dataclass(slots=True)
class Unit:
    """What is uploaded at once, and accepted or rejected as a whole."""

    key: str
    lines: list[Line] = field(default_factory=list)
    session: str | None = None
    first: int = 1
    """The place of its first line in the session."""
    places: set[int] = field(default_factory=set)
    """What was told of that place, by whomever."""
    invoked: float = inf
    accepted: float = inf
    begun: int = 0
    failed: int = 0
    statuses: list[Read] = field(default_factory=list)
    highest: dict[str, int] = field(default_factory=dict)
    exports: dict[str, Read] = field(default_factory=dict)
    records: dict[str, int] = field(default_factory=dict)
    """Records that name no line."""
    endings: dict[str, Ending] = field(default_factory=dict)
    """Cancel, delete, purge."""

    @property
    def verdict(self) -> str:
        """ok, fail, or info: nobody knows whether it was accepted."""
        if self.accepted < inf:
            return "ok"
        return "fail" if self.failed and self.begun == self.failed else "info"

    @property
    def excused(self) -> bool:
        """Whether it was or may have been ended before its time: then not every line need have a result."""
        return any(ending.begun > ending.failed or ending.confirmed < inf for ending in self.endings.values())

    @property
    def taken(self) -> bool:
        """Whether anything came of it."""
        return any(line.results or line.dispatches for line in self.lines)

    def ended(self, how: str) -> float:
        """When its cancel, delete or purge was confirmed."""
        ending = self.endings.get(how)
        return ending.confirmed if ending else inf


class Facts:
    """A history, sorted out."""

    def __init__(self, history: Iterable[Event]) -> None:
        self.seen: Counter[str] = Counter()
        self.units: dict[str, Unit] = {}
        self.lines: dict[str, Line] = {}
        self.faults: list[float] = []
        self.heals: list[float] = []
        self.frozen: list[tuple[float, float]] = []
        """When processes stood still."""
        self._stopped: dict[str, float] = {}
        self._calls: dict[tuple[str, object], Dispatch] = {}
        self._reads: dict[tuple[str, str, str], Read] = {}
        self._exports: dict[str, Read] = {}
        self._first: dict[str, float] = {}
        self._askings: dict[tuple[str, str], Asking] = {}
        handlers: dict[str, Callable[[Event, str, Value], None]] = {
            "upload": self._upload,
            "dispatch": self._dispatch,
            "result": self._result,
            "export": self._export,
            "status": self._status,
            "lease": self._lease,
            "attempt": self._attempt,
            "cancel": self._ending,
            "delete": self._ending,
            "purge": self._ending,
            "ask": self._ask,
        }
        for event in in_order(list(history)):
            handler = handlers.get(event.f)
            if event.type == "info" and event.f in _CLIENT_OPERATIONS:
                self.seen["unknown"] += 1
            if handler is None:
                self._other(event)
                continue
            if event.key is None:
                raise BrokenHistoryError(f"'{event.f}' of {event.process} at {event.t} has no key")
            handler(event, event.key, event.value or _NOTHING)
        self.frozen += [(since, inf) for since in self._stopped.values()]

    def sessions(self) -> dict[str, list[tuple[int, Line]]]:
        """The lines of each session with their places, in order."""
        found: defaultdict[str, list[tuple[int, Line]]] = defaultdict(list)
        for unit in self.units.values():
            # Nobody knows the place of what may never have been taken.
            if unit.session is not None and (unit.verdict == "ok" or (unit.verdict == "info" and unit.taken)):
                found[unit.session] += enumerate(unit.lines, unit.first)
        for places in found.values():
            places.sort(key=lambda place: place[0])
        return found

    # -- what each kind of event adds

    def _upload(self, event: Event, key: str, value: Value) -> None:
        unit = self._unit(key)
        if not unit.lines and "lines" in value:
            for name in _names(key, value["lines"]):
                line = self._line(name)
                if line.unit is not None:
                    raise BrokenHistoryError(f"line {name} is uploaded as part of {line.unit.key} and of {key}")
                line.unit = unit
                unit.lines.append(line)
        unit.session = value.get("session", unit.session)
        if "first" in value:
            self._place(unit, value["first"])
        if event.type == "invoke":
            unit.begun += 1
            unit.invoked = min(unit.invoked, event.t)
            self.seen["upload"] += 1
        elif event.type == "ok":
            unit.accepted = min(unit.accepted, event.t)
            unit.invoked = min(unit.invoked, event.t)
            self.seen["accepted"] += 1
        elif event.type == "fail":
            unit.failed += 1
            self.seen["rejected"] += 1

    def _dispatch(self, event: Event, key: str, value: Value) -> None:
        call = (event.process, value.get("n", key))
        if event.type == "invoke":
            dispatch = self._calls[call] = Dispatch(key, event.t)
            self._line(value.get("line", key)).dispatches.append(dispatch)
            self.seen["dispatch"] += 1
            return
        begun = self._calls.pop(call, None)
        if begun is None:
            raise BrokenHistoryError(f"{event.process} ended {key} at {event.t} and never began it")
        begun.ended = event.t
        if event.type == "ok":
            begun.digest = value.get("digest")
            self.seen["answer"] += 1

    def _result(self, event: Event, key: str, value: Value) -> None:
        if event.type == "invoke":
            self._first[f"{event.process} {key}"] = event.t
        if event.type != "ok":
            return
        read = value.get("read")
        export = self._exports.get(read) if read is not None else None
        begun = export.begun if export else self._first.pop(f"{event.process} {key}", event.t)
        self._line(key).results.append(
            Result(begun, event.t, read, value["state"], value.get("digest"), value.get("lease"))
        )
        self.seen["result"] += 1

    def _export(self, event: Event, key: str, value: Value) -> None:
        read: str = value["read"]
        if event.type == "invoke":
            self._unit(key).exports[read] = self._exports[read] = Read(event.t)
            self.seen["export"] += 1
        elif event.type == "ok":
            self._exports[read].ended = event.t

    def _status(self, event: Event, key: str, value: Value) -> None:
        unit = self._unit(key)
        place = (event.process, "status", key)
        if event.type == "invoke":
            self._reads[place] = Read(event.t, floor=dict(unit.highest))
        elif event.type == "ok":
            read = self._reads.pop(place, None) or Read(event.t, floor=dict(unit.highest))
            read.ended = event.t
            read.counts = {name: count for name, count in value.items() if isinstance(count, int)}
            unit.statuses.append(read)
            for name in (*TERMINAL, "total"):
                unit.highest[name] = max(unit.highest.get(name, 0), read.counts.get(name, 0))
            self.seen["status"] += 1

    def _lease(self, event: Event, key: str, value: Value) -> None:  # noqa: ARG002 -- as the others
        self._line(key).granted.append(value["lease"])
        self.seen["lease"] += 1

    def _attempt(self, event: Event, key: str, value: Value) -> None:  # noqa: ARG002 -- as the others
        kind: str = value["kind"]
        count: int = value.get("count", 1)
        self.seen[kind] += count
        unit = self.units.get(key)
        if unit is not None and key not in self.lines:
            unit.records[kind] = unit.records.get(kind, 0) + count
            return
        line = self._line(key)
        line.records[kind] = line.records.get(kind, 0) + count
        if (lease := value.get("lease")) is not None and kind != "final":
            (line.refused if kind == "fence" else line.released).append(lease)

    def _ending(self, event: Event, key: str, value: Value) -> None:  # noqa: ARG002 -- as the others
        ending = self._unit(key).endings.setdefault(event.f, Ending())
        if event.type == "invoke":
            ending.begun += 1
        elif event.type == "fail":
            ending.failed += 1
        elif event.type == "ok":
            ending.confirmed = min(ending.confirmed, event.t)
            self.seen[event.f] += 1

    def _ask(self, event: Event, key: str, value: Value) -> None:
        line = self._line(key)
        if event.type == "invoke":
            line.askings.append(Asking(event.t))
            self._askings[event.process, key] = line.askings[-1]
            self.seen["ask"] += 1
            return
        asking = self._askings.pop((event.process, key), None)
        if asking is None:
            raise BrokenHistoryError(f"{event.process} ended its wait for {key} at {event.t} and never began it")
        asking.verdict = event.type
        self.seen[{"ok": "asked", "info": "left"}.get(event.type, "turned_away")] += 1
        if event.type != "ok":
            return
        asking.digest, asking.session = value.get("digest"), value.get("session")
        if line.unit is not None and "place" in value:
            self._place(line.unit, value["place"] - line.unit.lines.index(line))
        line.results.append(Result(asking.begun, event.t, None, value["state"], asking.digest, None))

    def _place(self, unit: Unit, first: int) -> None:
        unit.first = first
        unit.places.add(first)

    def _other(self, event: Event) -> None:
        value = event.value or _NOTHING
        self.seen[event.f] += value.get("count", 1)
        if event.f in FAULTS:
            self.faults.append(event.t)
        if event.f == "heal":
            self.heals.append(event.t)
        elif event.f == "stop":
            self._stopped[event.key or ""] = event.t
        elif event.f in ("cont", "kill") and (event.key or "") in self._stopped:
            self.frozen.append((self._stopped.pop(event.key or ""), event.t))

    def _unit(self, key: str) -> Unit:
        unit = self.units.get(key)
        if unit is None:
            unit = self.units[key] = Unit(key)
        return unit

    def _line(self, key: str) -> Line:
        line = self.lines.get(key)
        if line is None:
            line = self.lines[key] = Line(key)
        return line


def _names(unit: str, lines: int | list[str]) -> list[str]:
    return lines if isinstance(lines, list) else [f"{unit}-{number}" for number in range(1, lines + 1)]

"""Random histories that obey every invariant, and long ones."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import count

from tests.support.facts import COUNTS
from tests.support.history import Event, Kind, Value, in_order
from tests.support.story import Story


@dataclass(slots=True)
class _Done:
    """How a line ended, as its result tells."""

    at: float
    row: Value


@dataclass(slots=True)
class _Batch:
    key: str
    total: int
    accepted: float
    done: dict[str, _Done] = field(default_factory=dict)
    cancelled: bool = False

    def counts(self, at: float) -> dict[str, int]:
        found = dict.fromkeys(COUNTS, 0)
        for line in self.done.values():
            found[line.row["state"] if line.at <= at else "pending"] += 1
        return found


class _Teller:
    """Invents what could happen to some units, and tells it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.story = Story()
        self.leases = count(1)
        self.digests = (f"d{number}" for number in count(1))
        self.batches: list[_Batch] = []
        self.last = 0.0

    def chance(self, percent: int) -> bool:
        return self.rng.random() * 100 < percent

    def later(self, at: float) -> float:
        at += 0.001 + self.rng.random() * 0.1
        self.last = max(self.last, at)
        return at

    def unit(self, number: int, *, session: bool) -> None:
        key, total = f"u{number}", 1 + int(self.rng.random() * 6)
        begun = self.rng.random()
        verdict: Kind = "ok" if self.chance(70) else ("fail", "info", "invoke")[int(self.rng.random() * 3)]
        place = {"session": f"s{number}"} if session else {}
        self.story.tell("invoke", "upload", key, {"lines": total, **place}, at=begun, process=f"client-{number}")
        accepted = self.later(begun)
        if verdict != "invoke":
            self.story.tell(verdict, "upload", key, at=accepted, process=f"client-{number}")
        if verdict == "fail" or (verdict != "ok" and self.chance(50)):
            return
        batch = _Batch(key, total, accepted)
        self.batches.append(batch)
        cancel = self.later(accepted) if not session and self.chance(20) else None
        at = accepted
        for line in (f"{key}-{place}" for place in range(1, total + 1)):
            start = at if session else accepted
            if cancel is not None and self.chance(50):
                batch.done[line] = _Done(cancel, {"state": "cancelled"})
                continue
            at = self.line(batch, line, start)
        if cancel is not None:
            batch.cancelled = True
            self.story.tell("invoke", "cancel", key, at=cancel, process=f"client-{number}")
            # Confirmed when all is over: whatever was in flight is allowed to finish.
            self.story.tell("ok", "cancel", key, at=self.later(self.last), process=f"client-{number}")

    def line(self, batch: _Batch, line: str, at: float) -> float:
        """Some attempts that come to nothing, then one that is accepted."""
        strays: list[int] = []
        while self.chance(40):
            lease, begun = next(self.leases), self.later(at)
            number = self.story.begin(line, at=begun)
            kind = ("retry", "given_back", "reclaim")[int(self.rng.random() * 3)]
            self.story.tell("info", "attempt", line, {"kind": kind, "lease": lease}, process="reader", at=1_000 + begun)
            at = self.later(begun)
            if kind == "retry":
                self.story.answer(number, line, next(self.digests), at=at)
            elif kind == "reclaim" and self.chance(50):
                strays.append(number)  # a zombie: it gets its answer after somebody else's was accepted
                fence = {"kind": "fence", "lease": lease}
                self.story.tell("info", "attempt", line, fence, process="reader", at=1_000 + begun)
        lease, digest = next(self.leases), next(self.digests)
        number = self.story.begin(line, at=self.later(at))
        ended = self.later(at + 0.2)
        self.story.answer(number, line, digest, at=ended)
        for stray in strays:
            self.story.answer(stray, line, next(self.digests), at=self.later(ended + self.rng.random()))
        state = "completed" if self.chance(90) else "failed"
        settled = self.later(ended)
        batch.done[line] = _Done(settled, {"state": state, "digest": digest, "lease": lease})
        return settled

    def read(self, batch: _Batch, at: float, reader: str) -> None:
        """A status and an export, both of which see the instant `at`."""
        counts = {"total": batch.total, **batch.counts(at)}
        self.story.tell("invoke", "status", batch.key, at=at - 0.01, process=reader)
        self.story.tell("ok", "status", batch.key, counts, at=at + 0.01, process=reader)
        read = {"read": f"{reader} {batch.key} {at}"}
        self.story.tell("invoke", "export", batch.key, read, at=at - 0.005, process=reader)
        for line, done in batch.done.items():
            if done.at <= at:
                self.story.tell("ok", "result", line, {**done.row, **read}, at=at + 0.005, process=reader)
        self.story.tell("ok", "export", batch.key, read, at=at + 0.01, process=reader)

    def faults(self) -> None:
        for number in range(int(self.rng.random() * 4)):
            at = self.rng.random() * self.last
            self.story.tell("info", "stop", f"worker-{number}", process="injector", at=at)
            self.story.tell("info", "cont", f"worker-{number}", process="injector", at=self.later(at))
            self.story.tell("info", "kill", f"worker-{number}", process="injector", at=self.rng.random() * self.last)
        self.last += 0.1
        self.story.tell("info", "heal", process="injector", at=self.last)


def good_history(rng: random.Random, *, batches: int = 3, sessions: int = 2) -> list[Event]:
    """A random history that obeys every invariant, with `finish_s` and `claim_interval_s` of a second or more."""
    teller = _Teller(rng)
    for number in range(batches + sessions):
        teller.unit(number, session=number >= batches)
    middle = teller.last / 2
    teller.faults()
    end = teller.last + 0.1
    for batch in teller.batches:
        teller.read(batch, max(middle, batch.accepted + 0.1), "reader-1")
        teller.read(batch, end, "reader-2")
        teller.read(batch, end + 0.1, "reader-1")
    return in_order(teller.story.events)


def long_history(events: int) -> list[Event]:
    """So many events or a few more of a good run with large batches: dispatches, retries, results, reads."""
    story, leases = Story(), count(1)
    story.fault("kill")
    lines_per_unit = 10_000
    while len(story.events) < events:
        unit = f"at {len(story.events)}"
        story.upload(unit, lines_per_unit)
        rows: dict[str, Value] = {}
        for number in range(1, lines_per_unit + 1):
            line = f"{unit}-{number}"
            if number % 4 == 0:
                story.call(line, f"e{line}")
                story.record(line, "retry", next(leases))
            story.call(line, f"d{line}")
            rows[line] = {"state": "completed", "digest": f"d{line}", "lease": next(leases)}
            if number % 10 == 0:
                story.status(unit, lines_per_unit, completed=number, pending=lines_per_unit - number)
        story.export(unit, rows)
        story.export(unit, rows)
        story.status(unit, lines_per_unit, completed=lines_per_unit)
    story.heal()
    return story.events

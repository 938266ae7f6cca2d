"""Histories told by hand, for tests of the checker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tests.support.history import Event, Kind, Value


@dataclass(slots=True)
class Story:
    """A history as it is told: every sentence happens a little later than the one before, unless it says when."""

    events: list[Event] = field(default_factory=list)
    now: float = 0.0
    _numbers: count[int] = field(default_factory=lambda: count(1))

    def tell(
        self,
        kind: Kind,
        f: str,
        key: str | None = None,
        value: Value | None = None,
        *,
        process: str = "client",
        at: float | None = None,
    ) -> None:
        if at is None:
            self.now += 0.001
            at = self.now
        self.events.append(Event(at, process, kind, f, key, value))

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def upload(self, unit: str, lines: int, verdict: Kind = "ok", **place: object) -> None:
        self.tell("invoke", "upload", unit, {"lines": lines, **place})
        if verdict != "invoke":
            self.tell(verdict, "upload", unit)

    def begin(self, line: str, *, key: str | None = None, at: float | None = None) -> int:
        number = next(self._numbers)
        self.tell("invoke", "dispatch", key or line, {"n": number, "line": line}, process="upstream", at=at)
        return number

    def answer(self, number: int, line: str, digest: str, *, at: float | None = None) -> None:
        self.tell("ok", "dispatch", line, {"n": number, "digest": digest, "status": 200}, process="upstream", at=at)

    def call(self, line: str, digest: str) -> None:
        """Dispatched and answered."""
        self.answer(self.begin(line), line, digest)

    def record(self, line: str, kind: str, lease: int | None = None) -> None:
        self.tell("info", "attempt", line, {"kind": kind, "lease": lease}, process="reader")

    def export(self, unit: str, rows: Mapping[str, Value], *, read: str | None = None, whole: bool = True) -> None:
        """One read of results; `rows` by line."""
        read = read or f"read-{next(self._numbers)}"
        self.tell("invoke", "export", unit, {"read": read})
        for line, row in rows.items():
            self.tell("ok", "result", line, {"read": read, **row})
        self.tell("ok" if whole else "info", "export", unit, {"read": read})

    def status(self, unit: str, total: int, **counts: int) -> None:
        self.tell("invoke", "status", unit)
        self.tell("ok", "status", unit, {"total": total, **counts})

    def end(self, how: str, unit: str, verdict: Kind = "ok") -> None:
        """Cancel, delete or purge."""
        self.tell("invoke", how, unit)
        self.tell(verdict, how, unit)

    def fault(self, f: str, process: str = "worker-1") -> None:
        self.tell("info", f, process, process="injector")

    def heal(self) -> None:
        self.tell("info", "heal", process="injector")


def row(digest: str | None = "d", lease: int | None = 2, state: str = "completed") -> Value:
    return {"state": state, "digest": digest, "lease": lease}


def served(lines: int = 1, **place: Any) -> Story:
    """A unit `u`, all of whose lines were dispatched once, in order, and answered `d1`, `d2`, ..."""
    story = Story()
    story.upload("u", lines, **place)
    for number in range(1, lines + 1):
        story.call(f"u-{number}", f"d{number}")
    return story


def rows(lines: int) -> dict[str, Value]:
    return {f"u-{number}": row(f"d{number}", number) for number in range(1, lines + 1)}


def finished(lines: int = 1, **place: Any) -> Story:
    """The same, read once."""
    story = served(lines, **place)
    story.export("u", rows(lines))
    return story


Telling = Callable[[], Story]


class Shelf:
    """Stories by name: bad ones with what is wrong in them, and good ones."""

    def __init__(self) -> None:
        self.bad: dict[str, tuple[str, Telling]] = {}
        self.good: dict[str, Telling] = {}

    def add_bad(self, expected: str) -> Callable[[Telling], Telling]:
        def take(tell: Telling) -> Telling:
            self.bad[tell.__name__] = (expected, tell)
            return tell

        return take

    def add_good(self, tell: Telling) -> Telling:
        self.good[tell.__name__] = tell
        return tell

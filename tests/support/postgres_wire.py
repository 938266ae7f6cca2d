"""One PostgreSQL connection as a proxy sees it: which statement is being answered, and whose moment has come.

Messages are framed and forwarded whole. Requests are queued as they are sent; answers take them from the queue in
the same order, which holds for the simple and the extended protocol, for pipelines and for COPY. No sockets here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from struct import Struct
from typing import Literal

from tests.support.proxy_link import Back, Cut, Stall, Step, Trigger

_INT = Struct("!i")
_SSL_REQUEST, _GSS_REQUEST, _CANCEL_REQUEST = 80877103, 80877104, 80877102
_STARTUP = b"startup"
# Each is answered by one ReadyForQuery; after an error the server skips to the next of them.
_BOUNDARIES = (b"S", b"Q", b"F", _STARTUP)

CopyPoint = int | Literal["middle", "last"]
"""Where COPY data is cut: after so many bytes, in the middle, or before the last byte."""


class Moment(Enum):
    SENT = "when the statement is sent"
    BEFORE = "before it reaches the server"
    COPYING = "while its COPY data is on the way"
    AFTER = "after the server is done with it, before the client knows"


@dataclass(frozen=True, slots=True)
class Rule:
    """What to do to a statement whose text matches, and when. With no step it is only counted."""

    matches: Callable[[str], bool]
    moment: Moment
    trigger: Trigger
    step: Cut | Stall | None = None
    point: CopyPoint = 0


@dataclass(slots=True)
class Traffic:
    """What went through all connections of a proxy."""

    statements: int = 0
    transactions: int = 0
    """That ended, either way."""
    errors: int = 0
    copied_bytes: int = 0
    """COPY data from clients."""


class Frames:
    """Cuts a stream of bytes into messages: (type, whole message). A client's first messages have no type: b""."""

    def __init__(self, *, typed: bool) -> None:
        self._typed = typed
        self._chunks: list[bytes] = []
        self._size = 0
        self._needed = 0

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        self._chunks.append(data)
        self._size += len(data)
        if self._size < self._needed:
            return []
        data = b"".join(self._chunks)
        frames: list[tuple[bytes, bytes]] = []
        at = 0
        while (end := self._end(data, at)) <= len(data):
            frame = data[at:end]
            frames.append((frame[:1] if self._typed else b"", frame))
            # Requests for encryption come before the startup message and have no type either.
            self._typed = self._typed or _startup_code(frame) not in (_SSL_REQUEST, _GSS_REQUEST)
            at = end
        self._chunks = [data[at:]]
        self._size = len(data) - at
        self._needed = end - at
        return frames

    def _end(self, data: bytes, at: int) -> int:
        skip = 1 if self._typed else 0
        head = at + skip + 4
        if len(data) < head:
            return head
        length: int = _INT.unpack_from(data, at + skip)[0]
        return at + skip + length


def _startup_code(frame: bytes) -> int:
    code: int = _INT.unpack_from(frame, 4)[0]
    return code


def _strings(frame: bytes, count: int) -> list[str]:
    return [part.decode(errors="replace") for part in frame[5:].split(b"\0", count)[:count]]


@dataclass(slots=True, eq=False)
class _Pending:
    """A rule that waits for its moment in the life of one statement."""

    rule: Rule
    text: str
    flushed: bool = False
    """The client wants answers before the end of its transaction: then only the end is withheld."""


@dataclass(slots=True, eq=False)
class _Request:
    """Something the server owes an answer for."""

    kind: bytes
    pending: _Pending | None = None


@dataclass(slots=True, eq=False)
class _CopyCut:
    """Lets a COPY's data through up to a point. Both methods say what passes, and whether that was all."""

    pending: _Pending
    sent: int = 0
    kept: list[bytes] = field(default_factory=list)
    """Where the point depends on the size, everything waits until that is known."""

    def data(self, frame: bytes) -> tuple[list[bytes], bool]:
        point = self.pending.rule.point
        if isinstance(point, int):
            return self._up_to(point, frame)
        self.kept.append(frame)
        return [], False

    def done(self) -> tuple[list[bytes], bool]:
        point = self.pending.rule.point
        if isinstance(point, int):
            return [], self.sent == point
        total = sum(len(frame) - 5 for frame in self.kept)
        passing: list[bytes] = []
        for frame in self.kept:
            pieces, cut = self._up_to(total // 2 if point == "middle" else total - 1, frame)
            passing += pieces
            if cut:
                return passing, True
        return passing, False

    def _up_to(self, limit: int, frame: bytes) -> tuple[list[bytes], bool]:
        size, room = len(frame) - 5, limit - self.sent
        self.sent += size
        if size <= room:
            return [frame], False
        return [frame[: 5 + room]] if room else [], True


class Conversation:
    """Both ways of one connection: a screen for a proxy's link."""

    def __init__(self, rules: Sequence[Rule], traffic: Traffic, on_fire: Callable[[Trigger, str], None]) -> None:
        self._rules = rules
        self._traffic = traffic
        self._on_fire = on_fire
        self._client_frames = Frames(typed=False)
        self._server_frames = Frames(typed=True)
        self._texts: dict[str, str] = {}
        """Prepared statements by name."""
        self._portals: dict[str, str] = {}
        """The texts bound to portals."""
        self._requests: deque[_Request] = deque()
        self._executed: _Pending | None = None
        """Done, and waits for the end of its transaction."""
        self._held: list[bytes] = []
        self._copying = False
        self._copy_cut: _CopyCut | None = None
        self._in_transaction = False
        self._skipping = False
        """The server has refused what was sent and skips the rest, up to a Sync that is still on its way."""

    def up(self, data: bytes) -> Iterator[Step]:
        return _joined(step for kind, frame in self._client_frames.feed(data) for step in self._request(kind, frame))

    def down(self, data: bytes) -> Iterator[Step]:
        return _joined(step for kind, frame in self._server_frames.feed(data) for step in self._answer(kind, frame))

    def ended(self) -> None:
        """The connection is gone: what waited for its moment here may have it on another."""
        self._give_back_copy()
        self._give_back(self._executed)
        for request in self._requests:
            self._give_back(request.pending)
        self._requests.clear()
        self._executed = None

    # -- requests

    def _request(self, kind: bytes, frame: bytes) -> list[Step]:
        if self._skipping and kind in (b"P", b"B", b"D", b"C", b"E", b"Q", b"F"):
            return [frame]  # it will not be answered
        match kind:
            case b"":
                return self._startup(frame)
            case b"Q":
                return self._statement(kind, _strings(frame, 1)[0], frame)
            case b"E":
                return self._statement(kind, self._portals.get(_strings(frame, 1)[0], ""), frame)
            case b"P":
                name, text = _strings(frame, 2)
                self._texts[name] = text
            case b"B":
                portal, name = _strings(frame, 2)
                self._portals[portal] = self._texts.get(name, "")
            case b"H":
                return self._flush(frame)
            case b"d":
                return self._copy_data(frame)
            case b"c" | b"f":
                return self._copy_ends(kind, frame)
        if kind in (b"P", b"B", b"D", b"C", b"F") or (kind == b"S" and not self._copying):
            self._skipping = False
            self._requests.append(_Request(kind))
        return [frame]

    def _startup(self, frame: bytes) -> list[Step]:
        code = _startup_code(frame)
        if code in (_SSL_REQUEST, _GSS_REQUEST):
            return [Back(b"N")]
        if code != _CANCEL_REQUEST:
            self._requests.append(_Request(_STARTUP))
        return [frame]

    def _statement(self, kind: bytes, text: str, frame: bytes) -> list[Step]:
        matching = [rule for rule in self._rules if rule.matches(text)]
        for watcher in matching:
            if watcher.moment is Moment.SENT and watcher.trigger.take():
                self._on_fire(watcher.trigger, text)
        rule = next((rule for rule in matching if rule.moment is not Moment.SENT and rule.trigger.take()), None)
        if rule is None:
            return self._sent(kind, frame)
        if rule.moment is not Moment.BEFORE:
            return self._sent(kind, frame, _Pending(rule, text))
        self._on_fire(rule.trigger, text)
        if isinstance(rule.step, Stall):
            return [rule.step, *self._sent(kind, frame)]
        return [rule.step or Cut.RST]

    def _sent(self, kind: bytes, frame: bytes, pending: _Pending | None = None) -> list[Step]:
        self._in_transaction = True
        self._traffic.statements += 1
        self._requests.append(_Request(kind, pending))
        return [frame]

    def _flush(self, frame: bytes) -> list[Step]:
        """The client wants answers now: to withhold them would only make it wait."""
        for request in reversed(self._requests):
            if request.kind in _BOUNDARIES:
                return [frame]
            if request.pending is not None:
                request.pending.flushed = True
        if self._executed is not None:
            self._executed.flushed = True
        return [*map(Back, self._release()), frame]

    def _copy_data(self, frame: bytes) -> list[Step]:
        self._traffic.copied_bytes += len(frame) - 5
        if self._copy_cut is None:
            return [frame]
        passing, cut = self._copy_cut.data(frame)
        return [*passing, *self._cut_copy(cut)]

    def _copy_ends(self, kind: bytes, frame: bytes) -> list[Step]:
        self._copying = False
        if self._copy_cut is None:
            return [frame]
        passing, cut = self._copy_cut.done() if kind == b"c" else (self._copy_cut.kept, False)
        steps = [*passing, *self._cut_copy(cut)]
        if not cut:
            self._give_back_copy()
            steps.append(frame)
        return steps

    def _cut_copy(self, cut: bool) -> list[Step]:
        if not cut or self._copy_cut is None:
            return []
        pending = self._copy_cut.pending
        self._copy_cut = None
        self._on_fire(pending.rule.trigger, pending.text)
        return [pending.rule.step or Cut.RST]

    # -- answers

    def _answer(self, kind: bytes, frame: bytes) -> list[Step]:
        head = self._requests[0] if self._requests else None
        pending = self._executed or (head.pending if head else None)
        match kind:
            case b"Z":
                return self._ready(frame)
            case b"E":
                return self._error(frame)
            case b"G" | b"W":
                return self._copy_begins(frame)
            case b"1" | b"2" | b"3":
                self._requests.popleft()
            case b"T" | b"n" if head is not None and head.kind == b"D":
                self._requests.popleft()
            case b"C" | b"I" | b"s" if head is not None and head.kind == b"E":
                self._requests.popleft()
                self._done(head)
        if pending is not None and pending.rule.moment is Moment.AFTER and not pending.flushed:
            self._held.append(frame)
            return []
        return [frame]

    def _done(self, request: _Request) -> None:
        if self._executed is None:
            self._executed = request.pending
        else:
            self._give_back(request.pending)  # its transaction is lost once already

    def _ready(self, frame: bytes) -> list[Step]:
        """Only here is a statement outside a transaction committed: its own completion was sent before."""
        boundary = self._requests.popleft() if self._requests else None
        pending = self._executed or (boundary.pending if boundary else None)
        self._executed = None
        if self._in_transaction and frame[5:6] == b"I":
            self._in_transaction = False
            self._traffic.transactions += 1
        if pending is None:
            return [frame]
        if pending.rule.moment is not Moment.AFTER or pending.rule.step is None:
            self._give_back(pending)  # it was to be cut while copying, and copied nothing
            return [frame]
        self._on_fire(pending.rule.trigger, pending.text)
        if isinstance(pending.rule.step, Stall):
            return [pending.rule.step, *self._release(), frame]
        self._held.clear()
        return [pending.rule.step]

    def _error(self, frame: bytes) -> list[Step]:
        """Nothing came of the statement, nor of what was executed along with it: the client may know."""
        self._traffic.errors += 1
        self._copying = False
        self._give_back_copy()
        self._give_back(self._executed)
        self._executed = None
        while self._requests and self._requests[0].kind not in _BOUNDARIES:
            self._give_back(self._requests.popleft().pending)
        if self._requests:
            self._give_back(self._requests[0].pending)
            self._requests[0].pending = None
        self._skipping = not self._requests
        return [*self._release(), frame]

    def _copy_begins(self, frame: bytes) -> list[Step]:
        """From here until CopyDone the server ignores Sync: those sent along with the COPY are not answered."""
        self._copying = True
        self._requests = deque(request for request in self._requests if request.kind != b"S")
        head = self._requests[0]
        if head.pending is not None and head.pending.rule.moment is Moment.COPYING:
            self._copy_cut = _CopyCut(head.pending)
            head.pending = None
        return [*self._release(), frame]

    def _release(self) -> list[bytes]:
        held, self._held = self._held, []
        return held

    def _give_back_copy(self) -> None:
        if self._copy_cut is not None:
            self._give_back(self._copy_cut.pending)
            self._copy_cut = None

    def _give_back(self, pending: _Pending | None) -> None:
        if pending is not None:
            pending.rule.trigger.give_back()


def _joined(steps: Iterable[Step]) -> Iterator[Step]:
    """The same with neighbouring bytes as one: many small messages become one write."""
    data: list[bytes] = []
    for step in steps:
        if isinstance(step, bytes):
            data.append(step)
            continue
        if data:
            yield b"".join(data)
            data.clear()
        yield step
    if data:
        yield b"".join(data)

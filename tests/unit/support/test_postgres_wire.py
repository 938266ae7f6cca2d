"""The proxy's reading of the PostgreSQL protocol, whatever pieces it arrives in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from struct import pack

from hypothesis import given
from hypothesis import strategies as st

from tests.support.postgres_wire import Conversation, CopyPoint, Frames, Moment, Rule, Traffic
from tests.support.proxy_link import Back, Cut, Step, Trigger

SSL_REQUEST = pack("!ii", 8, 80877103)
STARTUP = pack("!ii", 17, 196608) + b"user\0me\0\0"


def message(kind: bytes, body: bytes = b"") -> bytes:
    return kind + pack("!i", 4 + len(body)) + body


READY = message(b"Z", b"I")
DONE = message(b"C", b"INSERT 0 1\0")
EXTENDED = (
    message(b"P", b"name\0INSERT\0\0\0"),
    message(b"B", b"portal\0name\0\0\0\0\0\0\0"),
    message(b"E", b"portal\0\0\0\0\0"),
    message(b"S"),
)
ANSWERS = (message(b"1"), message(b"2"), DONE, READY)


def pieces(data: bytes, cuts: Iterable[int]) -> Iterator[bytes]:
    at = 0
    for cut in sorted(cut % (len(data) + 1) for cut in cuts):
        yield data[at:cut]
        at = cut
    yield data[at:]


CUTS = st.lists(st.integers(min_value=0), max_size=20)


@given(bodies=st.lists(st.binary(max_size=50), max_size=20), cuts=CUTS)
def test_messages_are_found_however_they_are_cut(bodies: list[bytes], cuts: list[int]) -> None:
    sent = [message(b"d", body) for body in bodies]
    frames = Frames(typed=True)
    assert [frame for piece in pieces(b"".join(sent), cuts) for frame in frames.feed(piece)] == [
        (b"d", frame) for frame in sent
    ]


@given(cuts=CUTS)
def test_a_client_starts_without_types(cuts: list[int]) -> None:
    frames = Frames(typed=False)
    sent = SSL_REQUEST + STARTUP + EXTENDED[0]
    kinds = [kind for piece in pieces(sent, cuts) for kind, _ in frames.feed(piece)]
    assert kinds == [b"", b"", b"P"]


class Talk:
    """A conversation under one rule, and what comes out at both ends."""

    def __init__(self, moment: Moment, point: CopyPoint = 0) -> None:
        self.trigger = Trigger("test")
        self.traffic = Traffic()
        rule = Rule("INSERT".__eq__, moment, self.trigger, Cut.RST, point)
        self.conversation = Conversation([rule], self.traffic, lambda trigger, _: trigger.fire())
        self.at_server = b""
        self.at_client = b""
        self.cut = False

    def up(self, data: bytes, cuts: Iterable[int] = ()) -> None:
        for piece in pieces(data, cuts):
            for step in self.conversation.up(piece):
                self.at_server += self._bytes(step)

    def down(self, data: bytes, cuts: Iterable[int] = ()) -> None:
        for piece in pieces(data, cuts):
            for step in self.conversation.down(piece):
                self.at_client += self._bytes(step)

    def _bytes(self, step: Step) -> bytes:
        if self.cut:
            return b""
        if isinstance(step, Back):
            self.at_client += step.data
        self.cut = isinstance(step, Cut)
        return step if isinstance(step, bytes) else b""


@given(cuts=CUTS)
def test_swallowed_whatever_the_pieces(cuts: list[int]) -> None:
    talk = Talk(Moment.AFTER)
    talk.up(SSL_REQUEST + STARTUP, cuts)
    talk.down(READY)
    talk.up(b"".join(EXTENDED), cuts)
    talk.down(b"".join(ANSWERS), cuts)
    assert talk.at_server == STARTUP + b"".join(EXTENDED)
    assert talk.at_client == b"N" + READY + ANSWERS[0] + ANSWERS[1]
    assert talk.cut
    assert talk.trigger.fired == talk.traffic.statements == talk.traffic.transactions == 1


@given(cuts=CUTS)
def test_cut_before_whatever_the_pieces(cuts: list[int]) -> None:
    talk = Talk(Moment.BEFORE)
    talk.up(STARTUP + b"".join(EXTENDED), cuts)
    assert talk.at_server == STARTUP + EXTENDED[0] + EXTENDED[1]
    assert talk.cut
    assert talk.traffic.statements == 0


@given(
    data=st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=5),
    point=st.one_of(st.integers(min_value=0, max_value=120), st.sampled_from(["middle", "last"])),
    cuts=CUTS,
)
def test_a_copy_is_cut_at_its_byte(data: list[bytes], point: CopyPoint, cuts: list[int]) -> None:
    talk = Talk(Moment.COPYING, point)
    talk.up(STARTUP + message(b"Q", b"INSERT\0"))
    talk.down(READY + message(b"G", b"\0\0\0"))
    before = talk.at_server
    talk.up(b"".join(message(b"d", part) for part in data) + message(b"c"), cuts)
    total = len(b"".join(data))
    limit = {"middle": total // 2, "last": total - 1}.get(str(point), point)
    assert isinstance(limit, int)
    arrived = talk.at_server[len(before) :]
    assert talk.cut == (limit <= total) == (talk.trigger.fired == 1)
    if talk.cut:
        assert _payload(arrived) == b"".join(data)[:limit]
    else:
        assert arrived.endswith(message(b"c"))


def _payload(stream: bytes) -> bytes:
    """The bytes of COPY data, the last message perhaps torn."""
    found = b""
    while stream:
        length = int.from_bytes(stream[1:5], "big")
        found += stream[5 : 1 + length]
        stream = stream[1 + length :]
    return found

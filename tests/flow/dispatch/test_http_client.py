"""The HTTP client against real sockets, plain and over TLS, on both event loops."""

from __future__ import annotations

import asyncio
import gzip
import time
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import replace

import pytest

from penstock.config import KIB, MIB, DispatchLimits
from penstock.dispatch.http import client as http_client
from penstock.dispatch.http.answer import Answer
from penstock.dispatch.http.client import HttpClient, OpenAnswer
from penstock.dispatch.http.connect import ConnectOptions, Origin, connect
from penstock.dispatch.http.errors import TransportError
from tests.support import hostile
from tests.support.certificates import authority, local_tls
from tests.support.hostile import GOOD_BODY, Exchange, Script, Upstream, answer, message, raw
from tests.support.loops import LOOPS, Run, runner_on

LIMITS = DispatchLimits(
    connect_timeout_s=5, first_byte_timeout_s=10, idle_timeout_s=10, attempt_timeout_s=10, max_response_bytes=MIB
)
SOON_S = 3.0
"""Less than any of the limits, and than a wait for them."""

OPTIONS = ConnectOptions(ca_file=str(authority().file))

_scheme = ContextVar("scheme", default="http")


@pytest.fixture(params=["http", "https"])
def scheme(request: pytest.FixtureRequest) -> Iterator[str]:
    token = _scheme.set(request.param)
    yield request.param
    _scheme.reset(token)


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest, scheme: str) -> Run:  # noqa: ARG001
    return runner_on(request.param)


class Ground:
    """A client, and an upstream with one script. What is asked elsewhere is answered well."""

    def __init__(self, upstream: Upstream, client: HttpClient) -> None:
        self.upstream = upstream
        self.client = client
        self.read_bytes = 0

    async def ask(self, path: str = "/bad", headers: Mapping[str, str] | None = None, body: bytes = b"{}") -> Answer:
        return await self.client.request("POST", self.upstream.base_url + path, headers or {}, body)

    def open(self, headers: Mapping[str, str] | None = None, body: bytes | AsyncIterator[bytes] = b"{}") -> OpenAnswer:
        return self.client.open("POST", f"{self.upstream.base_url}/bad", headers or {}, body)

    async def fails(self) -> str:
        """How a call ends."""
        with pytest.raises(TransportError) as caught:
            await self.ask()
        return caught.value.code

    async def stream_fails(self) -> str:
        """How a call ends whose answer is read as it comes."""
        with pytest.raises(TransportError) as caught:
            await self.read()
        return caught.value.code

    async def read(self) -> None:
        async with self.open() as opened:
            async for piece in opened:
                self.read_bytes += len(piece)

    async def asked(self, requests: int = 1) -> None:
        await self.upstream.until(lambda: len(self.upstream.received) == requests)

    async def left(self, still_open: int = 0) -> None:
        """Until the upstream sees that the client has closed all others."""
        await self.upstream.until(lambda: self.upstream.open_connections == still_open, SOON_S)

    async def next_connection(self) -> int:
        """Which connection serves another call."""
        assert (await self.ask("/good")).body == GOOD_BODY
        return self.upstream.received[-1].connection


@asynccontextmanager
async def ground(
    script: Script, limits: DispatchLimits = LIMITS, headers: Mapping[str, str] | None = None, host: str = "127.0.0.1"
) -> AsyncIterator[Ground]:
    tls = local_tls() if _scheme.get() == "https" else None
    client = new_client(limits, headers)
    async with Upstream({"/v1/bad": script}, host=host, tls=tls) as upstream:
        try:
            yield Ground(upstream, client)
        finally:
            await client.close()


def new_client(limits: DispatchLimits = LIMITS, headers: Mapping[str, str] | None = None) -> HttpClient:
    return HttpClient(limits, headers or {}, OPTIONS)


async def next_piece(pieces: AsyncIterator[bytes]) -> bytes:
    async with asyncio.timeout(SOON_S):
        return await anext(pieces)


@contextmanager
def most_allocated() -> Iterator[Callable[[], float]]:
    """How many MiB the interpreter held at most in the meantime, beyond what it held before."""
    tracemalloc.start()
    before, most = tracemalloc.get_traced_memory()

    def most_mib() -> float:
        nonlocal most
        if tracemalloc.is_tracing():
            _, most = tracemalloc.get_traced_memory()
        return (most - before) / MIB

    try:
        yield most_mib
    finally:
        most_mib()
        tracemalloc.stop()


def single_bytes(content: bytes) -> list[bytes]:
    return [content[at : at + 1] for at in range(len(content))]


def packed(coding: str, content: bytes) -> bytes:
    """An answer whose length is right and whose content is as given."""
    return message(200, content, {"Content-Encoding": coding})


# -- what is sent


def test_a_large_body_is_sent_whole(run: Run) -> None:
    async def scenario() -> None:
        body = bytes(range(256)) * (6 * MIB // 256)
        async with ground(answer(200)) as at:
            assert (await at.ask(body=body)).status == 200
            assert at.upstream.received[0].body == body
            assert at.upstream.received[0].headers["content-length"] == str(len(body))
            assert await at.next_connection() == 1

    run(scenario)


def test_an_answer_to_half_a_request_stands_but_its_connection_goes(run: Run) -> None:
    async def scenario() -> None:
        async def refuse(exchange: Exchange) -> None:
            await exchange.send(message(413, b"too much"))
            await done.wait()
            await exchange.client_leaves()

        done = asyncio.Event()
        async with ground(answer(200)) as at:
            at.upstream.hasty = {"/v1/hasty": refuse}
            refused = await at.ask("/hasty", body=bytes(32 * MIB))
            assert (refused.status, refused.body) == (413, b"too much")
            assert await at.next_connection() == 2
            done.set()
            await at.left(still_open=1)

    run(scenario)


@pytest.mark.parametrize(
    "headers",
    [{"x-a": "a\r\nx-b: b"}, {"x-a": "a\nx-b: b"}, {"x-a": "a\rb"}, {"x-a": "a\0"}, {"x-a": "é"}, {"x-a\r\nx-b": "c"}],
    ids=repr,
)
def test_a_header_that_would_break_the_request_is_refused(run: Run, headers: dict[str, str]) -> None:
    async def scenario() -> None:
        async with ground(answer(200)) as at:
            with pytest.raises(TransportError) as caught:
                await at.ask(headers=headers)
            assert caught.value.code == "invalid_request"
            with pytest.raises(TransportError) as caught:
                async with at.open(headers):
                    pass
            assert caught.value.code == "invalid_request"
            await at.next_connection()
            assert [request.path for request in at.upstream.received] == ["/v1/good"]

    run(scenario)


def test_a_header_of_the_call_takes_the_place_of_the_clients(run: Run) -> None:
    async def scenario() -> None:
        own = {"Authorization": "Bearer new", "Accept": "text/event-stream"}
        async with ground(answer(200), headers={"authorization": "Bearer old", "x-team": "blue"}) as at:
            await at.ask()
            await at.ask(headers=own)
            async with at.open(own) as opened:
                await opened.read()
            first, *others = at.upstream.received
            assert (first.headers["authorization"], first.headers["accept"]) == ("Bearer old", "*/*")
            for request in others:
                assert sorted(request.header_names) == sorted(request.headers)
                assert request.headers["authorization"] == "Bearer new"
                assert request.headers["accept"] == "text/event-stream"
                assert request.headers["x-team"] == "blue"

    run(scenario)


def test_what_a_path_cannot_hold_is_percent_encoded(run: Run) -> None:
    async def scenario() -> None:
        async with ground(answer(200)) as at:
            await at.ask('/modèle/ü%20"x"?q=é&r=a/b')
            assert at.upstream.received[0].path == "/v1/mod%C3%A8le/%C3%BC%20%22x%22?q=%C3%A9&r=a/b"

    run(scenario)


@pytest.mark.parametrize("path", ["/\ud800", "/x?q=\ud800"], ids=ascii)
def test_a_path_that_is_not_text_is_refused(run: Run, path: str) -> None:
    async def scenario() -> None:
        async with ground(answer(200)) as at:
            with pytest.raises(TransportError) as caught:
                await at.ask(path)
            assert caught.value.code == "invalid_request"
            assert at.upstream.received == []

    run(scenario)


def test_ipv6(run: Run) -> None:
    async def scenario() -> None:
        async with ground(answer(200), host="::1") as at:
            assert (await at.ask()).body == GOOD_BODY
            assert at.upstream.received[0].headers["host"] == f"[::1]:{at.upstream.port}"
            assert await at.next_connection() == 1

    run(scenario)


# -- bodies that are sent as they are read


async def pieces(*content: bytes) -> AsyncIterator[bytes]:
    for piece in content:
        yield piece


STREAMED = (b"one", b"", b"two" * 100_000, b"3")


def test_a_streamed_body_of_known_length_keeps_its_connection(run: Run) -> None:
    async def scenario() -> None:
        whole = b"".join(STREAMED)
        async with ground(answer(200)) as at:
            async with at.open({"Content-Length": str(len(whole))}, pieces(*STREAMED)) as opened:
                assert await opened.read() == GOOD_BODY
            (request,) = at.upstream.received
            assert (request.body, request.header_names.count("content-length")) == (whole, 1)
            assert "transfer-encoding" not in request.headers
            assert await at.next_connection() == 1

    run(scenario)


def test_a_streamed_body_of_unknown_length_is_sent_in_chunks(run: Run) -> None:
    async def scenario() -> None:
        chunks = b"3\r\none\r\n493e0\r\n" + STREAMED[2] + b"\r\n1\r\n3\r\n0\r\n\r\n"
        received = []

        async def take(exchange: Exchange) -> None:
            assert exchange.request.headers["transfer-encoding"] == "chunked"
            assert "content-length" not in exchange.request.headers
            received.append(await exchange.reader.readexactly(len(chunks)))
            await exchange.send(message(200, GOOD_BODY))

        async with ground(answer(200)) as at:
            at.upstream.hasty = {"/v1/bad": take}
            async with at.open({}, pieces(*STREAMED)) as opened:
                assert await opened.read() == GOOD_BODY
            assert received == [chunks]

    run(scenario)


def test_a_body_waits_for_an_upstream_that_lags(run: Run) -> None:
    total, block = 48 * MIB, bytes(64 * KIB)

    async def scenario() -> None:
        read = 0
        begun, going_on = asyncio.Event(), asyncio.Event()

        async def much() -> AsyncIterator[bytes]:
            nonlocal read
            while read < total:
                read += len(block)
                yield block

        async def late(exchange: Exchange) -> None:
            begun.set()
            await going_on.wait()
            left = total
            while left:
                left -= len(await exchange.reader.read(MIB))
            await exchange.send(message(200, GOOD_BODY))

        async with ground(answer(200)) as at:
            at.upstream.hasty = {"/v1/bad": late}
            with most_allocated() as allocated_mib:
                opening = at.open({"content-length": str(total)}, much())
                asking = asyncio.create_task(opening.__aenter__())
                await begun.wait()
                for _ in range(100):  # enough turns of the loop for all of it, if nobody held it back
                    await at.next_connection()
                assert read < total
                going_on.set()
                await asking
                assert await opening.read() == GOOD_BODY
                await opening.__aexit__(None, None, None)
            assert read == total
            assert allocated_mib() < 8

    run(scenario)


def test_an_early_answer_ends_a_body_without_end(run: Run) -> None:
    async def scenario() -> None:
        ended = asyncio.Event()

        async def endless() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield bytes(64 * KIB)
                    await asyncio.sleep(0)
            finally:
                ended.set()

        async def refuse(exchange: Exchange) -> None:
            await exchange.send(message(413, b"too much"))
            await exchange.client_leaves()

        async with ground(answer(200)) as at:
            at.upstream.hasty = {"/v1/bad": refuse}
            async with at.open({}, endless()) as opened:
                assert (opened.status, await opened.read()) == (413, b"too much")
            async with asyncio.timeout(SOON_S):
                await ended.wait()
            await at.left()
            assert await at.next_connection() == 2

    run(scenario)


@pytest.mark.parametrize("promised", ["2", "4"])
def test_a_body_of_another_length_than_was_promised_is_not_sent_whole(run: Run, promised: str) -> None:
    async def scenario() -> None:
        async with ground(answer(200)) as at:
            with pytest.raises(TransportError) as caught:
                async with at.open({"content-length": promised}, pieces(b"o", b"ne")):
                    pass
            assert caught.value.code == "invalid_request"
            await at.left()
            assert at.upstream.received == []

    run(scenario)


def test_a_body_that_cannot_be_read_is_the_callers_error(run: Run) -> None:
    async def scenario() -> None:
        async def broken() -> AsyncIterator[bytes]:
            yield b"one"
            raise ZeroDivisionError

        async with ground(answer(200)) as at:
            with pytest.raises(ZeroDivisionError):
                async with at.open({}, broken()):
                    pass
            await at.left()

    run(scenario)


@pytest.mark.parametrize("streamed", [True, False], ids=["as it is read", "whole"])
def test_an_upstream_that_reads_no_more_is_silent(run: Run, streamed: bool) -> None:
    async def scenario() -> None:
        async def deaf(_: Exchange) -> None:
            await over.wait()

        over = asyncio.Event()
        body = bytes(32 * MIB)
        async with ground(answer(200), replace(LIMITS, first_byte_timeout_s=0.2)) as at:
            at.upstream.hasty = {"/v1/bad": deaf}
            sent = (
                at.open({}, pieces(body[: 16 * MIB], body[16 * MIB :])).__aenter__() if streamed else at.ask(body=body)
            )
            with pytest.raises(TransportError) as caught:
                await sent
            assert caught.value.code == "first_byte_timeout"
            over.set()
            await at.left()

    run(scenario)


# -- where an answer begins and ends

INTERIM = (
    b"HTTP/1.1 100 Continue\r\n\r\n",
    b"HTTP/1.1 102 Processing\r\nX-Interim: a\r\n\r\n",
    b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\nContent-Type: text/interim\r\n\r\n",
)


@pytest.mark.parametrize("one_packet", [True, False], ids=["one packet", "byte by byte"])
def test_interim_answers_are_passed_over(run: Run, one_packet: bool) -> None:
    async def scenario() -> None:
        sent = b"".join(INTERIM) + message(201, b"{}", {"Content-Type": "text/final"})
        async with ground(raw(*([sent] if one_packet else single_bytes(sent)))) as at:
            for _ in range(2):
                final = await at.ask()
                assert (final.status, final.body) == (201, b"{}")
                assert final.headers["content-type"] == "text/final"
                assert "x-interim" not in final.headers
                assert "link" not in final.headers
            assert await at.next_connection() == 1

    run(scenario)


def test_an_interim_answer_is_not_the_first_byte(run: Run) -> None:
    async def scenario() -> None:
        async def only_interim(exchange: Exchange) -> None:
            await exchange.send(*INTERIM)
            await hostile.silence(exchange)

        async with ground(only_interim, replace(LIMITS, first_byte_timeout_s=0.1)) as at:
            assert await at.fails() == "first_byte_timeout"
            await at.left()

    run(scenario)


TO_THE_END = {
    "connection close": b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n",
    "no word of it": b"HTTP/1.1 200 OK\r\n\r\n",
    "HTTP/1.0": b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\n",
}
to_the_end = pytest.mark.parametrize("head", TO_THE_END.values(), ids=TO_THE_END)


@to_the_end
def test_a_body_may_end_with_the_connection(run: Run, head: bytes) -> None:
    async def scenario() -> None:
        async with ground(raw(head, b"some ", b"text", close=True)) as at:
            assert (await at.ask()).body == b"some text"
            async with at.open() as opened:
                assert await opened.read() == b"some text"
            assert await at.next_connection() == 3

    run(scenario)


@to_the_end
def test_a_body_does_not_end_with_a_reset(run: Run, head: bytes) -> None:
    async def scenario() -> None:
        async def half(exchange: Exchange) -> None:
            await exchange.send(head, b"some ")
            exchange.reset()

        async with ground(half) as at:
            assert await at.fails() == "connection_reset"

    run(scenario)


@to_the_end
def test_a_body_does_not_end_because_the_client_is_closed(run: Run, head: bytes) -> None:
    async def scenario() -> None:
        async def half(exchange: Exchange) -> None:
            await exchange.send(head, b"some ")
            await exchange.client_leaves()

        async with ground(half) as at, at.open() as opened:
            pieces = aiter(opened)
            assert await next_piece(pieces) == b"some "
            await at.client.close()
            with pytest.raises(TransportError) as caught:
                await next_piece(pieces)
            assert caught.value.code == "connection_reset"

    run(scenario)


@pytest.mark.parametrize("one_packet", [True, False], ids=["one packet", "byte by byte"])
def test_chunks_with_trailers(run: Run, one_packet: bool) -> None:
    async def scenario() -> None:
        sent = (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-Head: a\r\n\r\n"
            b"5;ext=1\r\nsome \r\n4\r\ntext\r\n0\r\nRetry-After: 9\r\nX-Head: b\r\n\r\n"
        )
        async with ground(raw(*([sent] if one_packet else single_bytes(sent)))) as at:
            for _ in range(2):
                whole = await at.ask()
                assert whole.body == b"some text"
                assert whole.headers["x-head"] == "a"
                # What comes after the body was not known when it was judged.
                assert "retry-after" not in whole.headers
            assert await at.next_connection() == 1

    run(scenario)


def test_trailers_without_end_take_bounded_memory(run: Run) -> None:
    async def scenario() -> None:
        async with ground(hostile.endless_trailers) as at:
            with most_allocated() as allocated_mib:
                assert await at.fails() in {"protocol_error", "response_too_large"}
            assert allocated_mib() < 8

    run(scenario)


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 204 No Content\r\nContent-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 304 Not Modified\r\nContent-Length: 100\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 0\r\n\r\n",
    ],
    ids=["204", "204 packed", "304", "empty", "HTTP/1.0"],
)
def test_an_answer_without_a_body_keeps_its_connection(run: Run, head: bytes) -> None:
    async def scenario() -> None:
        async with ground(raw(head)) as at:
            answered = await at.ask()
            assert (answered.status, answered.body) == (int(head[9:12]), b"")
            async with at.open() as opened:
                assert await opened.read() == b""
            assert await at.next_connection() == 1

    run(scenario)


def test_a_large_head_is_read_and_one_that_is_too_large_is_not(run: Run) -> None:
    async def scenario() -> None:
        async with ground(answer(200, headers={"X-Large": "a" * 100 * KIB})) as at:
            assert len((await at.ask()).headers["x-large"]) == 100 * KIB
        async with ground(hostile.huge_head) as at:
            with most_allocated() as allocated_mib:
                assert await at.fails() == "protocol_error"
            assert allocated_mib() < 4
            await at.left()

    run(scenario)


def test_crumbs_take_little_more_memory_than_what_they_add_up_to(run: Run) -> None:
    async def scenario() -> None:
        async def crumbs(exchange: Exchange) -> None:
            await exchange.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            await exchange.send(*[b"2\r\nab\r\n" * (8 * KIB)] * 16, b"0\r\n\r\n")

        async with ground(crumbs) as at:
            with most_allocated() as allocated_mib:
                assert (await at.ask()).body == b"ab" * 128 * KIB
            assert allocated_mib() < 4

    run(scenario)


# -- packed although nobody asked

WAYS_TO_PACK: dict[str, tuple[str, bytes]] = {
    "gzip": ("gzip", gzip.compress(GOOD_BODY)),
    "x-gzip": ("X-GZip", gzip.compress(GOOD_BODY)),
    "deflate": ("deflate", zlib.compress(GOOD_BODY)),
    "members": ("gzip", gzip.compress(GOOD_BODY[:9]) + gzip.compress(b"") + gzip.compress(GOOD_BODY[9:])),
    "identity": ("identity", GOOD_BODY),
}


@pytest.mark.parametrize(("coding", "content"), WAYS_TO_PACK.values(), ids=WAYS_TO_PACK)
@pytest.mark.parametrize("one_packet", [True, False], ids=["one packet", "byte by byte"])
def test_a_packed_answer_is_unpacked(run: Run, coding: str, content: bytes, one_packet: bool) -> None:
    async def scenario() -> None:
        sent = packed(coding, content)
        async with ground(raw(*([sent] if one_packet else single_bytes(sent)))) as at:
            assert (await at.ask()).body == GOOD_BODY
            async with at.open() as opened:
                assert await opened.read() == GOOD_BODY
            assert at.upstream.received[0].headers["accept-encoding"] == "identity"
            assert await at.next_connection() == 1

    run(scenario)


def test_packed_pieces_come_as_they_are_sent(run: Run) -> None:
    async def scenario() -> None:
        async def in_turn(exchange: Exchange) -> None:
            packer = zlib.compressobj(wbits=31)
            await exchange.send(TO_THE_END["no word of it"][:-2] + b"Content-Encoding: gzip\r\n\r\n")
            for piece in (b"one", b"two"):
                await exchange.send(packer.compress(piece) + packer.flush(zlib.Z_SYNC_FLUSH))
                await read.acquire()
            await exchange.send(packer.flush())
            exchange.writer.close()

        read = asyncio.Semaphore(0)
        async with ground(in_turn) as at, at.open() as opened:
            pieces = (piece async for piece in opened if piece)
            for expected in (b"one", b"two"):
                assert await next_piece(pieces) == expected
                read.release()
            with pytest.raises(StopAsyncIteration):
                await next_piece(pieces)

    run(scenario)


@pytest.mark.parametrize("missing", [1, 8, 9, 20])
@pytest.mark.parametrize("framed", [True, False], ids=["with its length", "to the connection's end"])
def test_a_packed_answer_that_breaks_off_is_not_whole(run: Run, missing: int, framed: bool) -> None:
    async def scenario() -> None:
        half = gzip.compress(GOOD_BODY)[:-missing]
        head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n"
        script = raw(packed("gzip", half)) if framed else raw(head + half, close=True)
        async with ground(script) as at:
            assert await at.fails() in {"protocol_error", "connection_reset"}
            assert await at.stream_fails() in {"protocol_error", "connection_reset"}
            await at.left()

    run(scenario)


def test_a_second_member_that_breaks_off_is_missed(run: Run) -> None:
    async def scenario() -> None:
        async with ground(raw(packed("gzip", gzip.compress(b"{}") + gzip.compress(b"  ")[:-3]))) as at:
            assert await at.fails() == "protocol_error"

    run(scenario)


@pytest.mark.parametrize("bomb", [zlib.compress(bytes(64 * MIB), 1, wbits=31)], ids=["64 MiB"])
def test_a_bomb_takes_bounded_memory(run: Run, bomb: bytes) -> None:
    async def scenario() -> None:
        async with ground(raw(packed("gzip", bomb))) as at:
            with most_allocated() as allocated_mib:
                assert await at.fails() == "response_too_large"
                assert await at.stream_fails() == "response_too_large"
            assert allocated_mib() < 8
            await at.left()

    run(scenario)


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, br", "x\xff"], ids=ascii)
def test_a_packing_nobody_knows_is_an_error(run: Run, coding: str) -> None:
    async def scenario() -> None:
        async with ground(raw(packed(coding, GOOD_BODY))) as at:
            assert await at.fails() == "protocol_error"
            assert await at.stream_fails() == "protocol_error"
            await at.left()

    run(scenario)


# -- connections


@pytest.mark.parametrize(
    "surplus",
    [
        b"garbage",
        message(200, b"other"),
        b"HTTP/1.1 102 Processing\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-Half: ",
        b"H",
    ],
    ids=["garbage", "an answer", "an interim answer", "half an answer", "a letter"],
)
def test_bytes_after_the_answer_end_its_connection(run: Run, surplus: bytes) -> None:
    async def scenario() -> None:
        async with ground(raw(message(200, b"{}") + surplus)) as at:
            assert (await at.ask()).body == b"{}"
            assert await at.next_connection() == 2
            async with at.open() as opened:
                assert await opened.read() == b"{}"
            assert await at.next_connection() == 3
            await at.left(still_open=1)

    run(scenario)


@pytest.mark.parametrize(
    "sent",
    [
        message(200, b"{}", {"Connection": "close"}),
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    ],
    ids=["close", "HTTP/1.0", "chunks"],
)
def test_a_connection_that_is_to_be_closed_is_closed(run: Run, sent: bytes) -> None:
    async def scenario() -> None:
        async with ground(raw(sent)) as at:
            assert (await at.ask()).body == b"{}"
            await at.left()
            async with at.open() as opened:
                assert await opened.read() == b"{}"
            await at.left()
            assert await at.next_connection() == 3

    run(scenario)


def test_bytes_nobody_asked_for_close_an_idle_connection(run: Run) -> None:
    async def scenario() -> None:
        async def more(exchange: Exchange) -> None:
            await exchange.send(message(200, b"{}"))
            await answered.wait()
            await exchange.send(message(200, b"unasked"))
            await exchange.client_leaves()

        answered = asyncio.Event()
        async with ground(more) as at:
            assert (await at.ask()).body == b"{}"
            answered.set()
            await at.left()
            assert await at.next_connection() == 2

    run(scenario)


def test_a_connection_closed_by_the_upstream_is_not_used_again(run: Run) -> None:
    async def scenario() -> None:
        async def over(exchange: Exchange) -> None:
            await exchange.send(message(200, b"{}"))
            await answered.wait()
            exchange.end()
            await exchange.client_leaves()

        answered = asyncio.Event()
        async with ground(over) as at:
            assert (await at.ask()).body == b"{}"
            answered.set()
            await at.left()  # it has seen the end, and answers it with its own
            assert await at.next_connection() == 2

    run(scenario)


def test_a_connection_nobody_uses_is_closed_after_a_while(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(http_client, "_IDLE_S", 0.02)
        async with ground(answer(200)) as at:
            await asyncio.gather(at.ask(), at.ask())
            assert at.upstream.connections == 2
            await at.left()
            assert await at.next_connection() == 3
            await at.left()

    run(scenario)


def test_a_cancelled_call_closes_its_connection_at_once(run: Run) -> None:
    async def scenario() -> None:
        async with ground(hostile.silence) as at:
            call = asyncio.create_task(at.ask())
            await at.asked()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await at.left()
            assert await at.next_connection() == 2

    run(scenario)


def test_the_attempts_time_includes_connecting(run: Run) -> None:
    async def scenario() -> None:
        client = new_client(replace(LIMITS, attempt_timeout_s=0.1, connect_timeout_s=1))
        with hostile.full_backlog() as port:
            url = f"{_scheme.get()}://127.0.0.1:{port}/v1/bad"
            with pytest.raises(TransportError) as caught:
                await client.request("POST", url, {}, b"{}")
            assert caught.value.code == "request_timeout"
            with pytest.raises(TransportError) as caught:
                async with client.open("POST", url, {}, b"{}"):
                    pass
            assert caught.value.code == "request_timeout"
        await client.close()

    run(scenario)


def test_an_address_that_is_silent_leaves_time_for_the_next(run: Run) -> None:
    async def scenario() -> None:
        async with ground(answer(200)) as at:
            origin = Origin(_scheme.get(), "localhost", at.upstream.port)
            tls = OPTIONS.tls() if _scheme.get() == "https" else None
            new = at.client._new_connection
            with hostile.full_backlog("127.0.0.2", at.upstream.port):
                connection = await connect(origin, new, 2, tls=tls, addresses=["127.0.0.2", "127.0.0.1"])
                connection.cut()
                with pytest.raises(TransportError) as caught:
                    await connect(origin, new, 0.2, tls=tls, addresses=["127.0.0.2"])
                assert caught.value.code == "connect_timeout"

    run(scenario)


def test_addresses_that_were_given_are_the_only_ones_tried(run: Run) -> None:
    async def scenario() -> None:
        async with ground(answer(200)) as at:
            origin = Origin(_scheme.get(), "localhost", at.upstream.port)
            with pytest.raises(TransportError) as caught:
                await connect(origin, at.client._new_connection, 5, tls=OPTIONS.tls(), addresses=["127.0.0.3"])
            assert (caught.value.code, caught.value.message) == ("connect_failed", "Connection refused")
            assert at.upstream.connections == 0

    run(scenario)


# -- answers that are read as they come


def test_pieces_come_as_they_are_sent(run: Run) -> None:
    async def scenario() -> None:
        async def in_turn(exchange: Exchange) -> None:
            await exchange.send(b"HTTP/1.1 202 OK\r\nTransfer-Encoding: chunked\r\nX-Head: a\r\n\r\n")
            for piece in (b"one", b"two", b"three"):
                await read.acquire()
                await exchange.send(b"%x\r\n%b\r\n" % (len(piece), piece))
            await read.acquire()
            await exchange.send(b"0\r\n\r\n")

        read = asyncio.Semaphore(0)
        async with ground(in_turn) as at:
            async with at.open() as opened:
                assert (opened.status, opened.headers["x-head"]) == (202, "a")
                pieces = aiter(opened)
                for expected in (b"one", b"two", b"three"):
                    read.release()
                    assert await next_piece(pieces) == expected
                read.release()
                with pytest.raises(StopAsyncIteration):
                    await next_piece(pieces)
            assert await at.next_connection() == 1

    run(scenario)


def test_a_reader_that_lags_holds_the_upstream_back(run: Run) -> None:
    total = 48 * MIB
    block = bytes(64 * KIB)

    async def scenario() -> None:
        sent = 0

        async def much(exchange: Exchange) -> None:
            nonlocal sent
            await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total)
            while sent < total:
                await exchange.send(block)
                sent += len(block)

        async with ground(much, replace(LIMITS, max_response_bytes=total)) as at:
            with most_allocated() as allocated_mib:
                async with at.open() as opened:
                    # Enough turns of the loop for all of it, if nobody held it back.
                    for _ in range(total // len(block)):
                        assert await at.next_connection() == 2
                    assert sent < total
                    assert allocated_mib() < 4
                    assert sum([len(piece) async for piece in opened]) == total
            assert sent == total
            assert allocated_mib() < 4

    run(scenario)


def test_a_stream_that_is_left_unread_does_not_silence_its_connection(run: Run) -> None:
    """All of it has come, and more than is held unread: reading was paused."""

    async def scenario() -> None:
        async with ground(raw(packed("gzip", gzip.compress(bytes(512 * KIB))))) as at:
            async with at.open() as opened:
                assert opened.status == 200
            async with asyncio.timeout(SOON_S):
                await at.next_connection()

    run(scenario)


def test_what_is_left_unread_is_no_part_of_the_next_answer(run: Run) -> None:
    async def scenario() -> None:
        async with ground(raw(*single_bytes(message(200, b"left unread")))) as at:
            async with at.open() as opened:
                while not opened._connection.whole:  # type: ignore[union-attr]
                    await asyncio.sleep(0)
            assert await at.next_connection() == 1
            assert (await at.ask()).body == b"left unread"

    run(scenario)


def test_a_stream_may_be_too_large(run: Run) -> None:
    async def scenario() -> None:
        async with ground(hostile.endless_chunks) as at:
            with pytest.raises(TransportError) as caught:
                await at.read()
            assert (caught.value.code, caught.value.status_code) == ("response_too_large", 200)
            assert 0 < at.read_bytes <= MIB
            await at.left()

    run(scenario)


@pytest.mark.parametrize("script", [hostile.shorter_than_promised, hostile.reset_mid_body], ids=["closed", "reset"])
def test_a_stream_that_breaks_off_is_not_whole(run: Run, script: Script) -> None:
    async def scenario() -> None:
        async with ground(script) as at:
            assert await at.stream_fails() == "connection_reset"

    run(scenario)


@pytest.mark.parametrize(
    ("script", "limits", "code"),
    [
        (hostile.silence, replace(LIMITS, first_byte_timeout_s=0.1), "first_byte_timeout"),
        (hostile.drip_head(0.02), replace(LIMITS, first_byte_timeout_s=0.1), "first_byte_timeout"),
        (hostile.silence, replace(LIMITS, attempt_timeout_s=0.1), "request_timeout"),
        (hostile.silence_mid_body, replace(LIMITS, idle_timeout_s=0.1), "idle_timeout"),
        (hostile.silence_mid_body, replace(LIMITS, attempt_timeout_s=0.1), "request_timeout"),
        (hostile.drip_body(0.02), replace(LIMITS, attempt_timeout_s=0.25), "request_timeout"),
    ],
    ids=["no head", "slow head", "no head in all", "no more", "no more in all", "slow body"],
)
def test_each_time_limit_is_kept(run: Run, script: Script, limits: DispatchLimits, code: str) -> None:
    async def scenario() -> None:
        async with ground(script, limits) as at:
            began = time.monotonic()
            assert await at.stream_fails() == code
            assert await at.fails() == code
            assert time.monotonic() - began < SOON_S
            await at.left()

    run(scenario)


def test_leaving_a_stream_closes_its_connection(run: Run) -> None:
    async def scenario() -> None:
        async with ground(hostile.silence_mid_body) as at:
            async with at.open() as opened:
                assert await next_piece(aiter(opened)) == b'{"half": '
            await at.left()
            assert await at.next_connection() == 2

    run(scenario)


@pytest.mark.parametrize("script", [hostile.silence, hostile.silence_mid_body], ids=["no head", "mid body"])
def test_a_cancelled_reader_closes_its_connection(run: Run, script: Script) -> None:
    async def scenario() -> None:
        async with ground(script) as at:
            reader = asyncio.create_task(at.read())
            await at.asked()
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            await at.left()

    run(scenario)


def test_closing_the_client_ends_all_that_is_open(run: Run) -> None:
    async def scenario() -> None:
        async with ground(hostile.silence_mid_body) as at, at.open() as opened:
            pieces = aiter(opened)
            await next_piece(pieces)
            assert await at.next_connection() == 2
            waiting = asyncio.create_task(at.ask())
            await at.asked(3)
            assert await at.next_connection() == 3
            assert at.upstream.open_connections == 3
            await at.client.close()
            for under_way in (waiting, asyncio.ensure_future(next_piece(pieces))):
                with pytest.raises(TransportError) as caught:
                    await under_way
                assert caught.value.code == "connection_reset"
            await at.left()

    run(scenario)


def test_an_answer_in_the_moment_when_the_time_is_up_is_a_timeout(run: Run) -> None:
    """Not a cancellation that nobody asked for, which is what it is told by."""

    async def scenario() -> None:
        async with ground(hostile.silence) as act:
            asking = asyncio.create_task(act.fails())
            await act.asked()
            (line,) = act.client._connections
            act.client._first_byte.limit_s = 0
            act.client._first_byte._check()
            line.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
            assert await asking == "first_byte_timeout"

    run(scenario)


def test_what_an_interim_answer_holds_is_not_part_of_the_answer(run: Run) -> None:
    async def scenario() -> None:
        interim = b"HTTP/1.1 150 Wait\r\ncontent-length: 5\r\n\r\nhello"
        async with ground(raw(interim + b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")) as act:
            assert (await act.ask()).body == b"{}"

    run(scenario)


def test_members_without_number_are_an_error(run: Run) -> None:
    async def scenario() -> None:
        async with ground(raw(packed("gzip", gzip.compress(b"") * 1_000))) as act:
            assert await act.fails() == "protocol_error"

    run(scenario)

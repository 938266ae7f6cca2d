"""TLS of the HTTP client: whom it believes, whom it shows itself to, and how a connection ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.config import DispatchLimits, RetryLimits
from penstock.dispatch.http.client import HttpClient
from penstock.dispatch.http.connect import ConnectOptions
from penstock.dispatch.http.errors import NEVER_SENT, TransportError
from penstock.dispatch.http.processor import HttpProcessor
from penstock.errors import PenstockError, UsageError
from penstock.model import Again
from tests.support import hostile
from tests.support.certificates import Authority, authority, local_tls, make_certificate, server_tls
from tests.support.failing_calls import fails
from tests.support.hostile import GOOD_BODY, Exchange, Script, Upstream, message
from tests.support.items import make_item
from tests.support.loops import LOOPS, Run, runner_on
from tests.support.tcp_server import TcpServer

LIMITS = DispatchLimits(connect_timeout_s=10, first_byte_timeout_s=10, idle_timeout_s=10, attempt_timeout_s=10)
SOON_S = 3.0
TRUSTING = ConnectOptions(ca_file=str(authority().file))
BAD = "/v1/bad"


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Run:
    return runner_on(request.param)


@contextlib.asynccontextmanager
async def opened(options: ConnectOptions = TRUSTING, limits: DispatchLimits = LIMITS) -> AsyncIterator[HttpClient]:
    client = HttpClient(limits, {"authorization": "Bearer sk-secret-key"}, options)
    try:
        yield client
    finally:
        await client.close()


# -- whom it believes


def test_an_authority_that_nobody_named_is_not_trusted(run: Run) -> None:
    async def scenario() -> None:
        async with Upstream(tls=local_tls()) as upstream, opened(ConnectOptions()) as client:
            error = await fails(client, f"{upstream.base_url}/x")
            assert error.code == "tls_certificate_untrusted"
            assert "certificate refused: " in str(error)
            assert "ca_file" in str(error)
            assert upstream.received == []

    run(scenario)


def test_a_certificate_signed_by_itself_is_trusted_only_if_named(run: Run, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "localhost")

    async def scenario() -> None:
        async with Upstream(tls=server_tls(certificate, key)) as upstream:
            url = f"https://localhost:{upstream.port}/v1/x"
            async with opened() as client:
                assert (await fails(client, url)).code == "tls_certificate_untrusted"
            assert upstream.received == []
            async with opened(ConnectOptions(ca_file=str(certificate))) as client:
                assert (await client.request("POST", url, {}, b"{}")).body == GOOD_BODY

    run(scenario)


def test_a_ca_file_is_trusted_in_place_of_the_systems(run: Run, tmp_path: Path) -> None:
    other = Authority(tmp_path)

    async def scenario() -> None:
        options = ConnectOptions(ca_file=str(other.file))
        async with Upstream(tls=local_tls()) as upstream, opened(options) as client:
            assert (await fails(client, f"{upstream.base_url}/x")).code == "tls_certificate_untrusted"

    run(scenario)


@pytest.mark.parametrize(
    ("names", "host"),
    [(["DNS:other.test"], "localhost"), (["DNS:localhost"], "127.0.0.1"), (["IP:10.0.0.1"], "127.0.0.1")],
)
def test_a_certificate_for_another_host_is_refused(run: Run, names: list[str], host: str) -> None:
    async def scenario() -> None:
        tls = server_tls(*authority().issue("other", *names))
        async with Upstream(tls=tls) as upstream, opened() as client:
            error = await fails(client, f"https://{host}:{upstream.port}/v1/x")
            assert error.code == "tls_hostname_mismatch"
            assert "base_url must name the host" in str(error)
            assert upstream.received == []

    run(scenario)


def test_a_certificate_that_has_expired_is_refused(run: Run) -> None:
    async def scenario() -> None:
        tls = server_tls(*authority().issue("expired", expired=True))
        async with Upstream(tls=tls) as upstream, opened() as client:
            error = await fails(client, f"{upstream.base_url}/x")
            assert error.code == "tls_certificate_expired"
            assert "clock" in str(error)
            assert upstream.received == []

    run(scenario)


@pytest.mark.parametrize(("host", "told"), [("localhost", "localhost"), ("127.0.0.1", None), ("[::1]", None)])
def test_the_host_is_named_and_http_1_1_is_asked_for(run: Run, host: str, told: str | None) -> None:
    async def scenario() -> None:
        spoken: list[str | None] = []

        async def script(exchange: Exchange) -> None:
            spoken.append(exchange.writer.get_extra_info("ssl_object").selected_alpn_protocol())
            await hostile.good(exchange)

        names: list[str | None] = []
        tls = server_tls(*authority().issue("sni"))
        tls.sni_callback = lambda _socket, name, _context: names.append(name)
        async with Upstream({"/x": script}, host=host.strip("[]"), tls=tls) as upstream, opened() as client:
            await client.request("POST", f"https://{host}:{upstream.port}/x", {}, b"{}")
            assert upstream.received[0].headers["host"] == f"{host}:{upstream.port}"
        assert (names, spoken) == ([told], ["http/1.1"])

    run(scenario)


# -- whom it shows itself to


@contextlib.contextmanager
def strict_server(version: ssl.TLSVersion) -> Iterator[tuple[int, list[Any]]]:
    """Wants certificates: (port, subjects of its clients). OpenSSL's own: asyncio's do not say what is wrong."""
    tls = server_tls(*authority().issue("strict"))
    tls.verify_mode = ssl.CERT_REQUIRED
    tls.load_verify_locations(authority().file)
    tls.maximum_version = version
    subjects: list[Any] = []

    def serve() -> None:
        while True:
            connection, _ = listening.accept()
            with connection:
                if over.is_set():
                    return
                with contextlib.suppress(OSError), tls.wrap_socket(connection.dup(), server_side=True) as secured:
                    secured.recv(65536)
                    subjects.append((secured.getpeercert() or {}).get("subject"))
                    secured.sendall(message(200, GOOD_BODY, {"connection": "close"}))
                with contextlib.suppress(OSError):  # what is closed with something unread overtakes what it said
                    while connection.recv(65536):
                        pass

    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listening.getsockname()[1], subjects
        finally:
            over.set()
            socket.create_connection(listening.getsockname()).close()
            thread.join()


versions = pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["1.2", "1.3"])


@versions
def test_a_client_certificate_is_shown(run: Run, version: ssl.TLSVersion, tmp_path: Path) -> None:
    certificate, key = authority().issue("the client")
    both = tmp_path / "both.pem"
    both.write_bytes(certificate.read_bytes() + key.read_bytes())

    async def scenario() -> None:
        for files in ((str(certificate), str(key)), (str(both), None)):
            async with opened(ConnectOptions(TRUSTING.ca_file, *files)) as client:
                answer = await client.request("POST", f"https://127.0.0.1:{port}/", {}, b"{}")
                assert answer.body == GOOD_BODY

    with strict_server(version) as (port, subjects):
        run(scenario)
    assert subjects == [((("commonName", "the client"),),)] * 2


@versions
def test_a_client_certificate_that_is_missing_is_asked_for(run: Run, version: ssl.TLSVersion) -> None:
    async def scenario() -> None:
        async with opened() as client:
            error = await fails(client, f"https://127.0.0.1:{port}/")
        # Before 1.3, all that a server can say is that the handshake failed.
        new = version == ssl.TLSVersion.TLSv1_3
        assert error.code == ("tls_client_certificate_required" if new else "tls_failed")
        assert ("client_cert_file" if new else "client certificate") in str(error)

    with strict_server(version) as (port, subjects):
        run(scenario)
    assert subjects == []


@versions
def test_a_client_certificate_of_another_authority_is_refused(
    run: Run, version: ssl.TLSVersion, tmp_path: Path
) -> None:
    certificate, key = map(str, make_certificate(tmp_path, "nobody"))

    async def scenario() -> None:
        async with opened(ConnectOptions(TRUSTING.ca_file, certificate, key)) as client:
            error = await fails(client, f"https://127.0.0.1:{port}/")
        assert error.code == "tls_client_certificate_refused"
        assert "client_cert_file" in str(error)

    with strict_server(version) as (port, _):
        run(scenario)


# -- no TLS at all


def test_a_server_without_tls_is_said_to_be_one(run: Run) -> None:
    async def scenario() -> None:
        async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(65536)
            writer.write(message(400, b"this is no TLS"))

        async with TcpServer(refuse) as server, opened() as client:
            error = await fails(client, f"https://127.0.0.1:{server.port}/v1/x")
            assert error.code == "tls_failed"
            assert "http://" in str(error)
        async with Upstream(tls=local_tls()) as upstream, opened() as client:
            with pytest.raises(TransportError):
                await client.request("POST", f"http://127.0.0.1:{upstream.port}/v1/x", {}, b"{}")

    run(scenario)


def test_a_handshake_that_breaks_off(run: Run) -> None:
    async def leave(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read(1)

    async def scenario() -> None:
        async with TcpServer(leave) as server, opened() as client:
            assert (await fails(client, f"https://127.0.0.1:{server.port}/")).code == "tls_failed"

    run(scenario)


# -- time


def test_a_handshake_without_end_is_ended_by_the_time_to_connect(run: Run) -> None:
    async def scenario() -> None:
        left = asyncio.Event()

        async def listen(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
            while await reader.read(65536):
                pass
            left.set()

        async with TcpServer(listen) as server, opened(limits=replace(LIMITS, connect_timeout_s=0.2)) as client:
            error = await fails(client, f"https://127.0.0.1:{server.port}/")
            assert (error.code, error.message) == (
                "connect_timeout",
                "no TLS handshake within 0.2 s (connect_timeout_s)",
            )
            async with asyncio.timeout(SOON_S):
                await left.wait()

    run(scenario)


def test_a_slow_handshake_is_waited_for(run: Run) -> None:
    async def scenario() -> None:
        begun, released = asyncio.Event(), asyncio.Event()

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection("127.0.0.1", upstream.port)
            try:
                back.write(await reader.read(65536))
                begun.set()
                await released.wait()
                await asyncio.gather(copy(there, writer), copy(reader, back))
            finally:
                back.transport.abort()

        async with Upstream(tls=local_tls()) as upstream, TcpServer(relay) as server, opened() as client:
            calling = asyncio.create_task(client.request("POST", f"https://127.0.0.1:{server.port}/", {}, b"{}"))
            await begun.wait()
            assert not calling.done()
            released.set()
            assert (await calling).body == GOOD_BODY

    run(scenario)


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)


def test_a_call_cancelled_in_the_handshake_closes_its_connection_at_once(run: Run) -> None:
    async def scenario() -> None:
        begun, left = asyncio.Event(), asyncio.Event()

        async def listen(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
            while await reader.read(65536):
                begun.set()
            left.set()

        async with TcpServer(listen) as server, opened() as client:
            call = asyncio.create_task(client.request("POST", f"https://127.0.0.1:{server.port}/", {}, b"{}"))
            await begun.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            async with asyncio.timeout(SOON_S):
                await left.wait()

    run(scenario)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "as it comes"])
def test_a_cancelled_call_does_not_wait_for_the_end_of_tls(run: Run, streamed: bool) -> None:
    """The upstream says nothing more, not even that it agrees to the end: TCP is closed all the same."""

    async def scenario() -> None:
        answers: list[asyncio.Task[None]] = []
        left = asyncio.Event()

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection("127.0.0.1", upstream.port)
            answers.append(asyncio.create_task(copy(there, writer)))
            try:
                await copy(reader, back)
                left.set()
            finally:
                back.transport.abort()

        async def call(client: HttpClient, url: str) -> None:
            if not streamed:
                await client.request("POST", url, {}, b"{}")
            async with client.open("POST", url, {}, b"{}"):
                pass

        async with (
            Upstream({BAD: hostile.silence}, tls=local_tls()) as upstream,
            TcpServer(relay) as server,
            opened() as client,
        ):
            calling = asyncio.create_task(call(client, f"https://127.0.0.1:{server.port}{BAD}"))
            await upstream.until(lambda: len(upstream.received) == 1)
            answers[0].cancel()
            await asyncio.wait(answers)
            calling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await calling
            async with asyncio.timeout(SOON_S):
                await left.wait()

    run(scenario)


# -- where an answer ends

HALF = {
    "to the connection's end": b"HTTP/1.1 200 OK\r\n\r\nsome text",
    "shorter than promised": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nsome text",
    "without its last chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nsome text\r\n",
}


def breaks_off(sent: bytes) -> Script:
    """TCP ends, TLS does not: so would anybody in between end it."""

    async def script(exchange: Exchange) -> None:
        await exchange.send(sent)
        exchange.writer.transport.abort()

    return script


@pytest.mark.parametrize("sent", HALF.values(), ids=HALF)
def test_an_answer_without_an_end_of_tls_is_not_whole(run: Run, sent: bytes) -> None:
    async def scenario() -> None:
        async with Upstream({BAD: breaks_off(sent)}, tls=local_tls()) as upstream, opened() as client:
            assert (await fails(client, f"https://127.0.0.1:{upstream.port}{BAD}")).code == "connection_reset"

    run(scenario)


def test_an_answer_of_known_length_needs_no_end_of_tls(run: Run) -> None:
    async def scenario() -> None:
        script = breaks_off(message(200, GOOD_BODY))
        async with Upstream({BAD: script}, tls=local_tls()) as upstream:
            url = f"https://127.0.0.1:{upstream.port}{BAD}"
            async with opened() as client:
                assert (await client.request("POST", url, {}, b"{}")).body == GOOD_BODY
            async with opened() as client, client.open("POST", url, {}, b"{}") as answer:
                assert await answer.read() == GOOD_BODY

    run(scenario)


def test_a_large_answer_is_read_to_its_end_by_a_reader_that_lags(run: Run) -> None:
    """All has come and the connection is closed, while reading is paused."""
    body = bytes(range(256)) * 4096

    async def scenario() -> None:
        script = hostile.raw(b"HTTP/1.1 200 OK\r\n\r\n" + body, close=True)
        async with (
            Upstream({BAD: script}, tls=local_tls()) as upstream,
            opened() as client,
            client.open("POST", f"https://127.0.0.1:{upstream.port}{BAD}", {}, b"{}") as answer,
        ):
            for _ in range(100):
                await client.request("POST", f"{upstream.base_url}/good", {}, b"{}")
            assert await answer.read() == body

    run(scenario)


# -- what becomes of the item


def test_no_attempt_is_charged_for_what_was_never_sent() -> None:
    async def scenario() -> None:
        options = ConnectOptions()
        async with (
            Upstream(tls=local_tls()) as upstream,
            HttpProcessor(upstream.base_url, None, LIMITS, RetryLimits(), options=options) as http,
        ):
            verdict = await http.call(make_item(attempt=RetryLimits().max_attempts))
            assert isinstance(verdict, Again)
            assert (verdict.error_code, verdict.counts) == ("tls_certificate_untrusted", False)
            assert verdict.error_code in NEVER_SENT
            assert verdict.gate_s > 0
            with pytest.raises(PenstockError, match="cannot be called: certificate refused") as caught:
                await http.probe()
            assert "--ca-file" in (caught.value.hint or "")

    asyncio.run(scenario())


# -- files


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    certificate, key = authority().issue("files")
    (tmp_path / "text.pem").write_text("no certificate\n")
    (tmp_path / "empty.pem").touch()
    locked = tmp_path / "locked.key"
    phrase = ("-aes256", "-passout", "pass:secret")
    subprocess.run(["openssl", "pkey", "-in", key, "-out", locked, *phrase], check=True, capture_output=True)
    missing, text, empty = (str(tmp_path / name) for name in ("missing.pem", "text.pem", "empty.pem"))
    good, others = str(certificate), str(authority().issue("others")[1])
    for options, words in (
        (ConnectOptions(ca_file=missing), f"{missing} cannot be read: No such file or directory (ca_file)"),
        (ConnectOptions(ca_file=str(tmp_path)), f"{tmp_path} cannot be read: Is a directory (ca_file)"),
        (ConnectOptions(ca_file=text), f"{text} holds no certificate (ca_file)"),
        (ConnectOptions(ca_file=empty), f"{empty} holds no certificate (ca_file)"),
        (ConnectOptions(client_cert_file=missing), f"{missing} cannot be read: No such file or directory (client_"),
        (ConnectOptions(client_cert_file=text), f"{text} holds no certificate (client_cert_file)"),
        (ConnectOptions(client_cert_file=good), f"{good} does not hold the private key of the certificate in {good}"),
        (ConnectOptions(None, good, missing), f"{missing} cannot be read: No such file or directory (client_key_file)"),
        (ConnectOptions(None, good, text), f"{text} does not hold the private key of the certificate in {good}"),
        (ConnectOptions(None, good, others), f"{others} does not hold the private key of the certificate in {good}"),
        (ConnectOptions(None, good, str(locked)), f"the key in {locked} is encrypted (client_key_file)"),
    ):
        with pytest.raises(UsageError) as caught:
            HttpProcessor("https://127.0.0.1:9/v1", None, LIMITS, RetryLimits(), options=options)
        assert caught.value.message.startswith(words), caught.value.message
        assert caught.value.hint
        HttpProcessor("http://127.0.0.1:9/v1", None, LIMITS, RetryLimits(), options=options)

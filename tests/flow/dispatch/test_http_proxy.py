"""The HTTP client by way of a proxy, which is told as little as possible."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from penstock.config import DispatchLimits, RetryLimits
from penstock.dispatch.http.client import HttpClient
from penstock.dispatch.http.connect import ConnectOptions, Proxy
from penstock.dispatch.http.processor import HttpProcessor
from penstock.errors import PenstockError, UsageError
from penstock.model import Again
from tests.support import hostile
from tests.support.certificates import authority, local_tls
from tests.support.failing_calls import fails
from tests.support.forward_proxy import ForwardProxy
from tests.support.hostile import GOOD_BODY, Upstream, message
from tests.support.items import make_item
from tests.support.loops import LOOPS, Run, runner_on
from tests.support.tcp_server import bind

LIMITS = DispatchLimits(connect_timeout_s=10, first_byte_timeout_s=10, idle_timeout_s=10, attempt_timeout_s=20)
SECRET = "sk-secret-key"
BAD = "/v1/bad"


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Run:
    return runner_on(request.param)


@contextlib.asynccontextmanager
async def opened(
    proxy: str, limits: DispatchLimits = LIMITS, ca_file: str | None = str(authority().file)
) -> AsyncIterator[HttpClient]:
    options = ConnectOptions(ca_file=ca_file, proxy=f"http://{proxy}")
    client = HttpClient(limits, {"authorization": f"Bearer {SECRET}"}, options)
    try:
        yield client
    finally:
        await client.close()


# -- through it


def test_a_tunnel_shows_the_proxy_where_it_leads_and_no_more(run: Run) -> None:
    async def scenario() -> None:
        async with Upstream(tls=local_tls()) as upstream, ForwardProxy() as proxy, opened(proxy.authority) as client:
            url = f"{upstream.base_url}/hidden-path"
            for _ in range(5):
                answer = await client.request("POST", url, {"x-team": "hidden-header"}, b"hidden-body")
                assert answer.body == GOOD_BODY
            async with client.open("POST", url, {"x-team": "hidden-header"}, b"hidden-body") as streamed:
                assert await streamed.read() == GOOD_BODY
            there = f"127.0.0.1:{upstream.port}"
            assert proxy.heads == [f"CONNECT {there} HTTP/1.1\r\nhost: {there}\r\n\r\n"]
            assert [request.body for request in upstream.received] == [b"hidden-body"] * 6
            assert upstream.received[0].headers["authorization"] == f"Bearer {SECRET}"
            for hidden in (SECRET.encode(), b"hidden-"):
                assert hidden not in proxy.seen

    run(scenario)


@pytest.mark.parametrize("userinfo", ["user:pass%20word%40", "user", "user:"])
def test_credentials_are_the_proxys_alone(run: Run, userinfo: str) -> None:
    plain = {"user": "user:", "user:": "user:"}.get(userinfo, "user:pass word@")
    told = f"proxy-authorization: Basic {base64.b64encode(plain.encode()).decode()}\r\n"

    async def scenario() -> None:
        for tls in (local_tls(), None):
            async with (
                Upstream(tls=tls) as upstream,
                ForwardProxy() as proxy,
                opened(f"{userinfo}@{proxy.authority}") as client,
            ):
                assert (await client.request("POST", f"{upstream.base_url}/x", {}, b"{}")).body == GOOD_BODY
                assert told in proxy.heads[0]
                assert "proxy-authorization" not in upstream.received[0].headers
                assert (SECRET.encode() in proxy.seen) is (tls is None)

    run(scenario)


def test_what_is_not_encrypted_is_forwarded(run: Run) -> None:
    async def scenario() -> None:
        async with Upstream() as upstream, ForwardProxy() as proxy, opened(proxy.authority) as client:
            for _ in range(3):
                assert (await client.request("POST", f"{upstream.base_url}/x?q=1", {}, b"{}")).body == GOOD_BODY
            assert len(proxy.heads) == 1
            assert proxy.heads[0].startswith(
                f"POST {upstream.base_url}/x?q=1 HTTP/1.1\r\nhost: 127.0.0.1:{upstream.port}\r\n"
            )

    run(scenario)


def test_names_are_the_proxys_to_look_up(run: Run) -> None:
    async def scenario() -> None:
        async with ForwardProxy(message(502, b"")) as proxy, opened(proxy.authority) as client:
            assert (await fails(client, "https://no-such-host.invalid/x")).code == "proxy_refused"
            assert proxy.heads[0].startswith("CONNECT no-such-host.invalid:443 HTTP/1.1\r\n")
            await fails(client, "https://[::1]/x")
            assert proxy.heads[-1].startswith("CONNECT [::1]:443 HTTP/1.1\r\nhost: [::1]:443\r\n")

    run(scenario)


def test_the_upstreams_certificate_is_checked_all_the_same(run: Run) -> None:
    async def scenario() -> None:
        async with (
            Upstream(tls=local_tls()) as upstream,
            ForwardProxy() as proxy,
            opened(proxy.authority, ca_file=None) as client,
        ):
            assert (await fails(client, f"{upstream.base_url}/x")).code == "tls_certificate_untrusted"
            await proxy.until_open(0)
            assert upstream.received == []

    run(scenario)


# -- not through it


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (message(407, b"who?", {"Proxy-Authenticate": "Basic"}), "the proxy answered HTTP 407; write its credentials"),
        (message(502, b"<html>"), "the proxy answered HTTP 502"),
        (b"HTTP/1.0 403 Forbidden\r\n\r\n", "the proxy answered HTTP 403"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "the proxy gave no answer: "),
        (b"HTTP/1.1 200 OK\r\n" + b"x-large: y\r\n" * 100_000, "the proxy gave no answer: "),
    ],
    ids=["407", "502", "403", "not HTTP", "huge head"],
)
def test_a_proxy_that_refuses(run: Run, answer: bytes, words: str) -> None:
    async def scenario() -> None:
        async with ForwardProxy(answer) as proxy, opened(f"user:pass-word@{proxy.authority}") as client:
            error = await fails(client, "https://127.0.0.1:9/x")
            assert error.code == "proxy_refused"
            assert str(error).startswith(words)
            assert "pass-word" not in str(error)
            await proxy.until_open(0)
            assert SECRET.encode() not in proxy.seen

    run(scenario)


def test_a_proxy_that_wants_credentials_to_forward(run: Run) -> None:
    async def scenario() -> None:
        async with (
            ForwardProxy(message(407, b"who?", {"Connection": "close"})) as proxy,
            opened(proxy.authority) as client,
        ):
            error = await fails(client, "http://127.0.0.1:9/x")
            assert (error.code, error.message) == ("proxy_refused", "the proxy answered HTTP 407")

    run(scenario)


def test_an_upstreams_own_407_is_its_answer(run: Run) -> None:
    async def scenario() -> None:
        scripts = {BAD: hostile.answer(407)}
        async with (
            Upstream(scripts, tls=local_tls()) as upstream,
            ForwardProxy() as proxy,
            opened(proxy.authority) as client,
        ):
            assert (await client.request("POST", f"{upstream.base_url}/bad", {}, b"{}")).status == 407

    run(scenario)


def test_a_proxy_that_is_silent_is_left_when_the_time_to_connect_is_up(run: Run) -> None:
    async def scenario() -> None:
        limits = replace(LIMITS, connect_timeout_s=0.2)
        async with ForwardProxy(b"") as proxy, opened(proxy.authority, limits) as client:
            error = await fails(client, "https://127.0.0.1:9/x")
            assert error.code == "connect_timeout"
            assert error.message == f"the proxy at {proxy.authority}: no tunnel within 0.2 s (connect_timeout_s)"
            await proxy.until_open(0)

    run(scenario)


def test_a_tunnel_that_leads_nowhere(run: Run) -> None:
    async def scenario() -> None:
        limits = replace(LIMITS, connect_timeout_s=0.2)
        async with ForwardProxy(b"HTTP/1.1 200 OK\r\n\r\n") as proxy, opened(proxy.authority, limits) as client:
            error = await fails(client, "https://127.0.0.1:9/x")
            assert (error.code, error.message) == (
                "connect_timeout",
                "no TLS handshake within 0.2 s (connect_timeout_s)",
            )
            await proxy.until_open(0)

    run(scenario)


def test_a_proxy_that_is_not_there(run: Run) -> None:
    async def scenario() -> None:
        async with opened(f"127.0.0.1:{port}") as client:
            error = await fails(client, "https://127.0.0.1:9/x")
            assert error.code == "connect_failed"
            assert error.message == f"the proxy at 127.0.0.1:{port}: Connection refused"

    with bind() as silent:  # bound and not listening: connections are refused, and nobody else gets it
        port = silent.getsockname()[1]
        run(scenario)


# -- cut short


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\n\r\n"], ids=["before the tunnel", "in the handshake"])
def test_a_call_cancelled_on_its_way_closes_its_connection_at_once(run: Run, answer: bytes) -> None:
    async def scenario() -> None:
        async with ForwardProxy(answer) as proxy, opened(proxy.authority) as client:
            call = asyncio.create_task(client.request("POST", "https://127.0.0.1:9/x", {}, b"{}"))
            await proxy.until_open(1)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await proxy.until_open(0)

    run(scenario)


def test_a_cancelled_call_closes_its_tunnel_at_once(run: Run) -> None:
    async def scenario() -> None:
        async with (
            Upstream({BAD: hostile.silence}, tls=local_tls()) as upstream,
            ForwardProxy() as proxy,
            opened(proxy.authority) as client,
        ):
            call = asyncio.create_task(client.request("POST", f"{upstream.base_url}/bad", {}, b"{}"))
            await upstream.until(lambda: len(upstream.received) == 1)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await proxy.until_open(0)

    run(scenario)


# -- settings, and what becomes of the item


@pytest.mark.parametrize(
    "url",
    [
        "proxy:3128",
        "https://u:pass-word@proxy:3128",
        "socks5://u:pass-word@proxy",
        "http://u:pass-word@",
        "http://u:pass-word@proxy:x",
        "http://u:pass-word@proxy/path",
        "http://u:pass-word@proxy?q",
    ],
)
def test_what_is_no_proxy_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(UsageError, match="is not http://host:port") as caught:
        Proxy.parse(url)
    assert "pass-word" not in f"{caught.value} {caught.value.hint}"


def test_a_password_is_not_shown() -> None:
    options = ConnectOptions(proxy="http://user:pass-word@proxy:3128")
    assert "pass-word" not in repr(options) + repr(Proxy.parse(str(options.proxy)))
    assert base64.b64encode(b"user:pass-word").decode() not in repr(Proxy.parse(str(options.proxy)))


def test_a_proxy_that_refuses_charges_no_attempt() -> None:
    async def scenario() -> None:
        async with ForwardProxy(message(502, b"")) as proxy:
            options = ConnectOptions(proxy=f"http://{proxy.authority}")
            base = "https://127.0.0.1:9/v1"
            async with HttpProcessor(base, SECRET, LIMITS, RetryLimits(), options=options) as http:
                verdict = await http.call(make_item(attempt=RetryLimits().max_attempts))
                assert isinstance(verdict, Again)
                assert (verdict.error_code, verdict.counts) == ("proxy_refused", False)
                with pytest.raises(PenstockError, match="cannot be called: the proxy answered HTTP 502") as caught:
                    await http.probe()
                assert caught.value.hint

    asyncio.run(scenario())

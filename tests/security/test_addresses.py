"""Where webhooks may go (S1, S2, S4, S6): what is refused, and that refusing means no packet is sent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.deliver.addresses import AddressRefused, Policy, is_public, parse_url
from penstock.deliver.webhooks import Sender
from penstock.errors import UsageError
from tests.support.tcp_server import TcpServer

REFUSED_LITERALS = [
    "127.0.0.1",
    "127.1",
    "0x7f000001",
    "0x7f.0.0.1",
    "127.0.0.0x1",
    "2130706433",
    "0177.0.0.1",
    "127.0.0.01",
    "0",
    "0.0.0.0",
    "127.0.0.1.",
    "10.0.0.1",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "100.100.100.200",
    "168.63.129.16",
    "192.0.0.192",
    "192.0.2.1",
    "192.88.99.1",
    "198.18.0.1",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "239.255.255.250",
    "240.0.0.1",
    "255.255.255.255",
    "[::]",
    "[::1]",
    "[::127.0.0.1]",
    "[::ffff:127.0.0.1]",
    "[::ffff:169.254.169.254]",
    "[::ffff:0:127.0.0.1]",
    "[64:ff9b::7f00:1]",
    "[64:ff9b::8.8.8.8]",
    "[64:ff9b:1::1]",
    "[100::1]",
    "[2001::1]",
    "[2001:0:4136:e378:8000:63bf:3fff:fdd2]",
    "[2001:db8::1]",
    "[2002:7f00:1::]",
    "[2002:808:808::1]",
    "[3fff::1]",
    "[5f00::1]",
    "[fc00::1]",
    "[fd00:ec2::254]",
    "[fd20:ce::254]",
    "[fe80::1]",
    "[fe80::1%25eth0]",
    "[fec0::1]",
    "[ff02::1]",
]
REFUSED_URLS = [
    "file:///etc/passwd",
    "gopher://example.com/",
    "ftp://example.com/",
    "javascript:alert(1)",
    "//example.com/",
    "example.com",
    "https://",
    "https:///path",
    "https://user@example.com/",
    "https://user:pass@example.com/",
    "https://example.com@127.0.0.1/",
    "https://127.0.0.1\\@example.com/",
    "https://example.com\\path",
    "https://example.com/\\path",
    "https://example.com/#fragment",
    "https://example.com#@127.0.0.1/",
    "https://example.com:/",
    "https://example.com:0/",
    "https://example.com:65536/",
    "https://example.com:+443/",
    "https://example.com:443:80/",
    "https://exa mple.com/",
    "https://example.com/a b",
    "https://example.com/\r\nX-Injected: 1",
    "https://example.com\x00/",
    "https://example.com/\x7f",
    " https://example.com/",
    "https://exämple.com/",
    "https://ⓔxample.com/",
    "https://example。com/",
    "https://1②7.0.0.1/",
    "https://%31%32%37.0.0.1/",
    "https://example..com/",
    "https://.example.com/",
    "https://-example.com/",
    "https://[::1/",
    "https://[::1]extra/",
    "https://[example.com]/",
    "https://" + "a" * 64 + ".com/",
    "https://example.com/" + "a" * 2100,
]


async def never(host: str, _port: int) -> list[str]:
    raise AssertionError(f"{host} was resolved")


def answering(*rounds: list[str]) -> Policy:
    """A policy whose resolver gives these answers, one list after the other."""
    left = list(rounds)

    async def resolver(_host: str, _port: int) -> list[str]:
        return left.pop(0)

    return Policy(resolver=resolver)


def allowed(policy: Policy, url: str) -> list[str]:
    return [str(address) for address in asyncio.run(policy.addresses(parse_url(url)))]


def refused(policy: Policy, url: str) -> str:
    with pytest.raises(AddressRefused) as caught:
        allowed(policy, url)
    return str(caught.value)


@pytest.mark.parametrize("host", REFUSED_LITERALS)
def test_addresses_that_are_not_public_are_refused(host: str) -> None:
    for scheme in ("http", "https"):
        refused(Policy(resolver=never), f"{scheme}://{host}/hook")


@pytest.mark.parametrize("url", REFUSED_URLS)
def test_odd_urls_are_no_urls(url: str) -> None:
    refused(Policy(resolver=never), url)


@pytest.mark.parametrize("host", ["8.8.8.8", "1.1.1.1", "[2606:4700:4700::1111]", "[2a00:1450:4001:81b::200e]"])
def test_public_addresses_are_called_as_they_are(host: str) -> None:
    assert allowed(Policy(resolver=never), f"https://{host}/hook") == [host.strip("[]")]


def test_a_url_is_taken_apart() -> None:
    target = parse_url("HTTPS://Hooks.Example.COM:8443/a/b?c=d&e=%20")
    assert (target.scheme, target.host, target.port, target.path) == (
        "https",
        "hooks.example.com",
        8443,
        "/a/b?c=d&e=%20",
    )
    assert target.authority == "hooks.example.com:8443"
    assert parse_url("http://[2606:4700::1]").authority == "[2606:4700::1]"
    assert parse_url("https://example.com?x=1").path == "/?x=1"


def test_ports_other_than_the_usual_are_refused() -> None:
    for port in (80, 443, 8080, 8443):
        assert allowed(answering(["8.8.8.8"]), f"https://example.com:{port}/")
    for port in (1, 22, 25, 5432, 6379, 9200, 65535):
        assert "port" in refused(answering(["8.8.8.8"]), f"https://example.com:{port}/")


@pytest.mark.parametrize(
    "answers",
    [
        ["127.0.0.1"],
        ["8.8.8.8", "127.0.0.1"],
        ["2606:4700:4700::1111", "::1"],
        ["8.8.8.8", "8.8.4.4", "::ffff:10.0.0.1"],
        ["fe80::1%eth0"],
        ["8.8.8.8", "not an address"],
        [],
    ],
)
def test_one_bad_answer_refuses_the_name(answers: list[str]) -> None:
    refused(answering(answers), "https://example.com/")


def test_a_name_that_does_not_exist_reads_like_one_that_may_not_be_called() -> None:
    async def unknown(_host: str, _port: int) -> list[str]:
        raise OSError("Name or service not known")

    assert refused(Policy(resolver=unknown), "https://example.com/") == refused(
        answering(["10.0.0.1"]), "https://example.com/"
    )


def test_the_operator_allows_networks_and_hosts() -> None:
    policy = Policy(["127.0.0.0/8", "fd12:3456::/32", "hooks.internal", "*.corp.example"], resolver=never)
    assert allowed(policy, "http://127.0.0.1:9999/") == ["127.0.0.1"]
    assert allowed(policy, "http://[fd12:3456::1]:9999/") == ["fd12:3456::1"]
    refused(policy, "http://10.0.0.1/")
    refused(policy, "http://127.1/")

    async def inside(_host: str, _port: int) -> list[str]:
        return ["10.0.0.1"]

    policy = Policy(["hooks.internal", "*.corp.example"], resolver=inside)
    assert allowed(policy, "http://hooks.internal:9999/") == ["10.0.0.1"]
    assert allowed(policy, "http://a.corp.example:9999/") == ["10.0.0.1"]
    refused(policy, "http://corp.example/")
    refused(policy, "http://xhooks.internal/")
    refused(policy, "http://notcorp.example/")


def test_metadata_is_open_only_by_its_own_name() -> None:
    refused(Policy(["169.254.0.0/16", "0.0.0.0/0", "::/0"], resolver=never), "http://169.254.169.254/")
    refused(Policy(["::/0"], resolver=never), "http://[fd00:ec2::254]/")
    assert allowed(Policy(["169.254.169.254"], resolver=never), "http://169.254.169.254/")


@pytest.mark.parametrize(
    "entry", ["10.0.0.1/8", "127.1", "2130706433", "0x7f000001", "http://x", "a b", "*", "*.", "a..b"]
)
def test_a_wrong_allowance_is_told_to_the_operator(entry: str) -> None:
    with pytest.raises(UsageError, match="webhook_allow"):
        Policy([entry])


@given(st.ip_addresses())
def test_nothing_is_public_that_the_standard_library_calls_private(address: object) -> None:
    found = ip_address(str(address))
    if is_public(found):
        assert found.is_global
        assert not found.is_multicast


@given(st.text(max_size=60))
def test_any_text_is_refused_or_well_formed(text: str) -> None:
    for url in (text, f"http://{text}/", f"https://example.com{text}"):
        with contextlib.suppress(AddressRefused):
            target = parse_url(url)
            assert target.path.isascii()
            assert target.path.isprintable()
            assert target.host.isascii()


# --- at connect


@contextlib.asynccontextmanager
async def canary() -> AsyncIterator[tuple[int, list[bytes]]]:
    """A listener on the loopback that must stay silent: its port, and what it heard."""
    heard: list[bytes] = []

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(65536))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    async with TcpServer(hear) as server:
        yield server.port, heard


def test_refused_at_connect_and_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a url that got past its creation, with ports out of the way."""
    monkeypatch.setattr("penstock.deliver.addresses.PORTS", range(65536))

    async def run() -> None:
        async with canary() as (port, heard):
            for host in ("127.0.0.1", "127.1", "0x7f000001", "2130706433", "0", "[::ffff:127.0.0.1]", "localhost"):
                result = await Sender(Policy(), 5).send(f"http://{host}:{port}/", {}, b"secret")
                assert result.status_code is None
                assert result.error
                assert result.error.startswith("url ")
            assert heard == []

    asyncio.run(run())


def test_rebinding_finds_the_checked_address_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Public when it is checked, loopback when it is asked again: it is not asked again."""
    monkeypatch.setattr("penstock.deliver.addresses.PORTS", range(65536))
    asked: list[str] = []

    async def run() -> None:
        async with canary() as (port, heard):

            async def rebinding(host: str, _port: int) -> list[str]:
                asked.append(host)
                return ["127.0.0.2" if len(asked) == 1 else "127.0.0.1"]

            # The first answer is allowed here and stands for a public one; nobody listens there.
            policy = Policy(["127.0.0.2"], resolver=rebinding)
            result = await Sender(policy, 5).send(f"http://rebind.example:{port}/", {}, b"secret")
            assert result.error == "connection failed: Connection refused"
            assert asked == ["rebind.example"]
            assert heard == []
            result = await Sender(policy, 5).send(f"http://rebind.example:{port}/", {}, b"secret")
            assert result.error == "url has a host that does not resolve to addresses that may be called"
            assert heard == []

    asyncio.run(run())


def test_a_proxy_of_the_environment_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with canary() as (port, heard), canary() as (proxy_port, proxied):
            for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
                monkeypatch.setenv(name, f"http://127.0.0.1:{proxy_port}")
            result = await Sender(Policy(["127.0.0.1"]), 5).send(f"http://127.0.0.1:{port}/x", {"a": "b"}, b"body")
            assert result.status_code == 200
            assert len(heard) == 1
            assert heard[0].startswith(b"POST /x HTTP/1.1\r\n")
            assert proxied == []

    asyncio.run(run())

"""Addresses that a webhook may go to. Tenants choose the urls, so every address that is not plainly public is refused.

A url is read strictly: one that two parsers could take for different hosts is refused. A host is resolved once; every
address it has must be allowed, and the connection goes to one of those very addresses. The networks and host names
that the operator lists in `webhook_allow` are allowed on top, on any port.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)

from penstock.errors import UsageError

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
Resolver = Callable[[str, int], Awaitable[list[str]]]

MAX_URL_CHARS = 2048
PORTS = frozenset({80, 443, 8080, 8443})
_DEFAULT_PORTS = {"http": 80, "https": 443}
_RESOLVE_S = 5.0
_MAX_ADDRESSES = 16

_URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::(?P<port>[0-9]{1,5}))?(?P<target>[/?][\x21-\x7e]*)?",
    re.IGNORECASE,
)
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9])?")
# Labels that some resolvers take for a number, and the host so for an address: 127.1, 2130706433, 0x7f000001,
# 0177.0.0.1.
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")

# The special-purpose registries of IANA. Python's own `is_global` calls NAT64, 6to4 and multicast global, and changes
# between versions.
_CLOSED_4 = tuple(
    IPv4Network(text)
    for text in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.31.196.0/24",
        "192.52.193.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "192.175.48.0/24",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
    )
)
# Of IPv6 only global unicast is open: that leaves out loopback, mapped and translated (NAT64) IPv4, link-local,
# unique local and multicast. Inside it, these are tunnels that carry an IPv4 address, or are for documents and tests.
_OPEN_6 = IPv6Network("2000::/3")
_CLOSED_6 = tuple(
    IPv6Network(text) for text in ("2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20")
)
# Metadata services of clouds, which give out credentials. Some look public; allowing a larger network allows none of
# them.
_METADATA = frozenset(
    ip_address(text)
    for text in (
        "100.100.100.200",
        "168.63.129.16",
        "169.254.169.254",
        "169.254.170.2",
        "169.254.170.23",
        "192.0.0.192",
        "fd00:ec2::23",
        "fd00:ec2::254",
        "fd20:ce::254",
        "fe80::a9fe:a9fe",
    )
)


class AddressRefused(Exception):  # noqa: N818  (a decision, not a fault)
    """The url may not be called; the text says why, and never what a name resolved to."""


@dataclass(frozen=True, slots=True)
class Target:
    """Parts of a url. `host` is lower case, without brackets."""

    scheme: str
    host: str
    port: int
    path: str
    literal: Address | None

    @property
    def authority(self) -> str:
        """The Host header."""
        host = f"[{self.host}]" if isinstance(self.literal, IPv6Address) else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"


def parse_url(url: str) -> Target:
    """Take a url apart. Raises if it may not be called."""
    if len(url) > MAX_URL_CHARS:
        raise AddressRefused(f"is longer than {MAX_URL_CHARS} characters")
    match = _URL.fullmatch(url)
    if match is None or "#" in url or "\\" in url:
        raise AddressRefused(
            "must be http:// or https:// with a host in ASCII (xn-- for other scripts), "
            "without user, password, fragment, space or backslash"
        )
    scheme, host = match["scheme"].lower(), match["host"].lower()
    port = int(match["port"]) if match["port"] else _DEFAULT_PORTS[scheme]
    if not 1 <= port <= 65_535:
        raise AddressRefused("has no valid port")
    literal = _literal(host)
    path = match["target"] or "/"
    return Target(scheme, host.strip("[]"), port, path if path[0] == "/" else f"/{path}", literal)


def _literal(host: str) -> Address | None:
    """The address that the host is, or None if it is a name."""
    try:
        if host.startswith("["):
            return IPv6Address(host[1:-1])
        labels = host.split(".")
        if _NUMBER.fullmatch(labels[-1]):
            return IPv4Address(host)
    except ValueError:
        raise AddressRefused("has a host that is neither a name nor an address written in full") from None
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise AddressRefused("has a host that is not a valid name")
    return None


def is_public(address: Address) -> bool:
    """Whether the address is one host of the public internet."""
    if address in _METADATA:
        return False
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _CLOSED_4)
    return address.scope_id is None and address in _OPEN_6 and not any(address in network for network in _CLOSED_6)


async def system_resolver(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


class Policy:
    """Policy of which addresses may be called: the public internet, and what the operator allows besides."""

    def __init__(self, allow: Iterable[str] = (), *, resolver: Resolver = system_resolver) -> None:
        self._resolver = resolver
        self._networks: list[Network] = []
        self._hosts: set[str] = set()
        self._domains: tuple[str, ...] = ()
        for entry in allow:
            self._add(entry.lower())

    def _add(self, entry: str) -> None:
        try:
            self._networks.append(ip_network(entry))
        except ValueError:
            name = entry.removeprefix("*.")
            labels = name.split(".")
            if not all(_LABEL.fullmatch(label) for label in labels) or _NUMBER.fullmatch(labels[-1]):
                raise UsageError(
                    f"webhook_allow: '{entry}' is neither a network nor a host name",
                    hint="Write 10.1.0.0/16 (no bits set behind the prefix), fd12::/16, hooks.example.net or "
                    "*.example.net.",
                ) from None
            if name == entry:
                self._hosts.add(name)
            else:
                self._domains += (f".{name}",)

    def _lists_host(self, host: str) -> bool:
        return host in self._hosts or host.endswith(self._domains)

    def _lists_address(self, address: Address) -> bool:
        if address in _METADATA:
            return any(network.num_addresses == 1 and address in network for network in self._networks)
        return any(address in network for network in self._networks)

    def _check_address(self, target: Target, address: Address) -> None:
        if self._lists_address(address) or (target.literal is None and self._lists_host(target.host)):
            return
        if not is_public(address):
            raise _not_allowed()
        if target.port not in PORTS:
            raise AddressRefused(f"has a port other than {', '.join(map(str, sorted(PORTS)))}")

    async def addresses(self, target: Target) -> list[Address]:
        """Addresses to connect to for `target`, in order of preference. One address that is not allowed refuses them
        all."""
        if target.literal is not None:
            self._check_address(target, target.literal)
            return [target.literal]
        try:
            async with asyncio.timeout(_RESOLVE_S):
                answers = await self._resolver(target.host, target.port)
            found = [ip_address(answer) for answer in answers]
        except (OSError, TimeoutError, UnicodeError, ValueError):
            # The same text as for an address that is not allowed: a tenant who may not call an inner network need not
            # learn which names it knows.
            raise _not_allowed() from None
        if not found:
            raise _not_allowed()
        for address in found:
            self._check_address(target, address)
        return found[:_MAX_ADDRESSES]


def _not_allowed() -> AddressRefused:
    return AddressRefused("has a host that does not resolve to addresses that may be called")


@lru_cache(maxsize=16)
def policy_for(allow: tuple[str, ...]) -> Policy:
    """The policy of a configuration's `webhook_allow`."""
    return Policy(allow)

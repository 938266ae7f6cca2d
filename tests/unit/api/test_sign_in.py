from __future__ import annotations

import pytest

from penstock.api.sign_in import host_of, token_in


@pytest.mark.parametrize(
    ("cookies", "token"),
    [
        (b"penstock_console=abc-_1", "abc-_1"),
        (b"other=1; penstock_console=abc; more=2", "abc"),
        (b"other=1;penstock_console=abc", "abc"),
        (b"bad name=1; \xe9; =; penstock_console=abc", "abc"),
        (b"penstock_console=a; penstock_console=b", "a"),
        (b"penstock_console_x=abc; x=penstock_console", None),
        (b"penstock_console=", None),
        (b"penstock_console=\xe9", None),
        (b"penstock_console=" + b"a" * 101, None),
        (b"", None),
    ],
)
def test_the_token_among_cookies(cookies: bytes, token: str | None) -> None:
    assert token_in({b"cookie": cookies}) == token


@pytest.mark.timeout(20)
@pytest.mark.parametrize("cookies", [b'a="' + b'\\"' * 1_000_000 + b'"', b"a=" * 1_000_000, b";" * 1_000_000])
def test_many_cookies_are_read_once(cookies: bytes) -> None:
    assert token_in({b"cookie": cookies + b"; penstock_console=abc"}) == "abc"


@pytest.mark.parametrize(
    ("origin", "host"),
    [("https://a.example:8443", "a.example:8443"), ("null", ""), ("http://[", None), ("http://[x]", None), ("", "")],
)
def test_the_host_of_an_origin(origin: str, host: str | None) -> None:
    assert host_of(origin) == host

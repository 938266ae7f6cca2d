"""S12: a cookie lets the console in, and nobody else's page: not across sites, not without the console's own header,
not after it was signed out or its key was revoked."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from http.cookies import SimpleCookie

import psycopg
import pytest

from penstock.api.app import endpoints
from penstock.api.endpoint import Endpoint
from tests.support.server import Answered
from tests.support.tenants import TenantGround, digest_rows, tenant_ground
from tests.support.wait import wait_until

DEADLINE_S = 60.0
REFUSED = "Only the console itself may do this."
CONSOLE = {"x-penstock-console": "1", "sec-fetch-site": "same-origin"}
TABLES = ("files", "batches", "jobs", "webhook_endpoints", "api_keys", "quotas", "sessions", "sign_ins")
FOREIGN: tuple[Mapping[str, str], ...] = (
    {},
    {"x-penstock-console": "1"},
    {"sec-fetch-site": "same-origin"},
    {"x-penstock-console": "1", "sec-fetch-site": "cross-site"},
    {"x-penstock-console": "1", "sec-fetch-site": "same-site"},
    {"x-penstock-console": "1", "sec-fetch-site": "none"},
    {"x-penstock-console": "1", "origin": "http://evil.example"},
    {"x-penstock-console": "1", "origin": "null"},
    {"x-penstock-console": "1", "origin": "http://["},
    {"x-penstock-console": "1", "origin": "//"},
    {"x-penstock-console": "0", "sec-fetch-site": "same-origin"},
)
MUTATIONS = [each for each in endpoints() if each.method != "GET"]


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory, server_18: str) -> Iterator[TenantGround]:
    options = ("--set", "key_cache_s=0", "--root-path", "/p")
    with tenant_ground(tmp_path_factory.mktemp("sign_in"), server_18, *options, workers=0) as made:
        yield made


def sign_in(ground: TenantGround, tenant: str, **headers: str) -> Answered:
    sent = {**CONSOLE, **headers}
    return ground.ask(None, "POST", "/console/session", {"key": ground.keys[tenant]}, headers=sent)


def cookie_of(answer: Answered) -> str:
    assert answer.status == 204, answer.content
    (cookie,) = SimpleCookie(answer.headers["set-cookie"]).values()
    return f"{cookie.key}={cookie.value}"


@pytest.fixture(scope="module")
def cookie(ground: TenantGround) -> str:
    return cookie_of(sign_in(ground, "root"))


def test_the_cookie_is_out_of_reach_of_scripts_and_sites(ground: TenantGround) -> None:
    (told,) = SimpleCookie(sign_in(ground, "alice").headers["set-cookie"]).values()
    assert (told["httponly"], told["samesite"], told["path"]) == (True, "strict", "/p/")
    assert int(told["max-age"]) == 12 * 3600
    assert not told["secure"]
    assert ground.keys["alice"] not in told.value
    (told,) = SimpleCookie(sign_in(ground, "alice", origin="https://x.example").headers["set-cookie"]).values()
    assert told["secure"]
    # A copy of the database has no token in it.
    with psycopg.connect(ground.database) as connection:
        hashes = [row[0] for row in connection.execute("SELECT hash FROM penstock.sign_ins")]
    assert hashlib.sha256(told.value.encode()).digest() in hashes
    assert told.value.encode() not in hashes


def test_the_cookie_is_its_owner(ground: TenantGround) -> None:
    cookie = cookie_of(sign_in(ground, "alice"))
    me = ground.ask(None, "GET", "/api/me", headers={"cookie": cookie}).json
    assert (me["owner"], me["role"], me["signedIn"], me["keyless"]) == ("alice", "user", True, False)
    assert ground.ask(None, "GET", "/v1/providers", headers={"cookie": cookie}).status == 403
    # A key that is sent is what counts.
    assert ground.ask("root", "GET", "/api/me", headers={"cookie": cookie}).json["owner"] == "root"
    assert ground.ask(None, "GET", "/api/me", headers={"cookie": f"other=1; {cookie}"}).status == 200


@pytest.mark.parametrize("foreign", FOREIGN, ids=str)
def test_another_sites_page_changes_nothing(ground: TenantGround, cookie: str, foreign: Mapping[str, str]) -> None:
    before = digest_rows(ground.database, TABLES)
    for endpoint in MUTATIONS:
        path = endpoint.path.replace("{", "").replace("}", "").replace(":path", "")
        answer = ground.ask(None, endpoint.method, path, headers={"cookie": cookie, **foreign})
        assert (answer.status, answer.json["error"]["message"]) == (403, REFUSED), (endpoint.method, path)
    assert ground.ask(None, "POST", "/console/session", {"key": ground.keys["root"]}, headers=foreign).status == 403
    assert ground.ask(None, "DELETE", "/console/session", headers={"cookie": cookie, **foreign}).status == 403
    assert digest_rows(ground.database, TABLES) == before


def test_the_console_itself_may(ground: TenantGround, cookie: str) -> None:
    body = {"name": "hook", "url": "http://127.0.0.1:9/x", "event_types": ["batch.completed"]}
    for own in ({"sec-fetch-site": "same-origin"}, {"origin": f"http://127.0.0.1:{ground.server.port}"}):
        headers = {"cookie": cookie, "x-penstock-console": "1", **own}
        made = ground.ask(None, "POST", "/v1/webhook_endpoints", body, headers=headers)
        assert made.status == 200, made.content
        assert ground.ask(None, "DELETE", f"/v1/webhook_endpoints/{made.json['id']}", headers=headers).status == 200


def test_no_get_changes_anything(ground: TenantGround) -> None:
    """A page of another site can make a browser GET, and the cookie would go with it but for SameSite."""
    gets: list[Endpoint] = [each for each in endpoints() if each.method == "GET" and each.path != "/api/ticks"]
    cookie = cookie_of(sign_in(ground, "root"))
    before = digest_rows(ground.database, TABLES)
    for endpoint in gets:
        path = endpoint.path.replace("{", "").replace("}", "").replace(":path", "")
        assert ground.ask(None, "GET", path, headers={"cookie": cookie}).status < 500, path
    assert digest_rows(ground.database, TABLES) == before


@pytest.mark.parametrize("key", ["", "sk-penstock-none", "sk-penstock-AAAAAAAAAAAA-" + "a" * 32, "\x00", "é" * 50])
def test_keys_that_are_none(ground: TenantGround, key: str) -> None:
    answer = ground.ask(None, "POST", "/console/session", {"key": key}, headers=CONSOLE)
    assert answer.status == 401
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("value", ["", "x", "a" * 32, "a" * 5_000, '"', "é", "%00"])
def test_cookies_that_are_none(ground: TenantGround, value: str) -> None:
    sent = {"cookie": f"penstock_console={value}".encode().decode("latin-1")}
    assert ground.ask(None, "GET", "/api/me", headers=sent).status == 401


def test_signed_out_expired_and_revoked(ground: TenantGround) -> None:
    out, expired, revoked = (cookie_of(sign_in(ground, "bob")) for _ in range(3))

    def lets_in(cookie: str) -> bool:
        return ground.ask(None, "GET", "/api/me", headers={"cookie": cookie}).status == 200

    answer = ground.ask(None, "DELETE", "/console/session", headers={"cookie": out, **CONSOLE})
    assert (answer.status, SimpleCookie(answer.headers["set-cookie"])["penstock_console"]["max-age"]) == (204, "0")
    assert [lets_in(cookie) for cookie in (out, expired, revoked)] == [False, True, True]
    digest = hashlib.sha256(expired.split("=")[1].encode()).digest()
    with psycopg.connect(ground.database, autocommit=True) as connection:
        connection.execute("UPDATE penstock.sign_ins SET expires_at = now() WHERE hash = %s", [digest])
        assert [lets_in(cookie) for cookie in (expired, revoked)] == [False, True]
        ground.ok("root", "POST", f"/v1/keys/{ground.key_ids['bob']}/revoke")
        wait_until(lambda: not lets_in(revoked), DEADLINE_S)
        # The next sign-in removes what has expired.
        cookie_of(sign_in(ground, "root"))
        left = connection.execute("SELECT count(*) FROM penstock.sign_ins WHERE hash = %s", [digest]).fetchone()
        assert left == (0,)

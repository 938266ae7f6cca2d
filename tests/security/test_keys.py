"""API keys: what is stored, who is let in, and what a server without keys lets happen."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import psycopg
import pytest
from psycopg_pool import PoolTimeout
from starlette.datastructures import Headers

from penstock.api import keys
from penstock.api.auth import Auth
from penstock.api.endpoint import Role
from penstock.api.errors import ApiError
from penstock.config import DatabaseLimits
from penstock.db.pool import open_pool
from tests.support.cli import run_cli
from tests.support.db import connected
from tests.support.postgres_proxy import PostgresProxy
from tests.support.processes import Processes
from tests.support.server import ServerProcess, served, start_server
from tests.support.wait import wait_until

NOWHERE = ("--base-url", "http://127.0.0.1:9/v1")
DIALECTS = {"openai": "/v1/models", "anthropic": "/v1/messages/batches"}


def make_key(
    conninfo: str, *, owner: str = "ann", role: Role = "user", expires_after_s: float | None = None
) -> tuple[keys.Key, str]:
    async def make() -> tuple[keys.Key, str]:
        async with connected(conninfo) as connection:
            return await keys.create_key(connection, owner=owner, name="", role=role, expires_after_s=expires_after_s)

    return asyncio.run(make())


@pytest.fixture
def server(tmp_path: Path, database_18: str) -> Iterator[ServerProcess]:
    with served(tmp_path, *NOWHERE, "--set", "key_cache_s=0.2", database=database_18, workers=0) as server:
        yield server


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory, shared_database_18: str) -> Iterator[ServerProcess]:
    """A server that has keys, for tests which do not mind those of others."""
    make_key(shared_database_18)
    where = tmp_path_factory.mktemp("keyed")
    with served(where, *NOWHERE, "--set", "key_cache_s=0.2", database=shared_database_18, workers=0) as running:
        yield running


def test_only_a_hash_of_a_long_random_key_is_stored(database_18: str) -> None:
    key, secret = make_key(database_18)
    assert secret.startswith(f"{key.prefix}-")
    assert keys.KEY.fullmatch(secret)
    assert len(secret.removeprefix(f"{key.prefix}-")) * 6 >= 128
    with psycopg.connect(database_18) as connection:
        rows = connection.execute("SELECT to_jsonb(k)::text, k.hash FROM penstock.api_keys k").fetchall()
    assert len(rows) == 1
    assert secret.removeprefix(key.prefix) not in rows[0][0]
    assert rows[0][1] == hashlib.sha256(secret.encode()).digest()
    others = {make_key(database_18)[1] for _ in range(20)}
    assert len(others | {secret}) == 21


def test_the_first_key_is_believed_at_once(tmp_path: Path, database_18: str) -> None:
    """Its owner is not taken for the one local user while the server still remembers that there were no keys."""
    with served(tmp_path, *NOWHERE, "--set", "key_cache_s=60", database=database_18, workers=0) as server:
        mine = server.ask("PUT", "/v1/files?filename=x&purpose=user_data", b"mine").json["id"]
        _, secret = make_key(database_18)
        assert server.ask("GET", f"/v1/files/{mine}", key=secret).status == 404
        # And from then on it is known that there are keys.
        assert server.ask("GET", f"/v1/files/{mine}").status == 401


def test_with_keys_nobody_comes_in_without_one(server: ServerProcess, database_18: str) -> None:
    assert server.ask("GET", "/v1/models").status == 200
    _, secret = make_key(database_18)
    wait_until(lambda: server.ask("GET", "/v1/models").status == 401, 10)
    refused = server.ask("GET", "/v1/models")
    assert set(refused.json["error"]) == {"message", "type", "param", "code"}
    assert refused.headers["www-authenticate"] == "Bearer"
    for path in ("/openapi.json", "/v1/files", "/v1/batches", "/v1/keys", "/nowhere"):
        assert server.ask("GET", path).status == 401, path
        assert server.ask("OPTIONS", path).status == 401, path
    for path in ("/healthz", "/readyz"):
        assert server.ask("GET", path).status == 200
    for headers in (
        {"authorization": f"Bearer {secret}"},
        {"authorization": f"bearer  {secret} "},
        {"x-api-key": secret},
        {"api-key": secret},
        {"authorization": "Bearer something-of-a-proxy", "x-api-key": secret},
    ):
        assert server.ask("GET", "/v1/models", headers=headers).status == 200
    for wrong in (
        "",
        "x",
        "sk-penstock-",
        secret[:-1],
        f"{secret}x",
        secret.upper(),
        "sk-penstock-" + "a" * 12 + "-" + "b" * 32,
    ):
        answer = server.ask("GET", "/v1/models", headers={"authorization": f"Bearer {wrong}"})
        assert answer.status == 401, wrong
        assert not wrong or len(wrong) < 20 or wrong not in answer.content.decode()


def test_a_refusal_speaks_the_clients_dialect(keyed: ServerProcess) -> None:
    answer = keyed.ask("GET", "/v1/messages/batches", headers={"x-api-key": "wrong"})
    assert answer.status == 401
    assert answer.json["type"] == "error"
    assert answer.json["error"]["type"] == "authentication_error"
    assert answer.json["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]


def test_a_revoked_or_expired_key_works_no_longer(keyed: ServerProcess, shared_database_18: str) -> None:
    _, admin = make_key(shared_database_18, role="admin")
    key, secret = make_key(shared_database_18)
    _, brief = make_key(shared_database_18, expires_after_s=1.0)
    assert keyed.ask("GET", "/v1/models", key=secret).status == 200
    revoked = keyed.ask("POST", f"/v1/keys/key_{key.id.hex}/revoke", key=admin)
    assert revoked.status == 200
    assert revoked.json["revoked_at"] is not None
    wait_until(lambda: keyed.ask("GET", "/v1/models", key=secret).status == 401, 5)
    again = keyed.ask("POST", f"/v1/keys/key_{key.id.hex}/revoke", key=admin)
    assert again.json["revoked_at"] == revoked.json["revoked_at"]
    wait_until(lambda: keyed.ask("GET", "/v1/models", key=brief).status == 401, 5)


def test_keys_are_for_admins(keyed: ServerProcess, shared_database_18: str) -> None:
    _, user = make_key(shared_database_18)
    _, admin = make_key(shared_database_18, role="admin")
    body = {"owner": "bob"}
    for method, path, content in (
        ("GET", "/v1/keys", None),
        ("POST", "/v1/keys", body),
        ("POST", f"/v1/keys/key_{'0' * 32}/revoke", None),
    ):
        assert keyed.ask(method, path, content, key=user).status == 403
    made = keyed.ask("POST", "/v1/keys", body, key=admin)
    assert made.status == 200
    assert made.json["owner"] == "bob"
    assert keyed.ask("GET", "/v1/models", key=made.json["key"]).status == 200
    for wrong, status in (
        ({"owner": ""}, 400),
        ({"owner": "a\u0000b"}, 400),
        ({"owner": "a", "role": "root"}, 400),
        ({"owner": "a", "hash": "x"}, 422),
        ({"owner": "a", "id": "x"}, 422),
        ({}, 400),
    ):
        assert keyed.ask("POST", "/v1/keys", wrong, key=admin).status == status, wrong
    assert keyed.ask("POST", f"/v1/keys/key_{'0' * 32}/revoke", key=admin).status == 404


def test_the_list_is_walked_to_its_end_and_holds_no_secret(server: ServerProcess, database_18: str) -> None:
    _, admin = make_key(database_18, role="admin")
    secrets = [make_key(database_18)[1] for _ in range(6)]
    seen: list[str] = []
    query = "limit=3"
    while True:
        page = server.ask("GET", f"/v1/keys?{query}", key=admin)
        seen += [key["id"] for key in page.json["data"]]
        assert not any(secret[-20:] in page.content.decode() for secret in secrets)
        if not page.json["has_more"]:
            break
        query = f"limit=3&after={page.json['last_id']}"
    assert len(seen) == len(set(seen)) == 7
    assert seen == sorted(seen, reverse=True)
    assert server.ask("GET", "/v1/keys?after=key_x", key=admin).status == 400


def test_without_keys_other_sites_and_names_are_refused(server: ServerProcess) -> None:
    for headers in (
        {"host": "attacker.example"},
        {"host": f"attacker.example:{server.port}"},
        {"origin": "https://attacker.example"},
        {"origin": "null"},
    ):
        assert server.ask("GET", "/v1/models", headers=headers).status == 401, headers
    for headers in ({"host": f"localhost:{server.port}"}, {"host": "[::1]"}, {"origin": server.url}):
        assert server.ask("GET", "/v1/models", headers=headers).status == 200, headers


def test_without_keys_it_listens_on_loopback_only(tmp_path: Path, database_18: str) -> None:
    for host in ("0.0.0.0", "::", ""):
        refused = run_cli("serve", *NOWHERE, "--host", host, "--port", "0", "--database-url", database_18, cwd=tmp_path)
        refused.refuses(2, "without API keys", "penstock keys create")
    make_key(database_18)
    with Processes(tmp_path) as processes:
        process = start_server(processes, tmp_path, *NOWHERE, "--host", "0.0.0.0", database=database_18, workers=0)
        wait_until(lambda: "required" in process.log.read_text() or not process.alive, 30)
        assert process.alive, process.tail()


def test_the_command_makes_lists_and_revokes_keys(tmp_path: Path, database_18: str) -> None:
    where = ("--database-url", database_18, "--json")
    made = run_cli("keys", "create", "--owner", "ann", "--role", "admin", *where, cwd=tmp_path).expect(0).summary
    assert keys.KEY.fullmatch(made["key"])
    listed = run_cli("keys", "list", *where, cwd=tmp_path).expect(0).summary
    assert [key["id"] for key in listed["data"]] == [made["id"]]
    assert "key" not in listed["data"][0]
    run_cli("keys", "revoke", "key_nonsense", "--database-url", database_18, cwd=tmp_path).refuses(2, "no key begins")
    revoked = run_cli("keys", "revoke", made["key"], *where, cwd=tmp_path).expect(0).summary
    assert revoked["revoked_at"] is not None
    bad = ("keys", "create", "--expires", "soon", "--database-url", database_18)
    run_cli(*bad, cwd=tmp_path).refuses(2, "--expires soon")


def test_the_command_asks_a_server_too(keyed: ServerProcess, shared_database_18: str, tmp_path: Path) -> None:
    _, admin = make_key(shared_database_18, role="admin")
    env = {"PENSTOCK_SERVER": keyed.url, "PENSTOCK_API_KEY": admin}
    made = run_cli("keys", "create", "--owner", "bob", "--expires", "90d", "--json", cwd=tmp_path, env=env).expect(0)
    assert keyed.ask("GET", "/v1/models", key=made.summary["key"]).status == 200


@pytest.mark.parametrize("with_key", [False, True])
def test_when_the_database_is_away_all_who_ask_hear_of_it_together(database_18: str, with_key: bool) -> None:
    """Not one after the other, each after a wait of its own: the last of a thousand would never be told."""
    wait_s, callers = 1.0, 20
    secret = make_key(database_18)[1] if with_key else ""
    headers = Headers({"host": "localhost", "authorization": f"Bearer {secret}"})

    async def ask(proxy: PostgresProxy) -> tuple[list[object], float]:
        pool = await open_pool(proxy.proxied(database_18), DatabaseLimits(connect_wait_s=wait_s))
        try:
            auth = Auth(pool, 0.001)
            await auth.identify(headers)
            proxy.refuse()
            proxy.cut()
            began = monotonic()
            told = await asyncio.gather(*(auth.identify(headers) for _ in range(callers)), return_exceptions=True)
            told += await asyncio.gather(*(auth.identify(headers) for _ in range(callers)), return_exceptions=True)
            return list(told), monotonic() - began
        finally:
            await pool.close()

    with PostgresProxy(database_18) as proxy:
        told, took_s = asyncio.run(ask(proxy))
    assert all(isinstance(error, psycopg.Error | PoolTimeout) for error in told), told
    assert took_s < wait_s * callers / 2


def test_of_keys_that_are_told_twice_only_the_first_counts(database_18: str) -> None:
    """Each is looked for in the database: a request must not be able to ask for any number of them."""
    _, secret = make_key(database_18)

    async def scenario() -> None:
        pool = await open_pool(database_18, DatabaseLimits())
        auth = Auth(pool, 60)
        bad = [(b"x-api-key", f"sk-penstock-{number}".encode()) for number in range(3)]
        good = (b"x-api-key", secret.encode())
        assert (await auth.identify(Headers(raw=[good, *bad]))).owner == "ann"
        with pytest.raises(ApiError):
            await auth.identify(Headers(raw=[*bad, good]))
        assert (await auth.identify(Headers(raw=[*bad, (b"authorization", b"Bearer " + good[1])]))).owner == "ann"
        await pool.close()

    asyncio.run(scenario())

"""Limits per owner: what is in force, how a minute's requests are shared between servers, and the command."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

from penstock.config import DatabaseLimits, QuotaLimits
from penstock.db.pool import Connection, borrowed, open_pool
from penstock.quotas.quotas import (
    OwnQuota,
    Quota,
    QuotaExceeded,
    list_own_quotas,
    quota_in_force,
    read_own_quota,
    set_own_quota,
    take_requests,
)
from penstock.server.quotas import OwnerQuotas
from tests.support.cli import run_cli
from tests.support.db import one, with_connection


def test_an_owner_has_its_own_limits_else_the_defaults() -> None:
    default = QuotaLimits(owner_max_open_batches=3, owner_requests_per_minute=60, owner_max_priority=10)
    assert quota_in_force(OwnQuota("a"), default) == Quota(3, 0, 60, 10)
    assert quota_in_force(OwnQuota("a", 0, 5, 70, 0), default) == Quota(0, 5, 70, 0)
    assert quota_in_force(OwnQuota("a"), QuotaLimits()) == Quota()


def test_a_minute_is_the_databases(database: str) -> None:
    async def body(connection: Connection) -> None:
        at = datetime(2026, 1, 1, 12, 0, 15, tzinfo=UTC)
        assert await take_requests(connection, "a", 3, now=at) == (0, 45)
        assert await take_requests(connection, "a", 3, now=at + timedelta(seconds=30)) == (3, 15)
        assert await take_requests(connection, "b", 3, now=at) == (0, 45)
        assert await take_requests(connection, "a", 3, now=at + timedelta(seconds=45)) == (0, 60)
        # A clock that was set back begins a minute, too.
        assert await take_requests(connection, "a", 3, now=at) == (0, 45)

    with_connection(database, body)


async def _admitted(servers: list[OwnerQuotas], owner: str, each: int) -> int:
    async def ask(server: OwnerQuotas) -> bool:
        try:
            await server.admit(owner)
        except QuotaExceeded:
            return False
        return True

    return sum(await asyncio.gather(*(ask(server) for server in servers for _ in range(each))))


def test_servers_share_a_minute(database_18: str) -> None:
    async def body() -> None:
        pool = await open_pool(database_18, DatabaseLimits())
        try:
            for attempt in range(1_000):
                servers = [OwnerQuotas(pool, QuotaLimits(owner_requests_per_minute=41), 60) for _ in range(3)]
                owner = f"owner {attempt}"
                async with borrowed(pool) as connection:
                    (began,) = await one(connection, "SELECT date_trunc('minute', now())")
                admitted = await _admitted(servers, owner, 100)
                # A server ends its minute a little before the database's does, and drops what it has left then.
                in_one = "SELECT minute = %s AND now() < minute + interval '59 s' FROM penstock.request_counts"
                async with borrowed(pool) as connection:
                    if await one(connection, f"{in_one} WHERE owner = %s", [began, owner]) == (True,):
                        break
            assert admitted == 41
        finally:
            await pool.close()

    asyncio.run(body())


def test_a_row_without_limits_is_not_listed(database_18: str) -> None:
    async def body(connection: Connection) -> None:
        await set_own_quota(connection, OwnQuota("a", max_priority=0))
        await set_own_quota(connection, OwnQuota("b"))
        assert await list_own_quotas(connection) == [OwnQuota("a", max_priority=0)]
        assert await read_own_quota(connection, "c") == OwnQuota("c")

    with_connection(database_18, body)


def test_the_command_sets_shows_and_unsets(database_18: str, tmp_path: Path) -> None:
    command = ("db", "limit", "--database-url", database_18)

    def limit(*options: str) -> str:
        return run_cli(*command, *options, cwd=tmp_path).expect(0).stdout

    assert "no owner has limits" in limit()
    shown = limit("alice", "--open-batches", "10", "--stored", "10GB", "--rpm", "600", "--max-priority", "0")
    assert "0 of 10 batches" in shown
    assert "0 B of 10.0 GB" in shown
    assert "at most 0" in shown
    changed = run_cli(*command, "alice", "--rpm", "default", "--stored", "0", "--json", cwd=tmp_path).expect(0).summary
    assert changed["own"] == {
        "owner": "alice",
        "max_open_batches": 10,
        "max_stored_bytes": 0,
        "requests_per_minute": None,
        "max_priority": 0,
    }
    assert changed["used"]["stored_bytes"] == 0
    assert "alice  max_open_batches=10" in limit()
    assert "0 (no limit) batches" in limit("alice", "--unset")
    assert "no owner has limits" in limit()
    run_cli(*command, "--rpm", "5", cwd=tmp_path).refuses(2, "whose limits")
    run_cli(*command, "alice", "--rpm", "5", "--unset", cwd=tmp_path).refuses(2, "--unset")
    assert "10GB" in run_cli(*command, "alice", "--stored", "much", cwd=tmp_path).expect(2).stderr

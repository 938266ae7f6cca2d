"""Checks of the work in the database: closed routes, workers, leases, work that no one has."""

from __future__ import annotations

from collections.abc import AsyncIterator

from penstock.batches.unserved import list_unserved
from penstock.db.pool import fetch_one
from penstock.observe.doctor.database import SQL
from penstock.observe.doctor.finding import Database, Finding, Installation, plural
from penstock.observe.logs import plain_code
from penstock.pools import provider_in
from penstock.worker.fuse import NOTHING_SUCCEEDED

_MEND_KEY = "Mend the key or the quota"
_MEND_CALLS = "Every call failed alike: check --base-url, the model's name or the function"


async def check_gates(_: Installation, database: Database) -> AsyncIterator[Finding]:
    gates = await (await database.connection.execute(SQL["list_closed_gates"])).fetchall()
    for pool, route, halted, code, wait_s in gates:
        # The upstream's message is left out: it may quote a request.
        if halted:
            name = provider_in(pool)
            again = "run the same command again" if name is None else f"penstock providers resume {name}"
            seen = f"route {route} of {pool} is halted for every owner: {plain_code(code)}"
            mend = _MEND_CALLS if code == NOTHING_SUCCEEDED else _MEND_KEY
            yield Finding("routes", "problem", seen, f"{mend}, then: {again}")
        else:
            seen = f"route {route} of {pool} waits {wait_s:,.0f} s more: {plain_code(code)}"
            yield Finding("routes", "warning", seen, "Nothing: it opens by itself. The upstream asked for it.")
    if not gates:
        yield Finding("routes", "ok", "none closed")


async def check_workers(installation: Installation, database: Database) -> AsyncIterator[Finding]:
    grace_s = installation.config.liveness.heartbeat_grace_s
    row = await fetch_one(database.connection, SQL["count_workers"], {"grace_s": grace_s})
    if row is None:
        return
    alive, silent, leases, items = row
    seen = f"{alive} alive"
    if silent:
        seen += f", {silent} silent for more than {grace_s:g} s"
        remedy = "Look at its machine. A worker that runs removes it and takes its work back within seconds."
        yield Finding("workers", "warning", seen, remedy)
    else:
        yield Finding("workers", "ok", seen)
    if leases:
        seen = f"{plural(items, 'item')} on {plural(leases, 'lease')} of workers that are gone"
        remedy = (
            "Any running worker takes them back: start one (penstock serve, penstock worker, or the same run again)."
        )
        yield Finding("leases", "warning", seen, remedy)
    else:
        yield Finding("leases", "ok", "all held by living workers")


async def check_unserved(installation: Installation, database: Database) -> AsyncIterator[Finding]:
    unserved = await list_unserved(database.connection, [], installation.config.liveness.heartbeat_grace_s)
    for pool, routes in unserved.items():
        named = " ".join(routes[:5])
        remedy = f"Start `penstock serve` or `penstock worker` with the provider '{provider_in(pool)}'."
        yield Finding("pending work", "problem", f"work of {pool} waits and no worker is alive: {named}", remedy)
    if not unserved:
        yield Finding("pending work", "ok", "none without a worker")


CHECKS = (("routes", check_gates), ("workers", check_workers), ("pending work", check_unserved))

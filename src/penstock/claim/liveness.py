"""Liveness of workers: registration, progress on leases, and reclaims from lost workers."""

from __future__ import annotations

import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from uuid import UUID

import psutil

from penstock.claim.claim import as_lease
from penstock.config import LivenessLimits
from penstock.db import sql
from penstock.db.pool import Connection, Now
from penstock.model import Lease

_SQL = sql.load("penstock.claim", "claim.sql")

_RECLAIM_LIMIT = 500


@cache
def machine() -> str:
    """Name of this machine since its last boot, with the process's pid namespace: two processes with the same name can
    look each other up by pid."""
    try:
        space = str(Path("/proc/self/ns/pid").readlink())
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        space, boot = "", str(int(psutil.boot_time()))
    return f"{socket.gethostname()} {boot} {space}".strip()


@dataclass(frozen=True, slots=True)
class Reclaimed:
    leases: int
    ordinals: int
    given_up: list[Lease]
    """Leases of the caller on items that were lost too often to be run again."""


async def register(connection: Connection, worker_id: UUID, pool: str, *, now: Now = None) -> None:
    """Register this process as a worker, before its first claim."""
    process = psutil.Process()
    await connection.execute(
        _SQL["register_worker"],
        {
            "id": worker_id,
            "pool": pool,
            "host": socket.gethostname(),
            "machine": machine(),
            "pid": process.pid,
            "pid_birth": process.create_time(),
            "now": now,
        },
    )


async def unregister(connection: Connection, worker_id: UUID) -> None:
    await connection.execute(_SQL["remove_worker"], {"id": worker_id})


async def is_any_registered(connection: Connection, pids: Collection[int]) -> bool:
    """Whether any of these processes of this machine is registered as a worker."""
    cursor = await connection.execute(_SQL["list_workers"], {"machine": machine()})
    return any(pid in pids and _is_running(pid, birth) for _, pid, birth in await cursor.fetchall())


async def list_exited_workers(connection: Connection) -> list[UUID]:
    """List workers registered from this machine whose process no longer exists. The grace need not be waited out for
    them: the kernel says that they are dead."""
    cursor = await connection.execute(_SQL["list_workers"], {"machine": machine()})
    return [worker_id for worker_id, pid, birth in await cursor.fetchall() if not _is_running(pid, birth)]


def _is_running(pid: int, birth: float) -> bool:
    try:
        process = psutil.Process(pid)
        # Creation times are read from the kernel with a clock tick's precision.
        return abs(process.create_time() - birth) < 1 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


async def reclaim(
    connection: Connection,
    worker_id: UUID,
    limits: LivenessLimits,
    *,
    stuck_s: float,
    gone: Sequence[UUID] = (),
    look_for_stuck: bool = True,
    now: Now = None,
) -> Reclaimed:
    """Take back the leases of lost workers. Items that are given up come back on leases of `worker_id`, to be failed.

    Looking for stuck leases, which make no progress, takes reading all leases.
    """
    future = {"look_for_stuck": look_for_stuck, "limit": _RECLAIM_LIMIT, "now": now}
    await connection.execute(_SQL["clamp_future_times"], future)
    silent = {"grace_s": limits.heartbeat_grace_s, "gone": list(gone), "now": now}
    cursor = await connection.execute(
        _SQL["reclaim_if_lost"],
        {
            **silent,
            "worker": worker_id,
            "stuck_s": stuck_s,
            "look_for_stuck": look_for_stuck,
            "action": limits.reclaim_action,
            "max_reclaims": limits.max_reclaims,
            "limit": _RECLAIM_LIMIT,
        },
    )
    rows = await cursor.fetchall()
    await connection.execute(_SQL["remove_silent_workers"], silent)
    _, leases, ordinals = rows[0][:3]
    return Reclaimed(leases, ordinals, [as_lease(row[3:]) for row in rows if row[3] is not None])


async def report_progress(
    connection: Connection, worker_id: UUID, leases: Sequence[Lease], *, now: Now = None
) -> set[int]:
    """Report progress on leases whose items this worker still holds; returns the nonces of those that it has lost."""
    if not leases:
        return set()
    ids, nonces = [lease.id for lease in leases], [lease.nonce for lease in leases]
    parameters = {"worker": worker_id, "leases": ids, "nonces": nonces, "now": now}
    cursor = await connection.execute(_SQL["report_progress"], parameters)
    return set(nonces) - {nonce for (nonce,) in await cursor.fetchall()}

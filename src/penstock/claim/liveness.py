"""Who is alive: registration, heartbeats, and taking back what the dead held."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from uuid import UUID

import psutil

from penstock.db import sql
from penstock.db.pool import Connection, Now

_SQL = sql.load("penstock.claim", "claim.sql")

_RECLAIM_LIMIT = 1_000


@cache
def machine() -> str:
    """Names this machine since its last boot, and this process's view of its process ids: two processes with the
    same name can look each other up by pid."""
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


async def register(connection: Connection, worker_id: UUID, pool: str, *, now: Now = None) -> None:
    """Announce this process; before its first claim."""
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


async def heartbeat(connection: Connection, worker_id: UUID, *, draining: bool = False, now: Now = None) -> bool:
    """Check in. False: this worker was declared dead and must take a new id."""
    cursor = await connection.execute(
        _SQL["heartbeat_if_known"], {"id": worker_id, "draining": draining, "now": now}
    )
    return await cursor.fetchone() is not None


async def unregister(connection: Connection, worker_id: UUID) -> None:
    await connection.execute(_SQL["remove_worker"], {"id": worker_id})


async def gone_from_here(connection: Connection) -> list[UUID]:
    """Workers registered from this machine whose process no longer exists. For them nobody needs to wait out the
    grace: the kernel says they are dead."""
    cursor = await connection.execute(_SQL["list_workers"])
    here = machine()
    return [
        worker_id
        for worker_id, where, pid, birth in await cursor.fetchall()
        if where == here and not _is_running(pid, birth)
    ]


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
    connection: Connection, *, grace_s: float, gone: list[UUID] | None = None, now: Now = None
) -> Reclaimed:
    """Take back the leases of workers that are silent past the grace, and of those known to be gone."""
    silent = {"grace_s": grace_s, "gone": gone or [], "now": now}
    leases = ordinals = 0
    while True:
        cursor = await connection.execute(_SQL["reclaim_if_silent"], {**silent, "limit": _RECLAIM_LIMIT})
        row = await cursor.fetchone()
        if row is None:
            raise AssertionError("reclaim_if_silent always answers one row")
        leases, ordinals = leases + row[0], ordinals + row[1]
        if row[0] < _RECLAIM_LIMIT:
            break
    await connection.execute(_SQL["remove_silent_workers"], silent)
    return Reclaimed(leases, ordinals)

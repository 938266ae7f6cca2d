"""Room on the disk of the data directory that is kept for deletions, and for revoking keys.

PostgreSQL writes also when it deletes: on a disk that is full to the last page, nothing could be deleted to make room.
So a file takes some room from the start, and is removed when a deletion finds none, or the server none to start with
(`keeper.py`). Uploads end before that: they are not taken while there is less than `min_free_bytes`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import psycopg

from penstock.config import Config
from penstock.db.embedded.cluster import RESERVE

_T = TypeVar("_T")

_RESERVE_BYTES = 32 * 1024 * 1024
"""A segment of PostgreSQL's log of changes, which it makes whole, and as much for all else that it writes."""


def has_room(config: Config) -> bool:
    """Whether the embedded database has room on its disk for uploads; a configured database is not checked."""
    if config.database_url is not None:
        return True
    try:
        return shutil.disk_usage(config.data_dir).free >= config.observe.min_free_bytes
    except OSError:
        return False


def keep_reserve(data_dir: Path, min_free_bytes: int) -> None:
    """Take the room, unless that was done or there is too little."""
    path = data_dir / RESERVE
    if path.exists() or shutil.disk_usage(data_dir).free < min_free_bytes + 2 * _RESERVE_BYTES:
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, _RESERVE_BYTES)
    except OSError:  # others were faster
        path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


async def do_with_reserve(data_dir: Path, free: Callable[[], Awaitable[_T]]) -> _T:
    """Do something that frees room, once more with the room that is kept for it if there is no other."""
    try:
        return await free()
    except psycopg.errors.DiskFull:
        (data_dir / RESERVE).unlink(missing_ok=True)  # without it, another may just have been given it
        return await free()

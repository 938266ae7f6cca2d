"""Checks of the machine: disk, open files, memory."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from penstock.config import GIB, MIB
from penstock.observe.doctor.finding import Finding, Installation

# A Python process with everything imported, and its answers being read.
_PROCESS_BYTES = 128 * MIB
# Log files, listening sockets, pipes to worker processes.
_OTHER_FILES = 64
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def check_disk(installation: Installation) -> Iterator[Finding]:
    """Room of the embedded database, and of temporary files."""
    config = installation.config
    if config.database_url is None:
        yield _check_data_dir(config.data_dir, config.observe.min_free_bytes, config.intake.max_upload_bytes)
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if free < config.observe.min_free_bytes:
        yield Finding(
            "temporary files",
            "problem",
            f"{_size(free)} free in {folder}",
            "Make room there, or point TMPDIR elsewhere: sheets and custom_ids are kept there for a while.",
        )


def _check_data_dir(data_dir: Path, least: int, upload: int) -> Finding:
    place = next(folder for folder in (data_dir.absolute(), *data_dir.absolute().parents) if os.access(folder, os.F_OK))
    free = shutil.disk_usage(place).free
    seen = f"{_size(free)} free for {data_dir}"
    if free < least:
        remedy = f"Make room: below {_size(least)} (min_free_bytes) a server is not ready."
        return Finding("disk", "problem", seen, remedy)
    # A file is kept as it came, and its rows.
    if free < 2 * upload:
        remedy = "Make room, or lower max_upload_bytes: a file is stored as it came, and as rows."
        return Finding("disk", "warning", f"{seen}; an upload of {_size(upload)} would not fit", remedy)
    return Finding("disk", "ok", seen)


def check_open_files(installation: Installation) -> Iterator[Finding]:
    """Limit of open files. A server raises its own to the hard limit."""
    config, (_, most) = installation.config, resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        yield Finding("open files", "ok", "unlimited")
        return
    calls = max(1, len(installation.providers)) * config.dispatch.concurrency
    least = calls + installation.connections + _OTHER_FILES
    wanted = least + config.serve.max_connections
    seen = f"at most {most:,} a process (ulimit -Hn)"
    remedy = "Raise LimitNOFILE= of the service (systemd), nofile in limits.conf, or --ulimit nofile of the container"
    if most < least:
        why = f"{seen}; {calls:,} calls at a time and the database connections need {least:,}"
        yield Finding("open files", "problem", why, f"{remedy}; or lower concurrency.")
    elif most < wanted:
        why = f"{seen}; with {config.serve.max_connections:,} clients (max_connections) {wanted:,} are needed"
        yield Finding("open files", "warning", why, f"{remedy}; or lower max_connections.")
    else:
        yield Finding("open files", "ok", seen)


def check_memory(installation: Installation) -> Iterator[Finding]:
    """Memory of the machine or the container, against what the settings allow the processes to hold."""
    config, machine = installation.config, psutil.virtual_memory()
    total, limit = machine.total, "the machine has"
    for told, name in _memory_limits():
        if told < total:
            total, limit = told, f"{name} allows"
    each = _PROCESS_BYTES + config.claim.ready_max_bytes + config.settle.settle_capacity_bytes
    needed = _PROCESS_BYTES + installation.workers * each
    seen = f"{limit} {_size(total)}, {_size(machine.available)} are free; settings allow up to {_size(needed)}"
    remedy = "Fewer worker processes, or lower ready_max_bytes and settle_capacity_bytes."
    if needed > total:
        yield Finding("memory", "problem", seen, remedy)
    elif needed > min(total, machine.available):
        yield Finding("memory", "warning", seen, remedy)
    else:
        yield Finding("memory", "ok", seen)


def _memory_limits() -> Iterator[tuple[int, str]]:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        yield soft, "ulimit -v"
    for path in _CGROUP_LIMITS:
        try:
            yield int(Path(path).read_text("ascii")), "the control group"
        except (OSError, ValueError):  # not there, or "max"
            continue


def _size(count: int) -> str:
    return f"{count / GIB:,.1f} GiB" if count >= GIB else f"{count / MIB:,.0f} MiB"


CHECKS = (check_disk, check_open_files, check_memory)

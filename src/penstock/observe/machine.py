"""The machine as it is now: memory, and how late the event loop is."""

from __future__ import annotations

from pathlib import Path

import psutil

from penstock.adapt.pressure import Figures

_CGROUP = Path("/sys/fs/cgroup")


def read_figures(*, loop_lag_s: float, cgroup: Path = _CGROUP) -> Figures:
    """Read the figures by which claims are made smaller. A control group without a limit has none."""
    memory = psutil.virtual_memory()
    limit = _read_bytes(cgroup / "memory.max")
    used = _read_bytes(cgroup / "memory.current") if limit is not None else None
    if used is None:
        limit = None
    return Figures(memory.available, memory.total, limit, used or 0, max(0.0, loop_lag_s))


def _read_bytes(path: Path) -> int | None:
    try:
        return int(path.read_text("ascii"))
    except (OSError, ValueError):  # not there, or "max"
        return None

"""Disks that a test may fill: small file systems in a mount namespace of its own, gone with it.

Root may make one, and so may anybody whose kernel grants user namespaces; a container needs `--cap-add SYS_ADMIN`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path

from tests.support.thorough import as_thorough

MIB = 1024 * 1024

_ROOT = Path(__file__).parents[2]
_INSIDE = "MOUNTS_OF_ITS_OWN"


def mounting(test: Callable[[Path], None]) -> Callable[[Path], None]:
    """Have a test run where it may mount, and where nobody else sees what it mounts."""

    @wraps(test)
    def run(tmp_path: Path) -> None:
        if _INSIDE in os.environ:
            test(tmp_path)
            return
        this = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
        pytest_once = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'in'}"]
        done = subprocess.run(
            [*_unshare(), *pytest_once, *as_thorough(), this],
            cwd=_ROOT,
            env={**os.environ, _INSIDE: "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    return run


def in_a_mount_namespace() -> int | None:
    """Run this program once more where it may mount, and return its exit code; None where it may already."""
    if _INSIDE in os.environ:
        return None
    command = [*_unshare(), *sys.orig_argv]
    return subprocess.run(command, env={**os.environ, _INSIDE: "1"}, check=False).returncode


def _unshare() -> list[str]:
    namespace = ["unshare", "--mount"]
    if subprocess.run([*namespace, "true"], check=False, capture_output=True).returncode != 0:
        namespace.append("--map-root-user")
    return namespace


@dataclass(frozen=True, slots=True)
class Disk:
    """A file system that can be filled to the last page."""

    path: Path

    @property
    def _ballast(self) -> Path:
        return self.path / "ballast"

    def fill(self) -> None:
        with self._ballast.open("ab", buffering=0) as ballast:
            for size in (MIB, 4_096):
                with suppress(OSError):
                    while ballast.write(bytes(size)) == size:
                        pass

    def leave(self, size_bytes: int) -> None:
        """Fill all but so much of it."""
        found = os.statvfs(self.path)
        with self._ballast.open("ab", buffering=0) as ballast:
            for _ in range(max(0, found.f_bavail * found.f_frsize - size_bytes) // MIB):
                ballast.write(bytes(MIB))

    def make_room(self) -> None:
        self._ballast.unlink()

    def unmount(self) -> None:
        """Leave an empty folder in its place, whoever still has files open there."""
        subprocess.run(["umount", "--lazy", self.path], check=True)


def disk(path: Path, size_bytes: int) -> Disk:
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=0755", "tmpfs", path], check=True)
    return Disk(path)

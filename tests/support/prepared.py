"""Data directories with a PostgreSQL that was made before: it is copied in a tenth of the time that initdb takes.

prepared(tmp_path / "data")
with postgres.acquire(tmp_path / "data"): ...
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from penstock.db.embedded.cluster import PGDATA, Cluster
from penstock.db.embedded.postgres import bundled_bin_dir

# Processes die in these tests, machines do not.
_SETTINGS = "fsync = off\nfull_page_writes = off\n"


class Prepared:
    """A new cluster, never started, and copies of it for those who ask."""

    def __init__(self, directory: Path) -> None:
        cluster = Cluster(str(directory), str(bundled_bin_dir()))
        cluster.make()
        self._pgdata = directory / PGDATA
        with (self._pgdata / "postgresql.conf").open("a") as settings:
            settings.write(_SETTINGS)

    def __call__(self, data_dir: Path) -> Path:
        """The data directory, which may be there already, with the cluster in it."""
        data_dir.mkdir(parents=True, exist_ok=True)
        # With owners and modes: the server may run as another user.
        subprocess.run(["cp", "-a", str(self._pgdata), str(data_dir / PGDATA)], check=True)
        return data_dir

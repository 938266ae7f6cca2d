"""Disks run full under an import: a clear error, nothing half imported, and the same command goes on."""

from __future__ import annotations

from pathlib import Path

import psycopg

from penstock.db.embedded import postgres
from tests.faults.test_disk_full import served
from tests.support.cli import ask
from tests.support.disks import MIB, mounting
from tests.support.eager import eager_database
from tests.support.moving import bring, check_whole


@mounting
def test_tables_cannot_grow_while_files_and_batches_are_imported(tmp_path: Path) -> None:
    with (
        postgres.acquire(tmp_path / "old") as old,
        eager_database(old.conninfo, batches=10, lines=1_000, padding=1_000) as eager,
        served(tmp_path) as new,
        psycopg.connect(new.conninfo, autocommit=True) as looking,
    ):
        new.data.leave(6 * MIB)
        done = bring(eager, new.conninfo, tmp_path)
        done.refuses(1, "No space left on device", "Nothing is half imported", "the same command goes on")
        new.data.make_room()
        imported = ask(looking, "SELECT count(*) FROM penstock.imports")
        assert imported < 16
        whole = "SELECT count(DISTINCT source_id) FROM penstock.templates"
        assert ask(looking, whole) == ask(looking, "SELECT count(*) FROM penstock.imports WHERE kind = 'file'")
        bring(eager, new.conninfo, tmp_path, "--verify").expect(0)
        check_whole(new.conninfo)
        assert "PANIC" not in new.said()

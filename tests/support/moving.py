"""`penstock import` as it is run, and what is to be true of what it brought."""

from __future__ import annotations

import asyncio
from pathlib import Path
from uuid import UUID

import psycopg

from penstock.batches.read import read_status
from penstock.export.read import Which, output_blocks
from penstock.model import BatchState
from tests.support.cli import Finished, check_agreement, run_cli
from tests.support.db import pooled
from tests.support.eager import Eager, expected_results

DEADLINE_S = 1_800.0


def bring(eager: Eager, database: str, cwd: Path, *options: str | Path) -> Finished:
    """Import a source."""
    return run_cli(
        *("import", "--from", eager.conninfo, "--database-url", database, "--json", *options),
        cwd=cwd,
        deadline_s=DEADLINE_S,
    )


def hand_back(eager: Eager, database: str, cwd: Path, *options: str) -> Finished:
    """Hand back to the same database."""
    return run_cli(
        *("import", "--back", "--to", eager.conninfo, "--database-url", database, "--json", *options),
        cwd=cwd,
        deadline_s=DEADLINE_S,
    )


def results_of(database: str, batch_id: UUID) -> tuple[bytes, bytes]:
    """Output and error file of a batch that has ended, but for the lines that were never run."""

    async def read() -> tuple[bytes, bytes]:
        async with pooled(database) as pool:
            async with pool.connection() as connection:
                state = (await read_status(connection, batch_id)).state
            found: list[bytes] = []
            kinds: tuple[Which, ...] = ("output", "errors")
            for which in kinds:
                blocks = [block async for block in output_blocks(pool, batch_id, which, state, "openai")]
                lines = b"".join(blocks).split(b"\n")[:-1]
                found.append(b"".join(line + b"\n" for line in lines if b'"batch_cancelled"' not in line))
            return found[0], found[1]

    return asyncio.run(read())


def state_of(database: str, batch_id: UUID) -> BatchState:
    async def read() -> BatchState:
        async with pooled(database) as pool, pool.connection() as connection:
            return (await read_status(connection, batch_id)).state

    return asyncio.run(read())


def check_results(eager: Eager, database: str, kinds: tuple[str, ...]) -> int:
    """Result files are to the byte what the old rows say, and as long as is told. Returns how many batches."""
    batches = [batch_id for kind in kinds for batch_id in eager.batches(kind)]
    for batch_id in batches:
        output, errors = results_of(database, batch_id)
        expected = expected_results(eager, batch_id)
        assert without_skipped(errors) == expected[1], batch_id
        assert output == expected[0], batch_id
        with psycopg.connect(database) as connection:
            told = connection.execute(
                "SELECT output_bytes, error_bytes FROM penstock.batches WHERE id = %s", (batch_id,)
            ).fetchall()
        assert told == [(len(output), len(errors))]
    return len(batches)


def without_skipped(errors: bytes) -> bytes:
    """Error lines without those of requests that the old system never ran."""
    never = (b'"error":{"code":"cancelled"', b'"error":{"code":"not_imported"')
    return b"".join(line + b"\n" for line in errors.split(b"\n")[:-1] if not any(code in line for code in never))


def check_whole(database: str) -> None:
    """Everything adds up, nothing is half there, and no key of the old system came along."""
    with psycopg.connect(database, autocommit=True) as connection:
        check_agreement(connection)
        loose = connection.execute(
            "SELECT (SELECT count(*) FROM penstock.templates t"
            "         WHERE NOT EXISTS (SELECT FROM penstock.files f WHERE f.source_id = t.source_id)),"
            "       (SELECT count(*) FROM penstock.outcomes o"
            "         WHERE NOT EXISTS (SELECT FROM penstock.lanes l WHERE l.id = o.lane_id)),"
            "       (SELECT count(*) FROM penstock.deferrals d"
            "         WHERE NOT EXISTS (SELECT FROM penstock.batches b WHERE b.id = d.batch_id)),"
            "       (SELECT count(*) FROM penstock.journal j"
            "         WHERE NOT EXISTS (SELECT FROM penstock.batches b WHERE b.id = j.batch_id)),"
            "       (SELECT count(*) FROM penstock.files f WHERE f.state <> 'ready'),"
            "       (SELECT count(*) FROM penstock.templates t WHERE encode(t.body, 'escape') LIKE '%sk-secret%')"
        ).fetchall()
    assert loose == [(0, 0, 0, 0, 0, 0)]

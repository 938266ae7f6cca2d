"""Runs that a command goes on with: one over the same content, or over the beginning of a file that has grown."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from uuid import UUID

from penstock.batches.create import KnownBatch, find_batch_by_key, release_key
from penstock.batches.finish import finish_batch
from penstock.batches.read import Batch, read_status
from penstock.batches.run_again import retry_batch, worn_out_message
from penstock.batches.runs import CONTINUES, ROWS_DIGEST, Beginning, RunAlike, run_pool, take_up_run
from penstock.batches.steer import cancel_batch, resume_batch
from penstock.claim import gates
from penstock.cli.plan import Plan
from penstock.cli.tables import OWNER, RowsPlan
from penstock.config import Config
from penstock.db.pool import Connection
from penstock.errors import PenstockError, UsageError
from penstock.intake.tables.table import RowsDigest, next_block
from penstock.model import BatchState, parse_id, public_id
from penstock.worker.fuse import NOTHING_SUCCEEDED

_BLOCK_BYTES = 1 << 20

Say = Callable[[str], None]


def public_name(batch: Batch) -> str:
    """Id of a run's batch, as every other command takes it."""
    return public_id("job" if batch.dialect == "job" else "batch", batch.id)


async def find_run(connection: Connection, plan: Plan, digest: bytes) -> KnownBatch | None:
    """Find the run over this content; also one that an earlier release stored."""
    known = await find_batch_by_key(connection, OWNER, plan.key(digest))
    if known is not None:
        return known
    former = await find_batch_by_key(connection, OWNER, plan.former_key)
    return former if former is not None and former.digest == digest else None


async def read_chain(connection: Connection, batch_id: UUID) -> list[Batch]:
    """Read the batches whose results make up a run's: those over the beginning of its file first."""
    chain = [await read_status(connection, batch_id)]
    while (before := _continued(name := chain[0].metadata.get(CONTINUES, ""))) is not None:
        try:
            chain.insert(0, await read_status(connection, before))
        except PenstockError:
            raise PenstockError(
                f"{public_name(chain[0])} continues {name}, which was removed with its results",
                hint="--new runs the whole file.",
            ) from None
    return chain


def _continued(name: str) -> UUID | None:
    return parse_id("batch", name) or parse_id("job", name)


async def end_chain(connection: Connection, chain: Sequence[Batch]) -> None:
    """End a run, so that its command starts over. Results stay, under the ids of its batches."""
    await release_key(connection, chain[-1].id)
    for batch in chain:
        await cancel_batch(connection, batch.id)
        await finish_batch(connection, batch.id)


def missed(batch: Batch) -> int:
    """Requests that a run can be asked to try again."""
    counts = batch.counts
    return counts.failed + counts.not_found + counts.cancelled + counts.expired


def has_work(plan: Plan, batch: Batch) -> bool:
    """Whether there may be anything to call for a batch, as the plan asks."""
    return not batch.state.terminal or (plan.retry_failed and missed(batch) > 0)


async def take_up(connection: Connection, plan: Plan, config: Config, batch: Batch, key: str | None, say: Say) -> None:
    """Go on with a batch as the command asks, from now on under this key if one is given."""
    # A batch with nothing left to call keeps the target that its results are of.
    target = str(plan.target) if has_work(plan, batch) else batch.target or str(plan.target)
    await take_up_run(connection, batch.id, key=key, target=target, window=plan.deadline)
    name, failed = public_name(batch), missed(batch)
    halted = await gates.list_closed(connection, run_pool(batch.id))
    hopeless = any(gate.code == NOTHING_SUCCEEDED for gate in halted) and config.retry.stop_after_failures > 0
    again = 0
    if failed and (plan.retry_failed or hopeless):
        retried = await retry_batch(connection, batch.id, OWNER, limits=config.retry)
        again = retried.requests
        if retried.worn_out:
            say(worn_out_message(retried.worn_out, config.retry.max_attempts_lifetime))
    if batch.state.terminal and not again:
        if key is not None or failed:
            say(f"{name} is {batch.state}: writing its results again ({_other_ways(plan, failed)})")
            if target != str(plan.target):
                say(f"they are the answers of {target}; --new asks {plan.target}")
        return
    if batch.state is BatchState.CANCELLING:
        raise PenstockError(f"{name} is being cancelled", hint="--new starts over.")
    say(f"going on with {name}" + (f": {again:,} that failed are run again" if again else ""))
    if batch.target is not None and batch.target != str(plan.target):
        say(f"it was begun with {batch.target}; what is left goes to {plan.target}")
    # Running the command again says that the cause of the pause is gone.
    await gates.reopen(connection, run_pool(batch.id), wait_max_s=config.retry.retry_after_max_s)
    await resume_batch(connection, batch.id)


def _other_ways(plan: Plan, failed: int) -> str:
    if not failed:
        return "--new starts over"
    if plan.retry_failed:
        return "nothing of it can be run again; --new starts over"
    return f"--retry-failed runs the {failed:,} that failed again, --new starts over"


# -- files that have grown


def find_beginning(path: Path, runs: Sequence[RunAlike], should_stop: Callable[[], bool]) -> Beginning | None:
    """The longest beginning of the file that one of these runs is over; it ends where a line ends."""
    size = path.stat().st_size
    shorter = sorted((run for run in runs if 0 < run.input_bytes < size), key=lambda run: run.input_bytes)
    found, digest, read, lines, last = None, hashlib.sha256(), 0, 0, b""
    with path.open("rb") as file:
        for run in shorter:
            while read < run.input_bytes and not should_stop():
                block = file.read(min(_BLOCK_BYTES, run.input_bytes - read))
                digest.update(block)
                read, lines, last = read + len(block), lines + block.count(b"\n"), block[-1:]
            at_line_end = last == b"\n" or file.peek(1)[:1] in (b"\n", b"\r")
            if at_line_end and run.key.endswith(f":{digest.hexdigest()}"):
                found = Beginning(run, lines)
    return found


def find_first_rows(
    rows: RowsPlan, config: Config, runs: Sequence[RunAlike], should_stop: Callable[[], bool]
) -> Beginning | None:
    """The longest beginning of a table's rows that one of these runs is over. Rows are compared, not bytes: a workbook
    that grew, or was only saved again, is another file from its first byte on."""
    most = rows.limit or sys.maxsize
    shorter = sorted((run for run in runs if 0 < run.rows <= most), key=lambda run: run.rows)
    if not shorter:
        return None
    found, digest = None, RowsDigest()
    with rows.source.open(rows.spec, config.tables, config.intake) as table:
        read = islice(table.rows(), rows.limit)
        for run in shorter:
            while digest.count < run.rows and (block := next_block(read, run.rows - digest.count)):
                if should_stop():
                    return None
                digest.add(block)
            if digest.count == run.rows and digest.hex == run.metadata[ROWS_DIGEST]:
                found = Beginning(run, run.rows)
        is_all = found is not None and found.lines == digest.count and next(read, None) is None
    return found if found is None else replace(found, is_all=is_all)


def offer_continuation(plan: Plan, chain: Sequence[Batch]) -> UsageError:
    """Refuse to pay for the beginning of a file twice, unless that is asked for."""
    settled, total = (sum(getattr(batch.counts, name) for batch in chain) for name in ("settled", "total"))
    every = "line" if plan.rows is None else "row"
    return UsageError(
        f"{plan.input} has grown since {public_name(chain[-1])}, which has {settled:,} of its first {total:,} results",
        hint=f"--continue calls what is new alone and writes all answers; --new calls every {every} of it.",
    )

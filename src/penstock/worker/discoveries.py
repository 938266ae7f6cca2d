"""Discoveries: rows that processors add to their own jobs, stored with the results of the items that found them.

One transaction locks the job and the leases, stores the rows that have new keys, and settles. So a job whose last item
finds more cannot end in between, and an item that was taken back adds nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from penstock.batches import growth
from penstock.batches.growth import Growing, NewInput, NotGrowing
from penstock.config import TableLimits
from penstock.db.pool import Connection
from penstock.intake.tables.jsonl_table import build_row
from penstock.intake.tables.table import RowFault
from penstock.model import ROWS, Lease, NewRow, Outcome, OutcomeState
from penstock.settle.write import Changes, Settled, find_held, settle

_log = logging.getLogger("penstock.worker")


@dataclass(slots=True)
class _Job:
    """A job that this transaction has locked, with the rows to be added to it."""

    growing: Growing
    place: tuple[str, str]
    """Route and endpoint of its lane."""
    discovered: int
    columns: list[str]
    known: set[str]
    """Keys that rows have already, among those found now."""
    new_columns: list[str] = field(default_factory=list)
    inputs: list[NewInput] = field(default_factory=list)

    def add(self, rows: Sequence[NewRow], limits: TableLimits) -> None:
        """Add rows of new keys, all or none. Raises RowFault."""
        fresh: dict[str, NewRow] = {}
        for new in rows:
            if new.key not in self.known:
                fresh.setdefault(new.key, new)
        if self.discovered + len(self.inputs) + len(fresh) > limits.max_discovered_rows:
            reason = f"the job has {limits.max_discovered_rows:,} rows that were added to it (max_discovered_rows)"
            raise RowFault("", reason, "")
        inputs: list[NewInput] = []
        columns = dict.fromkeys((*self.columns, *self.new_columns))
        for key, new in fresh.items():
            body, summary, names = build_row(new.row, limits)
            inputs.append(NewInput(*self.place, key, body, summary))
            columns |= dict.fromkeys(names)
        if len(columns) > limits.max_columns:
            raise RowFault("", f"more than {limits.max_columns:,} columns (max_columns)", "")
        self.known.update(fresh)
        self.inputs += inputs
        self.new_columns = list(columns)[len(self.columns) :]


class Discoveries:
    """Settles results together with the rows that they add to their jobs."""

    def __init__(self, limits: TableLimits) -> None:
        self._limits = limits

    async def settle(self, connection: Connection, worker_id: UUID, changes: Changes, *, notify: bool) -> Settled:
        """Write the changes and their rows, in one transaction. An item whose rows cannot be taken fails."""
        changes.prefer_decided()
        places = changes.discoverers
        found = [changes.outcomes[place] for place in places]
        async with connection.transaction():
            # In the order in which everybody locks: files and batches, leases, lanes.
            jobs = await _hold_jobs(connection, [(lease, outcome.discovered) for lease, _, _, _, outcome in found])
            items = [(lease, ordinal) for lease, ordinal, _, _, _ in found]
            held = await find_held(connection, worker_id, changes.leases, items)
            for number in sorted(held):
                lease, ordinal, line, custom_id, outcome = found[number]
                job = jobs.get(lease.batch_id)
                try:
                    if job is not None:
                        job.add(outcome.discovered, self._limits)
                except RowFault as fault:
                    changes.outcomes[places[number]] = (lease, ordinal, line, custom_id, _refuse(outcome, fault))
            settled = await settle(connection, worker_id, changes, notify=notify)
            for batch_id, job in jobs.items():
                if job.inputs:
                    await _store(connection, batch_id, job)
        return settled


def _refuse(outcome: Outcome, fault: RowFault) -> Outcome:
    where = f"column {fault.column}: " if fault.column else ""
    return Outcome(
        OutcomeState.FAILED,
        error_code="invalid_row",
        error_message=f"A row that it adds cannot be taken: {where}{fault.reason}.",
        duration_ms=outcome.duration_ms,
    )


async def _hold_jobs(connection: Connection, found: Iterable[tuple[Lease, Sequence[NewRow]]]) -> dict[UUID, _Job]:
    """Lock the jobs that rows are to be added to, without those that take none any more."""
    keys: dict[UUID, set[str]] = {}
    leases: dict[UUID, Lease] = {}
    for lease, rows in found:
        leases[lease.batch_id] = lease
        keys.setdefault(lease.batch_id, set()).update(new.key for new in rows)
    jobs: dict[UUID, _Job] = {}
    for batch_id in sorted(keys):
        try:
            growing = await growth.hold_growing(connection, batch_id, sealed_too=True)
        except NotGrowing:
            _log.info("%s is being cancelled: rows found in it are not added", batch_id)
            continue
        lane = leases[batch_id].source_lane
        place = next((place for place, (number, _) in growing.lanes.items() if number == lane), None)
        discovered = await growth.read_discovered(connection, batch_id, growing, keys[batch_id])
        if place is not None and place[1] == ROWS and discovered is not None:
            jobs[batch_id] = _Job(growing, place, *discovered)
    return jobs


async def _store(connection: Connection, batch_id: UUID, job: _Job) -> None:
    await growth.store_inputs(connection, job.growing, job.inputs)
    # The file's bytes are those of the upload: the rows add none.
    await growth.move_totals(connection, batch_id, job.growing, {job.place: len(job.inputs)}, 0)
    _, filled = job.growing.lanes[job.place]
    keys = [one.custom_id for one in job.inputs]
    await growth.count_discovered(connection, batch_id, job.growing, keys, filled, job.new_columns)

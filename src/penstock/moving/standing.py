"""Batches that were imported before: whether the source has anything new, and whether it may take their place."""

from __future__ import annotations

from enum import StrEnum
from uuid import UUID

from psycopg import Connection

from penstock.moving.ending import figures_of
from penstock.moving.source import SourceBatch
from penstock.moving.target import SQL


class Standing(StrEnum):
    """How a batch of the source stands to what is here."""

    NEW = "imported"
    SAME = "already here"
    REPLACED = "imported again"
    """The source had more to say, and Penstock had done nothing for it yet."""
    CONFLICT = "conflict"
    """The source had more to say, and Penstock has worked on it: its own word stands."""
    DELETED = "deleted here"
    GONE = "gone from the source"


def make_room(target: Connection, batch: SourceBatch) -> Standing:
    """Make room for a batch that is to be imported, or say why it is not. In the transaction that imports it."""
    known = target.execute(SQL["read_import"], {"id": batch.id}).fetchone()
    there = target.execute(SQL["hold_batch_if_there"], {"id": batch.id}).fetchone()
    if known is None:
        return Standing.NEW if there is None else Standing.CONFLICT
    figures, imported_at, handed_back_at = known
    if there is None or there[2]:
        return Standing.DELETED
    if figures == figures_of(batch) and handed_back_at is None:
        return Standing.SAME
    _, reruns, _ = there
    about = {"id": batch.id, "imported_at": imported_at}
    lanes = [lane for (lane,) in target.execute(SQL["hold_lanes"], about).fetchall()]
    ((held,),) = target.execute(SQL["has_leases"], about).fetchall()
    ((settled,),) = target.execute(SQL["has_settled_since"], about).fetchall()
    if held or ((settled or reruns) and handed_back_at is None):
        return Standing.CONFLICT
    _remove(target, batch.id, lanes)
    return Standing.REPLACED


def _remove(target: Connection, batch_id: UUID, lanes: list[int]) -> None:
    for name in ("remove_outcomes", "remove_attempts", "remove_reclaims"):
        target.execute(SQL[name], {"lanes": lanes})
    for name in ("remove_journal", "remove_samples", "remove_batch"):
        target.execute(SQL[name], {"id": batch_id})

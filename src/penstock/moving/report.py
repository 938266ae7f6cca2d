"""What a move did: per batch and in all, what it left behind and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from penstock.model import batch_public_id

Json = dict[str, Any]


@dataclass(slots=True)
class BatchLine:
    """One batch of the report."""

    id: UUID
    result: str
    state: str | None = None
    before: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)
    answer_bytes: int = 0
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> Json:
        return {
            "id": batch_public_id(self.id),
            "result": self.result,
            "state": self.state,
            "before": self.before,
            "after": self.after,
            "answer_bytes": self.answer_bytes,
            "notes": self.notes,
        }


@dataclass(slots=True)
class Report:
    """A move, as it is told at its end."""

    dry_run: bool = False
    files: Counter[str] = field(default_factory=Counter)
    """Files by what became of them, and their lines and bytes."""
    batches: list[BatchLine] = field(default_factory=list)
    left_behind: Counter[str] = field(default_factory=Counter)
    """What was left behind: how many, by what it is and why."""
    notes: Counter[str] = field(default_factory=Counter)
    verified: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)
    seconds: float = 0.0
    rows: int = 0

    @property
    def before(self) -> Counter[str]:
        return _sum(line.before for line in self.batches)

    @property
    def after(self) -> Counter[str]:
        return _sum(line.after for line in self.batches)

    @property
    def results(self) -> Counter[str]:
        return Counter(line.result for line in self.batches)

    def as_json(self) -> Json:
        return {
            "dry_run": self.dry_run,
            "files": dict(self.files),
            "batches": [line.as_json() for line in self.batches],
            "totals": {
                "batches": dict(self.results),
                "before": dict(self.before),
                "after": dict(self.after),
                "answer_bytes": sum(line.answer_bytes for line in self.batches),
            },
            "left_behind": [{"what": what, "count": count} for what, count in self.left_behind.items() if count],
            "notes": [{"what": what, "count": count} for what, count in self.notes.items() if count],
            "verified": dict(self.verified) if self.verified else None,
            "differences": self.differences,
            "rows": self.rows,
            "seconds": round(self.seconds, 3),
        }


def _sum(counts: Any) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return total

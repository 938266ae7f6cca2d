"""The state that an old batch is in, and what Penstock keeps of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from penstock.moving.source import SourceBatch

if TYPE_CHECKING:
    from penstock.moving.batch_import import Figures

_FROZEN = (
    *("completed", "failed", "not_found", "skipped", "retried", "output_bytes", "error_bytes"),
    *("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens"),
)


@dataclass(frozen=True, slots=True)
class Ending:
    """Whether and how a batch has ended."""

    state: str
    cancelling_at: datetime | None = None
    completed_at: datetime | None = None
    cancelled_at: datetime | None = None
    failed_at: datetime | None = None
    note: str | None = None
    """What of the source's word was not taken, and why."""

    @property
    def derives_rest(self) -> bool:
        """Whether requests without an answer are cancelled with their batch."""
        return self.state in ("cancelled", "cancelling")

    @property
    def runs_nothing(self) -> bool:
        """Whether nothing of it will be run any more."""
        return self.state != "in_progress"

    @property
    def ended_at(self) -> datetime | None:
        return self.completed_at or self.cancelled_at or self.failed_at

    @property
    def moments(self) -> dict[str, datetime | None]:
        return {
            "cancelling_at": self.cancelling_at,
            "completed_at": self.completed_at,
            "cancelled_at": self.cancelled_at,
            "failed_at": self.failed_at,
        }

    def deadline(self, batch: SourceBatch, extend: timedelta | None) -> datetime | None:
        """By when it must be done; None if it has all the time."""
        if self.state != "in_progress" or extend is None or batch.expires_at is None:
            return batch.expires_at
        return max(batch.expires_at, datetime.now(UTC) + extend)

    def frozen(self, figures: Figures) -> dict[str, int | None]:
        """The figures of a batch that has ended; of another, none."""
        ended = self.ended_at is not None
        return {f"f_{name}": getattr(figures, name, 0) if ended else None for name in _FROZEN}

    def notes(self, batch: SourceBatch, total: int) -> list[str]:
        """What a person should know of this batch."""
        found = [] if self.note is None else [self.note]
        if batch.total_requests is not None and batch.total_requests != total:
            found.append(f"the source says {batch.total_requests:,} requests and has {total:,}")
        if self.state == "in_progress" and batch.expires_at is not None and batch.expires_at <= datetime.now(UTC):
            found.append("its deadline has passed: without --extend it expires as soon as Penstock runs")
        return found


def ending_of(batch: SourceBatch, *, has_file: bool) -> Ending:
    """The state of a batch: what its times say, unless its requests say otherwise."""
    if batch.cancelled_at is not None:
        return Ending("cancelled", batch.cancelling_at or batch.cancelled_at, cancelled_at=batch.cancelled_at)
    if batch.failed_at is not None:
        return Ending("failed", batch.cancelling_at, failed_at=batch.failed_at)
    if batch.completed_at is not None and batch.open == 0:
        return Ending("completed", batch.cancelling_at, completed_at=batch.completed_at)
    if not has_file:
        # As when Penstock deletes the file of a batch that runs.
        now = datetime.now(UTC)
        note = "its file is gone: it is cancelled, with its answers kept" if batch.open else None
        return Ending("cancelled", batch.cancelling_at or now, cancelled_at=now, note=note)
    if batch.cancelling_at is not None:
        return Ending("cancelling", batch.cancelling_at)
    note = None
    if batch.completed_at is not None:
        note = f"it was said to be completed, and has {batch.open:,} requests to be run: it goes on"
    return Ending("in_progress", note=note)


def figures_of(batch: SourceBatch) -> dict[str, Any]:
    """What the source says of a batch: if it is the same the next time, there is nothing to bring."""
    moments = (batch.cancelling_at, batch.completed_at, batch.failed_at, batch.cancelled_at)
    return {**batch.before, "times": [None if at is None else at.isoformat() for at in moments]}


def metadata_of(value: Any) -> str:
    """Metadata as Penstock has it: texts by name. Other values are kept as their JSON."""
    if not isinstance(value, dict):
        value = {} if value is None else {"metadata": value}
    texts = {name: each if isinstance(each, str) else json.dumps(each) for name, each in value.items()}
    return json.dumps(texts)


def problems_of(ending: Ending) -> str | None:
    """Why a batch failed: the layout does not say."""
    if ending.state != "failed":
        return None
    message = "The batch had failed before it was imported."
    return json.dumps([{"code": "imported_failed", "line": None, "message": message, "param": None}])

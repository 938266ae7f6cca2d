"""Figures of a worker loop: claims and calls, for metrics and for the log."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from penstock.batches.lifecycle import log_started
from penstock.model import Again, Item, Lease, Verdict
from penstock.observe import catalogue
from penstock.observe.logs import RepeatedEvents, plain_code

_log = logging.getLogger("penstock.worker")
_SAID = "route %(route)s: %(count)d calls to be tried again: %(code)s"


class LoopFigures:
    """Counts what one worker loop does."""

    def __init__(self, pool: str) -> None:
        self._labels = catalogue.pool_labels(pool)
        self._calls = catalogue.CallCounts(pool)
        self._retries = RepeatedEvents(_log, logging.INFO, "retry", _SAID)

    def note_claim(self, leases: Sequence[Lease], seconds: float) -> None:
        size = sum(stop - start for lease in leases for start, stop in lease.ranges)
        catalogue.CLAIM_ITEMS.observe(self._labels, size)
        catalogue.CLAIM_DURATION.observe(self._labels, seconds)
        catalogue.note_latency(seconds)
        for lease in leases:
            if lease.begins_lane:
                log_started(lease.batch_id, lease.route)

    def note_call(self, item: Item, verdict: Verdict) -> None:
        self._calls.note(item.route, verdict)
        if isinstance(verdict, Again):
            self._retries.note(route=item.route, code=plain_code(verdict.error_code), charged=verdict.counts)

    def flush(self) -> None:
        """Log what has been gathered."""
        self._retries.flush()

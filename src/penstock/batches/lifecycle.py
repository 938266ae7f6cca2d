"""Log of batches from their creation to their end."""

from __future__ import annotations

import logging
from functools import lru_cache
from uuid import UUID

from penstock.observe.logs import event

_log = logging.getLogger("penstock.batches")


def log_created(batch_id: UUID, owner: str, kind: str) -> None:
    _log.info("batch %s created", batch_id, extra=event("batch_created", batch=batch_id, owner=owner, kind=kind))


def log_steered(batch_id: UUID, state: str) -> None:
    _log.info("batch %s %s", batch_id, state, extra=event(f"batch_{state}", batch=batch_id))


# An input that was given back uncalled is claimed again as if for the first time: a process says it once.
@lru_cache(maxsize=10_000)
def log_started(batch_id: UUID, route: str) -> None:
    """Log the first claim of a batch's work for a route."""
    fields = event("batch_started", batch=batch_id, route=route)
    _log.info("batch %s started on route %s", batch_id, route, extra=fields)


def log_ended(batch_id: UUID, state: str, total: int, counts: dict[str, int], duration_s: float) -> None:
    done = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    fields = event(f"batch_{state}", batch=batch_id, total=total, **counts, duration_s=round(duration_s, 3))
    said = done or "none run"
    _log.info("batch %s %s after %.1f s: %d requests, %s", batch_id, state, duration_s, total, said, extra=fields)


def log_failed(batch_id: UUID, codes: set[str], problems: int) -> None:
    """Log that a batch could not run. Messages of problems are left out: they quote the file."""
    text = " ".join(sorted(codes))
    fields = event("batch_failed", batch=batch_id, problems=problems, codes=text)
    _log.info("batch %s cannot run: %s", batch_id, text, extra=fields)

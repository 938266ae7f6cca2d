"""Fuse of a run: where nothing has ever succeeded, a few dozen failures of one kind halt the route.

A wrong path, a wrong model or a proxy that fails every call would otherwise cost every row all of its attempts.
"""

from __future__ import annotations

from collections import Counter

from penstock.model import Again, Halt, Outcome, OutcomeState, Verdict

NOTHING_SUCCEEDED = "nothing_succeeded"
"""Code of a gate that a fuse has closed."""
# Statuses of an upstream that does not serve this path, or does not have this model.
_WRONG_PLACE = (404, 405)


class Fuse:
    """Fuse of one worker, for each of its routes. The first result of a route takes its fuse out for good."""

    def __init__(self, stop_after: int) -> None:
        """`stop_after` failures of one kind halt a route."""
        self._stop_after = stop_after
        self._failures: dict[str, Counter[tuple[int | None, str]]] = {}
        self._sound: set[str] = set()

    def note(self, route: str, verdict: Verdict) -> Halt | None:
        """Note a verdict; returns why the route is to be halted now, or None.

        Calls that were not admitted say nothing of the requests: they do not count.
        """
        if route in self._sound:
            return None
        if isinstance(verdict, Outcome) and verdict.state is not OutcomeState.FAILED:
            self._sound.add(route)
            self._failures.pop(route, None)
            return None
        if isinstance(verdict, Halt) or (isinstance(verdict, Again) and not verdict.counts):
            return None
        kinds = self._failures.setdefault(route, Counter())
        kind = (verdict.status_code, verdict.error_code or "failed")
        kinds[kind] += 1
        if kinds[kind] < self._stop_after:
            return None
        del self._failures[route]
        said = verdict.error_message or ""
        if not said.startswith("HTTP "):
            said = f"{verdict.error_code}: {said}"
        check = " (check --base-url and the model's name)" if verdict.status_code in _WRONG_PLACE else ""
        message = f"nothing has succeeded yet, and {self._stop_after} calls failed alike{check}: {said}"
        return Halt(NOTHING_SUCCEEDED, message, verdict.status_code)

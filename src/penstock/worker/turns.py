"""Turns, as one worker knows them: the routes that have work, and where the line of each begins."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from time import monotonic
from typing import Any

from penstock.claim import claim as claims
from penstock.claim.claim import LinePlace
from penstock.db.pool import Connection
from penstock.model import Lease

# Cached places in line are valid for so long, and for so long after a notice of work. Nothing is lost by it: a lane
# that lined up meanwhile, before the place at which the claim begins to look, is found the next time.
_FRESH_S = 1.0
_FRESH_AFTER_NEWS_S = 0.1
# Commits overtake each other: a deferral that was due a little before the last claim may have been written since. And
# sessions, whose place in line is a time, may become ready a little before it.
_SLACK_S = 5.0
# Of so many claims one begins with the next lower priority, so that none waits for ever.
_OUT_OF_TURN = 10


class Turns:
    """Remembers where each line begins, so that a claim does not walk past served lanes, whose dead rows may still be
    there."""

    def __init__(self, pool: str, *, by_time: bool) -> None:
        self._pool = pool
        self._by_time = by_time
        self._routes: list[str] = []
        self._looked_at = -math.inf
        self.news = False
        """There is new work, and no claim has looked for it yet."""
        self._places: dict[str, list[LinePlace]] = {}
        self._due_from: datetime | None = None
        self._claims = 0
        self.due_in_s: float | None = None
        """Seconds until the next deferral is due that does not stand in line, as of the last claim."""

    @property
    def nothing_due(self) -> bool:
        """Whether there is nothing to claim before `due_in_s`, if that is known, or before a notice. False while routes
        have work of which nothing could be claimed: they may be held back for a moment only."""
        return not self._routes or (self.due_in_s is not None and self.due_in_s > 0)

    def note_news(self) -> None:
        """Note that there is new work, perhaps of another route."""
        self.news = True

    async def routes(self, connection: Connection) -> list[str]:
        """List the routes that have anything to claim now or later."""
        fresh_s = _FRESH_AFTER_NEWS_S if self.news else _FRESH_S
        if monotonic() - self._looked_at >= fresh_s:
            self._routes = await claims.list_routes_with_work(connection, self._pool)
            # Without routes, the next call looks again: its caller has waited.
            self._looked_at, self.news = (monotonic() if self._routes else -math.inf), False
            self._places, self._due_from, self.due_in_s = {}, None, None
        return self._routes

    async def claim(
        self, connection: Connection, wants: Mapping[str, int], *, full: Sequence[int] = (), **options: Any
    ) -> list[Lease]:
        """Lease up to `wants[route]` ordinals of each route, from lanes whose turn it is, except for `full` lanes."""
        begin = self._begin(wants)
        if self._due_from is None or (self.due_in_s is not None and self.due_in_s <= 0):
            # Where enough stand in line already, the rest is lined up later: an owner alone now may not be then.
            routes = [route for route, want in wants.items() if begin.get(route, claims.FRONT).due < 2 * want]
            await claims.line_up(
                connection,
                pool=self._pool,
                routes=routes,
                places=begin,
                due_from=self._due_from,
                limit=max(wants.values()),
            )
        self._claims += 1
        lower = self._lower(wants) if self._claims % _OUT_OF_TURN == 0 else {}
        if self._by_time:
            options["look"] = max(wants.values())  # each session has one request to give
        claimed = await claims.claim_in_line(
            connection,
            pool=self._pool,
            wants=wants,
            places={**begin, **lower},
            due_from=self._due_from,
            full=full,
            **options,
        )
        if not full:
            self._places.update({route: line for route, line in claimed.places.items() if route not in lower})
        self._due_from = claimed.at - timedelta(seconds=_SLACK_S)
        due = claimed.next_due_at
        self.due_in_s = None if due is None else (due - claimed.at).total_seconds()
        if not claimed.leases and (self.due_in_s is None or self.due_in_s > 0):
            # There was something before: look at the whole line the next time.
            self._looked_at = -math.inf
        return claimed.leases

    def _begin(self, routes: Collection[str]) -> dict[str, LinePlace]:
        known = {route: self._places[route][0] for route in routes if self._places.get(route)}
        if self._by_time:
            return {route: place._replace(tag=place.tag - _SLACK_S) for route, place in known.items()}
        return known

    def _lower(self, routes: Collection[str]) -> dict[str, LinePlace]:
        """Places in line of a lower priority, each in turn, for routes that have several."""
        lower: dict[str, LinePlace] = {}
        for route in routes:
            bands: Sequence[LinePlace] = self._places.get(route, ())
            if len(bands) > 1:
                lower[route] = bands[1 + self._claims // _OUT_OF_TURN % (len(bands) - 1)]
        return lower

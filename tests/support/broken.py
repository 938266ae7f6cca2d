"""Deliberately broken variants of the engine, each without one of its guards.

A pytest plugin: `-p tests.support.broken`, with the variant's name in PENSTOCK_BROKEN. Whoever runs a test under it
expects the test to fail."""

from __future__ import annotations

import os
from collections.abc import Callable

from penstock.db import sql


def _without(name: str, text: str, instead: str = "") -> None:
    """From now on, statement `name` is loaded with `text` replaced."""
    before = sql.parse

    def parse(place: str, source: str) -> sql.Statements:
        statements = {statement.name: statement for statement in before(place, source)}
        if name in statements:
            whole = statements[name].text.decode()
            if text not in whole:
                raise AssertionError(f"{name} no longer contains {text!r}: bring this variant up to date")
            broken = whole.replace(text, instead).encode()
            statements[name] = sql.Statement(name, statements[name].about, broken)
        return sql.Statements(place, statements)

    sql.parse = parse


def lease_check() -> None:
    """Whoever knows a lease's id may settle it."""
    _without("settle_if_leased", " AND worker_id IS NOT DISTINCT FROM %(worker)b::uuid")


def nonce() -> None:
    """Leases are told apart by their ids alone."""
    columns = "(lane_id, batch_id, owner, session, band, weight, pool, route, limited, worker_id, ordinals, attempt,"
    _without("claim_open", columns, columns.replace("(", "(nonce, "))
    fresh = "SELECT id, batch_id, owner, session, band, weight * "
    _without("claim_open", fresh, fresh.replace("id", "0, id", 1))
    _without(
        "claim_open",
        "UNION ALL\n  SELECT lane_id, batch_id, owner, session, band, weight, %(pool)s",
        "UNION ALL\n  SELECT 0, lane_id, batch_id, owner, session, band, weight, %(pool)s",
    )


def ordinal_check() -> None:
    """A lease may settle ordinals it no longer holds."""
    _without("settle_if_leased", "ON h.nonce = f.nonce AND h.ordinals @> f.ordinal", "ON h.nonce = f.nonce")


def counters_from_input() -> None:
    """Counters move by what was sent, not by what was written."""
    _without(
        "settle_if_leased",
        "SELECT batch_id, state AS what, n FROM final WHERE NOT session",
        "SELECT (SELECT id FROM penstock.batches LIMIT 1) AS batch_id, s AS what, n"
        " FROM unnest(%(f_state)b::text[]) WITH ORDINALITY AS s (s, n)",
    )


def head_guard() -> None:
    """A lane hands out its next item while the one before it is still being worked on."""
    looked_at = "least(l.total - l.next, coalesce(l.width - l.busy, l.total - l.next)) AS room"
    _without("claim_open", looked_at, "l.total - l.next AS room")
    _without("claim_open", "THEN least(total - next, width - busy,", "THEN least(total - next,")


def bisect() -> None:
    """One row that cannot be stored fails its whole flush."""
    from penstock.db import coalesce

    async def refuse(_: object, __: list[object], error: Exception) -> None:
        raise error

    coalesce.Coalescer._bisect = refuse  # type: ignore[assignment, method-assign]


def self_fence() -> None:
    """A worker that cannot check in goes on as if nothing had happened."""
    from penstock.worker.heartbeat import Heartbeat

    setattr(Heartbeat, "alive_until", property(lambda _: float("inf"), lambda _, __: None))  # noqa: B010


def pause_lock() -> None:
    """Retries are claimed whatever became of their lane."""
    _without("claim_open", "WHERE (lane_id IN (SELECT id FROM due_lane)) IS TRUE")
    _without("claim_open", "WHERE is_lane OR (lane_id IN (", "WHERE true OR (lane_id IN (")
    _without(
        "settle_if_leased", "(SELECT NOT (l.open OR l.session) FROM penstock.lanes l WHERE l.id = lane_id)", "NULL"
    )


def unseen_key() -> None:
    """Accepting believes that nobody has used a key since it looked."""
    _without("accept_if_room", "AND NOT (w.keyed AND holds.totals[at.held] <> w.seen_total)")


def session_head() -> None:
    """A session that goes on asks for what its last request asked for."""
    _without("settle_if_leased", "WHERE r.lane_id = l.id AND r.ordinal = l.next),", "WHERE false),")
    _without(
        "settle_answer_if_leased",
        "WHERE l.next < l.total AND r.lane_id = l.id AND r.ordinal = l.next),",
        "WHERE false),",
    )


VARIANTS: dict[str, Callable[[], None]] = {
    variant.__name__: variant
    for variant in (
        lease_check,
        nonce,
        ordinal_check,
        counters_from_input,
        head_guard,
        bisect,
        self_fence,
        pause_lock,
        unseen_key,
        session_head,
    )
}

if "PENSTOCK_BROKEN" in os.environ:
    VARIANTS[os.environ["PENSTOCK_BROKEN"]]()

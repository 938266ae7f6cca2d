"""A fault proxy in front of PostgreSQL that reads the protocol: faults hit the statement they are meant for.

    with PostgresProxy(server) as proxy:
        lost = proxy.swallow(r"^COMMIT")
        ...  # work on proxy.proxied(server)
        assert lost.fired == 1

Statements match by a regular expression that is searched in their text, or by a function of it. Every fault is
armed `times` times (None: for ever) and counts only what it really did: a statement that failed, or whose connection
ended too early, leaves it armed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.support.history import HistoryWriter
from tests.support.postgres_wire import Conversation, CopyPoint, Moment, Rule, Traffic
from tests.support.proxy import Target, TcpProxy
from tests.support.proxy_link import Cut, Screen, Stall, Trigger

Match = str | re.Pattern[str] | Callable[[str], bool]


class PostgresProxy(TcpProxy):
    """A TcpProxy in front of the server of `conninfo`, which may listen on a unix socket."""

    def __init__(self, conninfo: str, *, history: HistoryWriter | None = None, name: str = "postgres") -> None:
        super().__init__(_target(conninfo), history=history, name=name)
        self._rules: list[Rule] = []
        self._traffic = Traffic()

    def proxied(self, conninfo: str) -> str:
        """The same user and database of the same server, by way of this proxy."""
        if _target(conninfo) != self.target:
            raise ValueError(f"this proxy leads to {self.target}, not to {_target(conninfo)}")
        # A host address, if there were one, would win over the host.
        return make_conninfo(conninfo, host=self.host, hostaddr=self.host, port=self.port)

    @property
    def traffic(self) -> Traffic:
        return replace(self._traffic)

    # -- faults

    def swallow(self, match: Match, *, times: int | None = 1, how: Cut = Cut.RST) -> Trigger:
        """The unknown commit: the server carries the statement out, its answer is dropped, the client is cut off.

        Cut when the server is ready for the next statement: only then is one outside a transaction committed. What
        was sent with it in one pipeline shares its fate.
        """
        return self._arm("swallow", match, Moment.AFTER, times, how)

    def cut_before(self, match: Match, *, times: int | None = 1, how: Cut = Cut.RST) -> Trigger:
        """The client is cut off and the statement never reaches the server."""
        return self._arm("cut_before", match, Moment.BEFORE, times, how)

    def stall_before(self, match: Match, *, times: int | None = 1) -> Trigger:
        """The connection stands still before the statement, until `heal` or until the client is gone."""
        return self._arm("stall_before", match, Moment.BEFORE, times, Stall.HERE)

    def stall_after(self, match: Match, *, times: int | None = 1) -> Trigger:
        """The same when the server has carried it out and the client does not know yet."""
        return self._arm("stall_after", match, Moment.AFTER, times, Stall.HERE)

    def cut_copy(self, point: CopyPoint, match: Match = "", *, times: int | None = 1, how: Cut = Cut.RST) -> Trigger:
        """Cut a COPY FROM STDIN in its data; `swallow` cuts it after CopyDone.

        After `point` bytes, in the "middle", or before the "last" byte; a number that is the data's whole size cuts
        before CopyDone. A COPY with less data than that goes through.
        """
        return self._arm("cut_copy", match, Moment.COPYING, times, how, point)

    def watch(self, match: Match) -> Trigger:
        """Nothing happens to the statements: they are counted as they are sent."""
        return self._arm("watch", match, Moment.SENT, None, None)

    def _arm(
        self,
        what: str,
        match: Match,
        moment: Moment,
        times: int | None,
        step: Cut | Stall | None,
        point: CopyPoint = 0,
    ) -> Trigger:
        trigger = Trigger(what, times)
        rule = Rule(_predicate(match), moment, trigger, step, point)
        self._thread.do(lambda: self._rules.append(rule))
        return trigger

    # -- the proxy's side

    def _mend(self) -> None:
        for rule in self._rules:
            if rule.step is not None:
                rule.trigger.disarm()
        self._rules[:] = [rule for rule in self._rules if rule.step is None]
        super()._mend()

    def _screen(self, number: int) -> Screen:
        def fire(trigger: Trigger, text: str) -> None:
            if trigger.what == "watch":
                trigger.fire()
            else:
                self._fire(trigger, text, number)

        return Conversation(self._rules, self._traffic, fire)


def _predicate(match: Match) -> Callable[[str], bool]:
    if isinstance(match, str):
        match = re.compile(match)
    if isinstance(match, re.Pattern):
        pattern = match
        return lambda text: pattern.search(text) is not None
    return match


def _target(conninfo: str) -> Target:
    known = conninfo_to_dict(conninfo)
    host = str(known.get("hostaddr") or known.get("host") or "localhost")
    port = int(known.get("port") or 5432)
    return Path(host) / f".s.PGSQL.{port}" if host.startswith("/") else (host, port)

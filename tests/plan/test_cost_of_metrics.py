"""What a scrape asks of the database follows lanes, leases and deferrals: no payload is read, no lane that ended."""

from __future__ import annotations

from penstock.observe.queue_figures import read_figures
from tests.plan.crowd import Worlds
from tests.support.plans import Mode

_CONTROL_TABLES = {"lanes", "leases", "deferrals", "workers", "gates", "limits"}


def test_the_figures_of_the_queue_are_read_from_control_tables(worlds: Worlds) -> None:
    plan = worlds.large.session.explain(lambda connection: read_figures(connection, grace_s=30), Mode.CUSTOM)
    read = {node["Relation Name"] for node in plan.nodes() if "Relation Name" in node}
    assert read <= _CONTROL_TABLES
    if worlds.statistics == "analysed":
        lanes = {node.get("Index Name") for node in plan.nodes() if node.get("Relation Name") == "lanes"}
        assert None not in lanes, f"{plan}"

"""Metrics: what is counted, how processes are added up, and what labels may say."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from penstock.model import Again, Halt, Outcome, OutcomeState, Verdict
from penstock.observe import catalogue
from penstock.observe.metrics import (
    Counter,
    Histogram,
    Metric,
    ProcessMetrics,
    Sample,
    Snapshot,
    list_metrics,
    take_snapshot,
)
from penstock.observe.page import write_page

REPOSITORY = Path(__file__).parent.parent.parent.parent
ALERTS = REPOSITORY / "deploy" / "prometheus" / "alerts.yml"
DASHBOARD = REPOSITORY / "deploy" / "grafana" / "penstock.json"
_NAME = re.compile(r"\bpenstock_\w+")


def exported(metric: Metric) -> list[str]:
    if isinstance(metric, Histogram):
        return [f"{metric.name}_{part}" for part in ("bucket", "count", "sum")]
    return [metric.name]


def figures(page: bytes) -> dict[str, float]:
    lines = [line for line in page.decode().splitlines() if not line.startswith("#")]
    return {series: float(value) for series, _, value in (line.rpartition(" ") for line in lines)}


def test_names_follow_the_conventions() -> None:
    for metric in list_metrics():
        assert re.fullmatch(r"penstock_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == isinstance(metric, Counter), metric.name
        assert metric.about.endswith(".")
        assert not re.search(r"_(ms|millis\w*|minutes|kb|mb)(_|$)", metric.name)
        assert not {"owner", "batch", "custom_id", "session", "url", "key"} & set(metric.labels)


@pytest.mark.parametrize("path", [ALERTS, DASHBOARD], ids=lambda path: path.name)
def test_alerts_and_the_dashboard_name_only_metrics_that_exist(path: Path) -> None:
    named = set(_NAME.findall(path.read_text("utf-8")))
    assert len(named) > 5
    assert named <= {name for metric in list_metrics() for name in exported(metric)}


def test_prometheus_takes_the_alerts_and_the_expressions_of_the_dashboard(tmp_path: Path) -> None:
    panels: list[dict[str, Any]] = json.loads(DASHBOARD.read_bytes())["panels"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    rules = [{"record": f"panel:{n}", "expr": _filled_in(expression)} for n, expression in enumerate(asked)]
    drawn = tmp_path / "dashboard.yml"
    drawn.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))  # JSON is YAML
    ran = subprocess.run(["promtool", "check", "rules", ALERTS, drawn], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert f"{len(rules)} rules found" in ran.stdout


def _filled_in(expression: str) -> str:
    return expression.replace("$__rate_interval", "5m").replace("$provider", ".*")


def test_ended_processes_keep_counting_and_have_no_gauges() -> None:
    labels = ("there", "batch", "other")
    before = figures(write_page(take_snapshot()))
    metrics = ProcessMetrics()
    metrics.take(1, {"penstock_calls_total": [((*labels, "2xx"), [5.0])]})
    metrics.take(1, {"penstock_calls_total": [((*labels, "2xx"), [7.0])]})  # in place of the first
    gauges: Snapshot = {
        "penstock_buffer_fill_ratio": [(("results",), [0.9])],
        "penstock_calls_in_flight": [(("there", "batch"), [3.0])],
    }
    metrics.take(2, {"penstock_calls_total": [((*labels, "2xx"), [1.0])], **gauges})
    metrics.take(3, gauges)
    mine = Sample(catalogue.BUFFER_FILL, ("results",), 0.1)
    calls = 'penstock_calls_total{model="other",pool="batch",provider="there",status="2xx"}'
    in_flight = 'penstock_calls_in_flight{pool="batch",provider="there"}'
    page = figures(write_page(metrics.total([mine])))
    assert page[calls] == before.get(calls, 0) + 8
    assert page[in_flight] == 6  # added up
    assert page['penstock_buffer_fill_ratio{writer="results"}'] == 0.9  # the highest
    metrics.end(2)
    metrics.end(3)
    page = figures(write_page(metrics.total()))
    assert page[calls] == before.get(calls, 0) + 8
    assert in_flight not in page


def test_a_histogram_counts_up_to_each_bound() -> None:
    made = Histogram("made", "Made.", ("one",), bounds=(1, 10))
    for value in (0.5, 1, 2, 30):
        made.observe(("x",), value)
    assert made.series == {("x",): [2, 1, 1, 33.5]}
    with pytest.raises(ValueError, match="has the labels"):
        made.observe((), 1)


def test_only_models_that_the_operator_names_are_labels() -> None:
    try:
        catalogue.name_models(["a", "b", "a", "c"], limit=2)
        assert [catalogue.model_label(name) for name in ("a", "b", "c", "of-a-tenant")] == ["a", "b", "other", "other"]
    finally:
        catalogue.name_models([], limit=0)


def test_calls_are_counted_by_status_error_and_duration() -> None:
    calls = catalogue.CallCounts("serve:counted")
    calls.note("m", Outcome(OutcomeState.COMPLETED, b"{}", 200, duration_ms=30))
    calls.note("m", Again("rate_limited", "", 1, False, 429, 2))
    calls.note("m", Again("connect_timeout", "", 1, False))
    calls.note("m", Halt("invalid_api_key", "", 401, 3))
    page = figures(write_page(take_snapshot()))
    mine = {series: value for series, value in page.items() if 'provider="counted"' in series}
    where = 'pool="batch",provider="counted"'
    assert {series: value for series, value in mine.items() if "duration" not in series} == {
        f'penstock_calls_total{{model="other",{where},status="2xx"}}': 1,
        f'penstock_calls_total{{model="other",{where},status="4xx"}}': 2,
        f'penstock_calls_total{{model="other",{where},status="none"}}': 1,
        f'penstock_call_errors_total{{error="refused",{where}}}': 1,
        f'penstock_call_errors_total{{error="connect",{where}}}': 1,
        f'penstock_call_errors_total{{error="halted",{where}}}': 1,
        f'penstock_throttles_total{{{where},status="429"}}': 1,
        f'penstock_retries_total{{error="refused",{where}}}': 1,
        f'penstock_retries_total{{error="connect",{where}}}': 1,
        f"penstock_halts_total{{{where}}}": 1,
    }
    buckets = f'penstock_call_duration_seconds_bucket{{le="%s",model="other",{where}}}'
    assert [mine[buckets % bound] for bound in ("0.001", "0.002", "0.004", "0.032", "+Inf")] == [1, 2, 3, 4, 4]
    assert mine[f'penstock_call_duration_seconds_sum{{model="other",{where}}}'] == pytest.approx(0.035)


@pytest.mark.parametrize(
    ("verdict", "label"),
    [
        (Again("anything", "", 1, False, 503), "refused"),
        (Again("tls_failed", "", 1, False), "connect"),
        (Again("first_byte_timeout", "", 1, True), "timeout"),
        (Again("of-the-upstream", "", 1, True, 502), "server"),
        (Outcome(OutcomeState.FAILED, status_code=400, error_code="of-the-upstream"), "client"),
        (Again("invalid_response", "", 1, True, 200), "protocol"),
        (Again("connection_reset", "", 1, True), "protocol"),
        (Outcome(OutcomeState.FAILED, error_code="processor_error"), "processor"),
        (Outcome(OutcomeState.FAILED, error_code="of-a-tenant"), "other"),
        (Halt("of-the-upstream", "", 401), "halted"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors_have_few_labels(verdict: Verdict, label: str) -> None:
    assert catalogue.error_label(verdict) == label


@pytest.mark.parametrize(
    ("pool", "labels"),
    [
        ("serve:openai", ("openai", "batch")),
        ("session:openai", ("openai", "session")),
        ("processor:upper", ("upper", "processor")),
        ("serve", ("", "server")),
        ("run:0123456789abcdef", ("", "run")),
    ],
)
def test_pools_have_few_labels(pool: str, labels: tuple[str, str]) -> None:
    assert catalogue.pool_labels(pool) == labels

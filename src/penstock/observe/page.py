"""Page of metrics in Prometheus's text format, written by prometheus-client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family

from penstock.observe.metrics import Cells, Counter, Histogram, Labels, Metric, Snapshot, list_metrics

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_PLAIN_0_0_4


def write_page(snapshot: Snapshot) -> bytes:
    """The figures of a snapshot. Every metric has its HELP and TYPE, also one without figures."""
    return prometheus_client.generate_latest(_Collected(snapshot))


class _Collected(prometheus_client.registry.Collector):
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Family]:
        for metric in list_metrics():
            yield _family(metric, sorted(self._snapshot.get(metric.name, ())))


def _family(metric: Metric, series: Iterable[tuple[Labels, Cells]]) -> Family:
    if isinstance(metric, Histogram):
        histogram = HistogramMetricFamily(metric.name, metric.about, labels=metric.labels)
        for labels, cells in series:
            histogram.add_metric(labels, _buckets(metric, cells), cells[-1])
        return histogram
    kind = CounterMetricFamily if isinstance(metric, Counter) else GaugeMetricFamily
    family = kind(metric.name, metric.about, labels=metric.labels)
    for labels, (value,) in series:
        family.add_metric(labels, value)
    return family


def _buckets(metric: Histogram, cells: Cells) -> list[tuple[str, float]]:
    """(upper bound, observations up to it), as the format has it."""
    buckets, so_far = [], 0.0
    for bound, count in zip((*metric.bounds, "+Inf"), cells[:-1], strict=True):
        so_far += count
        buckets.append((str(bound), so_far))
    return buckets

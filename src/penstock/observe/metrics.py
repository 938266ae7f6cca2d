"""Metrics of a process, and of the worker processes it started.

Counters and histograms are plain lists in dicts: counting an item takes half a microsecond, where prometheus-client's
own take four to six (ADR 17). Gauges hold nothing: they are read when a snapshot is made. A worker process sends
snapshots to its parent (`worker/snapshots.py`), which adds them to its own figures; `page.py` writes the sum.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

Labels = tuple[str, ...]
Cells = list[float]
"""Figures of one series: a counter's or a gauge's value; a histogram's count of each bucket, then the sum."""
Series = dict[Labels, Cells]
Snapshot = dict[str, list[tuple[Labels, Cells]]]
"""Series by the name of their metric."""


@dataclass(slots=True, eq=False)
class Metric:
    """Metric: its name, its HELP text, the names of its labels, and its series in this process."""

    name: str
    about: str
    labels: tuple[str, ...]
    series: Series = field(default_factory=dict)

    def cells(self, labels: Labels) -> Cells:
        """The figures of one series, to be counted up in place."""
        found = self.series.get(labels)
        if found is None:
            if len(labels) != len(self.labels):
                raise ValueError(f"{self.name} has the labels {self.labels}, not {labels}")
            found = self.series[labels] = self._zero()
        return found

    def _zero(self) -> Cells:
        return [0.0]


class Counter(Metric):
    """Counts up. `cells[0] += n` needs no lock: CPython changes threads at calls and jumps, and there is none in it."""

    __slots__ = ()

    def add(self, labels: Labels = (), count: float = 1) -> None:
        self.cells(labels)[0] += count


@dataclass(slots=True, eq=False)
class Histogram(Metric):
    """Counts observations in fixed buckets."""

    bounds: Sequence[float] = ()
    """Upper bounds of the buckets, ascending; one without a bound follows."""

    def observe(self, labels: Labels, value: float) -> None:
        cells = self.cells(labels)
        cells[bisect_left(self.bounds, value)] += 1
        cells[-1] += value

    def _zero(self) -> Cells:
        return [0.0] * (len(self.bounds) + 2)


@dataclass(slots=True, eq=False)
class Gauge(Metric):
    """Is read from its source when asked. Several processes' values are added, or the highest is taken."""

    merge: Literal["sum", "max"] = "sum"


class Sample(NamedTuple):
    """Value of a gauge now."""

    gauge: Gauge
    labels: Labels
    value: float


_Declared = TypeVar("_Declared", bound=Metric)

_metrics: dict[str, Metric] = {}
_sources: list[Callable[[], Iterable[Sample]]] = []


def counter(name: str, about: str, *labels: str) -> Counter:
    return _declare(Counter(name, about, labels))


def histogram(name: str, about: str, *labels: str, bounds: Sequence[float]) -> Histogram:
    return _declare(Histogram(name, about, labels, bounds=tuple(bounds)))


def gauge(name: str, about: str, *labels: str, merge: Literal["sum", "max"] = "sum") -> Gauge:
    return _declare(Gauge(name, about, labels, merge=merge))


def _declare(metric: _Declared) -> _Declared:
    if _metrics.setdefault(metric.name, metric) is not metric:
        raise ValueError(f"{metric.name} is declared twice")
    return metric


def list_metrics() -> list[Metric]:
    """Every metric that is declared."""
    return list(_metrics.values())


def read_from(source: Callable[[], Iterable[Sample]]) -> Callable[[], Iterable[Sample]]:
    """Read gauges from this function too, whenever a snapshot is made. It may also bring counters up to date."""
    _sources.append(source)
    return source


def take_snapshot() -> Snapshot:
    """The figures of this process now."""
    samples = [sample for source in _sources for sample in source()]
    total = _Sum()
    total.add({name: list(metric.series.items()) for name, metric in _metrics.items() if metric.series})
    total.add_samples(samples)
    return total.snapshot()


class _Sum:
    """Adds up the series of several processes."""

    def __init__(self) -> None:
        self._series: dict[str, Series] = {}

    def add(self, snapshot: Snapshot, *, gauges: bool = True) -> None:
        for name, series in snapshot.items():
            metric = _metrics.get(name)
            if metric is None or (isinstance(metric, Gauge) and not gauges):
                continue
            highest = isinstance(metric, Gauge) and metric.merge == "max"
            mine = self._series.setdefault(name, {})
            for labels, cells in series:
                known = mine.get(labels)
                if known is None:
                    mine[labels] = list(cells)
                elif highest:
                    known[0] = max(known[0], cells[0])
                else:
                    known[:] = [a + b for a, b in zip(known, cells, strict=True)]

    def add_samples(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            self.add({sample.gauge.name: [(sample.labels, [sample.value])]})

    def snapshot(self) -> Snapshot:
        return {name: list(series.items()) for name, series in self._series.items()}


class ProcessMetrics:
    """Figures of this process and of the processes it started. Those that have ended keep counting, so that no counter
    falls; their gauges are gone."""

    def __init__(self) -> None:
        self._living: dict[int, Snapshot] = {}
        self._ended = _Sum()

    def take(self, process: int, snapshot: Snapshot) -> None:
        """Replace a process's figures by newer ones."""
        self._living[process] = snapshot

    def end(self, process: int) -> None:
        self._ended.add(self._living.pop(process, {}), gauges=False)

    def sum_gauge(self, gauge: Gauge) -> float:
        """Value of a gauge in the processes that were started and have not ended, added up."""
        series = (snapshot.get(gauge.name, ()) for snapshot in self._living.values())
        return sum(cells[0] for cells_by_labels in series for _, cells in cells_by_labels)

    def total(self, samples: Iterable[Sample] = ()) -> Snapshot:
        """The figures of all, with these besides."""
        total = _Sum()
        total.add(take_snapshot())
        total.add(self._ended.snapshot())
        for snapshot in self._living.values():
            total.add(snapshot)
        total.add_samples(samples)
        return total.snapshot()

"""Progress display of a run: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import os
import sys
from collections import deque
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Self

from penstock.model import Counts

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_RATE_WINDOW_S = 10.0
_PLAIN_EVERY_S = 2.0
_BAR_FROM_COLUMNS = 100


class Rate:
    """Items per second over the last few seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def observe(self, done: int) -> float:
        now = monotonic()
        self._seen.append((now, done))
        while len(self._seen) > 2 and now - self._seen[0][0] > _RATE_WINDOW_S:
            self._seen.popleft()
        first_at, first = self._seen[0]
        return (done - first) / (now - first_at) if now > first_at else 0.0


def _make_bar() -> Progress:
    """Bar in one line of the terminal, however narrow that is: the figures that do not fit are cut off."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    console = Console(stderr=True)
    bar = [BarColumn(bar_width=30)] if console.width >= _BAR_FROM_COLUMNS else []
    figures = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    return Progress(
        TextColumn("{task.description}"),
        *bar,
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[figures]}", markup=False, table_column=figures),
        console=console,
        transient=True,
        expand=True,
        refresh_per_second=8,
    )


class Display:
    """Display of stages one after the other, on standard error."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._next_line_at = 0.0
        self._rate = Rate()

    def __enter__(self) -> Self:
        # A dumb terminal cannot move its cursor: it gets lines, as a file does.
        if not self._quiet and sys.stderr.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown"):
            self._bar = _make_bar()
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def stage(self, name: str) -> None:
        """Begin a stage: its rate starts anew."""
        self._rate = Rate()
        self._next_line_at = monotonic() + _PLAIN_EVERY_S
        if self._bar is not None:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(name, total=None, figures="")

    def amount(self, name: str, done: int, total: int | None, unit: str) -> None:
        """Show the progress of a stage that only counts: intake, export."""
        rate = self._rate.observe(done)
        self.show(name, done, total, f"{done:,} {unit}  {rate:,.0f}/s")

    def counts(self, counts: Counts, in_flight: int | None, note: str) -> None:
        """Show the progress of the calls."""
        rate = self._rate.observe(counts.settled)
        left = counts.total - counts.settled
        figures = [f"{counts.settled:,}/{counts.total:,}", f"{rate:,.0f}/s"]
        if rate > 0 and left:
            figures.append(f"ETA {duration(left / rate)}")
        figures.append(f"{counts.in_flight if in_flight is None else in_flight:,} in flight")
        if counts.retried:
            figures.append(f"{counts.retried:,} retried")
        failed = counts.failed + counts.not_found
        if failed:
            figures.append(f"{failed:,} failed")
        if note:
            figures.append(note)
        self.show("calling", counts.settled, counts.total, "  ".join(figures))

    def rate(self, done: int) -> float:
        """Amount per second of late in this stage."""
        return self._rate.observe(done)

    def show(self, name: str, done: int, total: int | None, figures: str) -> None:
        """Show progress with the caller's own figures."""
        if self._quiet:
            return
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=name, completed=done, total=total, figures=figures)
        elif monotonic() >= self._next_line_at:
            self._next_line_at = monotonic() + _PLAIN_EVERY_S
            share = f"{100 * done / total:3.0f}%  " if total else ""
            print(f"{name:<8} {share}{figures}", file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """A time span at a glance: 4s, 3m20s, 2h05m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3_600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3_600}h{whole % 3_600 // 60:02d}m"

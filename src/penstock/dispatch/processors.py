"""Processors of jobs: Python functions that a job's spec names. Only the operator says what they are.

[[processors]]
name = "clean"
function = "rows:clean"
concurrency = 8
attempt_timeout_s = 60
chunk = 50
strategies = ["exact", "fuzzy"]

`function` is a `module:function`, or the name of an installed package's entry point in the group `penstock.processors`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.config import DispatchLimits, RetryLimits
from penstock.config_tables import TableEntry, read_entries
from penstock.dispatch.loading import find_entry_point, load_processor
from penstock.dispatch.python import PythonProcessor
from penstock.dispatch.signals import MAX_CHUNK
from penstock.errors import UsageError
from penstock.model import MAX_STRATEGIES

_FIELDS = ("name", "function", "concurrency", "attempt_timeout_s", "chunk", "strategies")


@dataclass(frozen=True, slots=True)
class ProcessorConfig:
    """Processor by its name, which is the route of its jobs' lanes. Plain values: worker processes can be told."""

    name: str
    function: str
    concurrency: int | None = None
    attempt_timeout_s: float | None = None
    chunk: int | None = None
    strategies: tuple[str, ...] = ()

    @property
    def pool(self) -> str:
        """The pool of its jobs' lanes."""
        return f"processor:{self.name}"

    def load(self) -> Callable[..., Any]:
        """The function or class, imported now. Raises UsageError."""
        option = f"processor '{self.name}': function"
        spec = self.function if ":" in self.function else find_entry_point(self.function, option)
        return load_processor(spec, option)

    def limits(self, dispatch: DispatchLimits) -> DispatchLimits:
        """The bounds of its calls in one worker process."""
        told: dict[str, Any] = {"concurrency": self.concurrency, "attempt_timeout_s": self.attempt_timeout_s}
        return dataclasses.replace(dispatch, **{name: value for name, value in told.items() if value is not None})

    def processor(self, dispatch: DispatchLimits, retry: RetryLimits) -> PythonProcessor:
        """What calls it; entered, it is set up. Raises UsageError."""
        function, limits = self.load(), self.limits(dispatch)
        try:
            return PythonProcessor(function, limits, retry, strategies=self.strategies, chunk=self.chunk)
        except UsageError as error:
            raise UsageError(f"processor '{self.name}': {error.message}", hint=error.hint) from None

    def as_dict(self) -> dict[str, Any]:
        """As in the file: `parse([processor.as_dict()], ...)` gives it again."""
        told = {**dataclasses.asdict(self), "strategies": list(self.strategies)}
        return {name: value for name, value in told.items() if value not in (None, [])}


def parse(entries: Any, file: str) -> tuple[ProcessorConfig, ...]:
    """The `[[processors]]` of a configuration file. Errors name the file, the entry and the field."""
    return read_entries("processors", entries, file, lambda *entry: _Entry(*entry).parse(), "the processors' work")


class _Entry(TableEntry):
    kind = "processors"
    fields = _FIELDS
    hint = 'A processor has a name and a function, such as name = "clean" and function = "rows:clean".'

    def parse(self) -> ProcessorConfig:
        known = {entry.name: entry.metadata for entry in dataclasses.fields(DispatchLimits)}
        concurrency, timeout = known["concurrency"], known["attempt_timeout_s"]
        return ProcessorConfig(
            self.name(),
            self.text("function", required=True),
            self.whole_number("concurrency", 1, concurrency["high"]),
            self.any_number("attempt_timeout_s", timeout["low"], timeout["high"]),
            self.whole_number("chunk", 1, MAX_CHUNK),
            self._strategies(),
        )

    def _strategies(self) -> tuple[str, ...]:
        names = self.table.get("strategies", [])
        if not isinstance(names, list) or not all(isinstance(name, str) and name.strip() for name in names):
            raise self.wrong("strategies", "is not a list of names", 'For example strategies = ["exact", "fuzzy"].')
        if len(set(names)) < len(names) or len(names) > MAX_STRATEGIES:
            hint = f"There may be {MAX_STRATEGIES}, each of another name."
            raise self.wrong("strategies", "has a name twice, or too many", hint)
        return tuple(names)

"""Every limit and interval, with its range. Units are part of the names.

One name serves everywhere: `heartbeat_grace_s` in TOML is `PENSTOCK_HEARTBEAT_GRACE_S` in the
environment and `--set heartbeat_grace_s=30` on the command line. The command line wins over the
environment, the environment over the file, the file over the default.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import UsageError

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


def _knob(default: float, low: float, high: float, about: str) -> Any:
    return field(default=default, metadata={"low": low, "high": high, "about": about})


def _choice(default: str, choices: tuple[str, ...], about: str) -> Any:
    return field(default=default, metadata={"choices": choices, "about": about})


@dataclass(frozen=True, slots=True)
class IntakeLimits:
    """What a file may contain, and how it is read."""

    max_file_bytes: int = _knob(64 * GIB, 1, 1024 * GIB, "largest input after decompression")
    max_line_bytes: int = _knob(16 * MIB, 64, 256 * MIB, "longest line of a JSONL file")
    max_lines: int = _knob(100_000_000, 1, 2_000_000_000, "most requests in one file")
    max_routes_per_file: int = _knob(1_000, 1, 100_000, "most different models and urls in one file")
    max_custom_id_chars: int = _knob(512, 1, 4096, "longest custom_id")
    max_nesting: int = _knob(128, 4, 512, "deepest JSON nesting in a line")
    max_reported_lines: int = _knob(20, 1, 1000, "bad lines listed before giving up")
    max_compression_ratio: int = _knob(1_000, 2, 100_000, "largest expansion of a .gz or .zst input")
    copy_batch_rows: int = _knob(50_000, 1, 1_000_000, "rows per COPY, which is one transaction")
    copy_batch_bytes: int = _knob(32 * MIB, KIB, 256 * MIB, "bytes per COPY; they are streamed, not held")


@dataclass(frozen=True, slots=True)
class ClaimLimits:
    """How much a worker takes at once."""

    claim_min: int = _knob(8, 1, 10_000, "smallest claim")
    claim_max: int = _knob(2_000, 1, 100_000, "largest claim")
    claim_slice_s: float = _knob(5.0, 0.1, 60, "work a claim should last for")
    claim_safety: float = _knob(0.7, 0.1, 1, "share of the slice that is really claimed")
    claim_poll_s: float = _knob(0.25, 0.01, 60, "wait between claims that found nothing")
    ready_max_bytes: int = _knob(32 * MIB, 64 * KIB, 4 * GIB, "input bodies a worker holds in memory")


@dataclass(frozen=True, slots=True)
class SettleLimits:
    """The coalescing writer's bounds."""

    settle_max_rows: int = _knob(1_000, 1, 20_000, "most outcomes per flush")
    settle_max_bytes: int = _knob(16 * MIB, 64 * KIB, 512 * MIB, "most response bytes per flush")
    settle_interval_s: float = _knob(0.03, 0.001, 5, "longest an outcome waits for company")
    settle_capacity_rows: int = _knob(10_000, 10, 1_000_000, "unflushed outcomes at which dispatch stops")
    settle_capacity_bytes: int = _knob(64 * MIB, 64 * KIB, 4 * GIB, "unflushed bytes at which dispatch stops")
    settle_retry_s: float = _knob(120, 1, 3_600, "how long a failing flush is retried")


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    """One call to the other side."""

    concurrency: int = _knob(64, 1, 10_000, "calls in flight per worker process")
    connect_timeout_s: float = _knob(10, 0.1, 300, "time to connect")
    first_byte_timeout_s: float = _knob(120, 0.1, 3_600, "time from sending a request to the answer's first byte")
    idle_timeout_s: float = _knob(60, 0.1, 3_600, "longest silence inside an answer")
    attempt_timeout_s: float = _knob(120, 0.1, 7_200, "whole time of one attempt")
    max_response_bytes: int = _knob(16 * MIB, KIB, 512 * MIB, "largest answer, after decompression")


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """When and how often a failed attempt is repeated."""

    max_attempts: int = _knob(5, 1, 100, "attempts charged to an input before it fails for good")
    max_attempts_not_found: int = _knob(2, 1, 100, "attempts of an input whose answer is 'not found'")
    retry_base_s: float = _knob(1, 0.001, 60, "first backoff; doubled each attempt, full jitter")
    retry_cap_s: float = _knob(60, 0.01, 3_600, "longest backoff")
    refusal_rest_s: float = _knob(0.1, 0, 60, "shortest rest of a route that did not admit a call")
    retry_after_max_s: float = _knob(3_600, 1, 86_400, "longest Retry-After that is obeyed as given")


@dataclass(frozen=True, slots=True)
class LivenessLimits:
    """When a worker counts as dead."""

    heartbeat_interval_s: float = _knob(15, 0.05, 300, "how often a worker checks in")
    heartbeat_grace_s: float = _knob(
        30, 0.1, 3_600, "silence after which a worker is dead (twice the interval or more)"
    )
    stuck_buffer_s: float = _knob(30, 0.1, 3_600, "added to attempt_timeout_s before an idle lease is reclaimed")
    reclaim_action: str = _choice("requeue", ("requeue", "fail"), "what becomes of items whose worker was lost")
    max_reclaims: int = _knob(5, 1, 100, "worker losses before an input fails as worker_lost; the last one alone")
    drain_timeout_s: float = _knob(30, 0.1, 3_600, "how long a stopping worker waits for calls in flight")


@dataclass(frozen=True, slots=True)
class DatabaseLimits:
    """Connections and their time bounds."""

    pool_max: int = _knob(4, 2, 100, "connections per process")
    connect_wait_s: float = _knob(30, 0.1, 600, "how long to wait for the database to accept a connection")
    statement_timeout_s: float = _knob(60, 1, 3_600, "time bound of one statement")


@dataclass(frozen=True, slots=True)
class Config:
    intake: IntakeLimits = field(default_factory=IntakeLimits)
    claim: ClaimLimits = field(default_factory=ClaimLimits)
    settle: SettleLimits = field(default_factory=SettleLimits)
    dispatch: DispatchLimits = field(default_factory=DispatchLimits)
    retry: RetryLimits = field(default_factory=RetryLimits)
    liveness: LivenessLimits = field(default_factory=LivenessLimits)
    database: DatabaseLimits = field(default_factory=DatabaseLimits)
    database_url: str | None = None
    data_dir: Path = Path(".penstock")


@dataclass(frozen=True, slots=True)
class Knob:
    """One setting: where it lives, what it may be, what it means."""

    name: str
    group: str
    kind: type[int] | type[float] | type[str]
    default: Any
    about: str
    low: float = 0
    high: float = 0
    choices: tuple[str, ...] = ()

    @property
    def span(self) -> str:
        """What it may be, as a person writes it."""
        return ", ".join(self.choices) if self.choices else f"{plain(self.low)} – {plain(self.high)}"

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return f"PENSTOCK_{self.name.upper()}"


_GROUPS: dict[str, type[Any]] = {
    "intake": IntakeLimits,
    "claim": ClaimLimits,
    "settle": SettleLimits,
    "dispatch": DispatchLimits,
    "retry": RetryLimits,
    "liveness": LivenessLimits,
    "database": DatabaseLimits,
}


def knobs() -> Iterator[Knob]:
    """Every knob, in the order of the reference page."""
    for group, limits in _GROUPS.items():
        for entry in dataclasses.fields(limits):
            kind = {"int": int, "float": float, "str": str}[str(entry.type)]
            yield Knob(entry.name, group, kind, entry.default, **entry.metadata)


_TEXT_SETTINGS = ("database_url", "data_dir")


def load(
    *,
    toml_path: Path | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Iterable[tuple[str, str]] = (),
    flags: Mapping[str, float | None] | None = None,
    database_url: str | None = None,
    data_dir: Path | None = None,
) -> Config:
    """Read file, environment and command line into one checked configuration."""
    environ = os.environ if environ is None else environ
    known = {knob.name: knob for knob in knobs()}
    chosen: dict[str, tuple[Any, str]] = {}

    if toml_path is not None:
        for name, value in _read_toml(toml_path).items():
            if name not in known and name not in _TEXT_SETTINGS:
                raise UsageError(f"{toml_path}: unknown setting '{name}'", hint=_nearest(name, known))
            chosen[name] = (value, f"{toml_path}: {name}")
    for name in (*known, *_TEXT_SETTINGS):
        variable = f"PENSTOCK_{name.upper()}"
        if variable in environ:
            chosen[name] = (environ[variable], variable)
    for name, value in overrides:
        if name not in known:
            raise UsageError(f"--set {name}: unknown setting", hint=_nearest(name, known))
        chosen[name] = (value, f"--set {name}")
    for name, flag in (flags or {}).items():
        if flag is not None:
            chosen[name] = (flag, f"--{name.replace('_', '-')}")
    if database_url is not None:
        chosen["database_url"] = (database_url, "--database-url")
    if data_dir is not None:
        chosen["data_dir"] = (str(data_dir), "--data-dir")

    grouped: dict[str, dict[str, Any]] = {}
    for name, (value, place) in chosen.items():
        if name in known:
            grouped.setdefault(known[name].group, {})[name] = _value(known[name], value, place)
    groups = {name: limits(**grouped.get(name, {})) for name, limits in _GROUPS.items()}
    config = Config(
        **groups,
        database_url=str(chosen["database_url"][0]) if "database_url" in chosen else None,
        data_dir=Path(str(chosen["data_dir"][0])) if "data_dir" in chosen else Path(".penstock"),
    )
    _check_together(config)
    return config


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot read the configuration: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from error


def _value(knob: Knob, value: Any, place: str) -> float | str:
    if knob.choices:
        if value not in knob.choices:
            raise UsageError(f"{place}: '{value}' is not one of {', '.join(knob.choices)}", hint=_range_hint(knob))
        return str(value)
    try:
        number: float = int(str(value)) if knob.kind is int else float(str(value))
    except ValueError:
        word = "a whole number" if knob.kind is int else "a number"
        raise UsageError(f"{place}: '{value}' is not {word}", hint=_range_hint(knob)) from None
    if not knob.low <= number <= knob.high:
        raise UsageError(f"{place}: {value} is out of range", hint=_range_hint(knob))
    return number


def _range_hint(knob: Knob) -> str:
    span = knob.span.replace(" – ", " to ")
    return f"{knob.name} ({knob.about}) takes {span}; the default is {plain(knob.default)}."


def plain(value: float | str) -> str:
    """A setting's value as a person writes it."""
    if isinstance(value, str):
        return value
    number = value
    return f"{number:,.0f}" if number == int(number) else f"{number:g}"


def _nearest(name: str, known: Mapping[str, Knob]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, known, n=3)
    return f"Did you mean {', '.join(close)}?" if close else "docs/configuration.md lists every setting."


def _check_together(config: Config) -> None:
    liveness = config.liveness
    if liveness.heartbeat_grace_s < 2 * liveness.heartbeat_interval_s:
        raise UsageError(
            f"heartbeat_grace_s ({liveness.heartbeat_grace_s:g}) is less than twice "
            f"heartbeat_interval_s ({liveness.heartbeat_interval_s:g})",
            hint="One late heartbeat must not count as a death: raise the grace or shorten the interval.",
        )
    if config.claim.claim_min > config.claim.claim_max:
        raise UsageError("claim_min is larger than claim_max", hint="Lower claim_min or raise claim_max.")

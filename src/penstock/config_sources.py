"""Configuration as it is read: the command line wins over the environment, the environment over the file, the file over
the default."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from penstock.config import GROUPS, Config, Knob, knobs, plain
from penstock.errors import UsageError
from penstock.validators import checked_public_url

_OTHER_SETTINGS = ("database_url", "data_dir", "public_url", "root_path", "webhook_allow", "secrets_key_file")
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")


def load(
    *,
    toml_path: Path | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Iterable[tuple[str, str]] = (),
    flags: Mapping[str, float | str | None] | None = None,
    database_url: str | None = None,
    data_dir: Path | None = None,
    root_path: str | None = None,
    public_url: str | None = None,
) -> Config:
    """Read file, environment and command line into one checked configuration."""
    environ = os.environ if environ is None else environ
    known = {knob.name: knob for knob in knobs()}
    chosen: dict[str, tuple[Any, str]] = {}

    tables: dict[str, tuple[Any, ...]] = {}

    if toml_path is not None:
        for name, value in _read_toml(toml_path).items():
            if name in ("providers", "processors", "sinks", "adapters"):
                tables[name] = _parse_tables(name, value, str(toml_path))
                continue
            if name not in known and name not in _OTHER_SETTINGS:
                raise UsageError(f"{toml_path}: unknown setting '{name}'", hint=_nearest(name, known))
            chosen[name] = (value, f"{toml_path}: {name}")
    for name in (*known, *_OTHER_SETTINGS):
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
    texts = {"database_url": database_url, "data_dir": data_dir, "root_path": root_path, "public_url": public_url}
    for name, text in texts.items():
        if text is not None:
            chosen[name] = (str(text), f"--{name.replace('_', '-')}")

    grouped: dict[str, dict[str, Any]] = {}
    for name, (value, place) in chosen.items():
        if name in known:
            grouped.setdefault(known[name].group, {})[name] = _value(known[name], value, place)
    groups = {name: limits(**grouped.get(name, {})) for name, limits in GROUPS.items()}
    config = Config(
        **groups,
        providers=tables.get("providers", ()),
        processors=tables.get("processors", ()),
        sinks=tables.get("sinks", ()),
        adapters=tables.get("adapters", ()),
        public_url=checked_public_url(*chosen["public_url"]) if "public_url" in chosen else None,
        root_path=_root_path(*chosen["root_path"]) if "root_path" in chosen else "",
        webhook_allow=_entries(*chosen["webhook_allow"]) if "webhook_allow" in chosen else (),
        secrets_key_file=Path(str(chosen["secrets_key_file"][0])) if "secrets_key_file" in chosen else None,
        database_url=str(chosen["database_url"][0]) if "database_url" in chosen else None,
        data_dir=Path(str(chosen["data_dir"][0])) if "data_dir" in chosen else Path(".penstock"),
    )
    _check_together(config)
    return config


def find_toml(data_dir: Path | None) -> Path | None:
    """Find the settings file that nobody named: that of PENSTOCK_CONFIG, or the one in the data directory."""
    if named := os.environ.get("PENSTOCK_CONFIG"):
        return Path(named)
    inside = (data_dir or Path(os.environ.get("PENSTOCK_DATA_DIR", ".penstock"))) / "penstock.toml"
    try:
        return inside if inside.is_file() else None
    except OSError as error:
        raise UsageError(
            f"cannot use the data directory {inside.parent}: {error.strerror}",
            hint="It must be readable and writable for this user. Choose another with --data-dir.",
        ) from error


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot read the configuration: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from error


def _parse_tables(name: str, value: Any, file: str) -> tuple[Any, ...]:
    if name == "providers":
        from penstock.dispatch.providers import parse

        return parse(value, file)
    if name == "processors":
        from penstock.dispatch import processors

        return processors.parse(value, file)
    if name == "adapters":
        from penstock.adapters import config as adapters

        return adapters.parse(value, file)
    from penstock.deliver import sink_config

    return sink_config.parse(value, file)


def _entries(value: Any, place: str) -> tuple[str, ...]:
    """A list, as TOML has it or separated by commas."""
    entries = value.split(",") if isinstance(value, str) else value
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise UsageError(f"{place}: not a list of texts", hint='Write ["10.1.0.0/16", "hooks.example.net"].')
    return tuple(entry.strip() for entry in entries if entry.strip())


def _value(knob: Knob, value: Any, place: str) -> float | str:
    if knob.kind is bool:
        value = str(value).lower()
    if knob.choices:
        if value not in knob.choices:
            raise UsageError(f"{place}: '{value}' is not one of {', '.join(knob.choices)}", hint=_range_hint(knob))
        return value == "true" if knob.kind is bool else str(value)
    try:
        number: float = int(str(value)) if knob.kind is int else float(str(value))
    except ValueError:
        word = "a whole number" if knob.kind is int else "a number"
        raise UsageError(f"{place}: '{value}' is not {word}", hint=_range_hint(knob)) from None
    if not knob.low <= number <= knob.high:
        raise UsageError(f"{place}: {value} is out of range", hint=_range_hint(knob))
    return number


def _root_path(value: Any, place: str) -> str:
    path = str(value).rstrip("/")
    if path and not _ROOT_PATH.fullmatch(path):
        raise UsageError(f"{place}: '{value}' is not a path", hint="For example /penstock")
    return path


def _range_hint(knob: Knob) -> str:
    span = knob.span.replace(" – ", " to ")
    return f"{knob.name} ({knob.about}) takes {span}; the default is {plain(knob.default)}."


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

"""Options shared by the commands."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.config import Config

_Command = Callable[..., Any]
_UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


@dataclass(frozen=True, slots=True)
class DatabaseOptions:
    """Options that name the database and the settings."""

    database_url: str | None
    data_dir: Path | None
    toml_path: Path | None
    settings: tuple[str, ...]

    def as_words(self) -> tuple[str, ...]:
        """These options as they are typed, for commands that are told to a person. A URL may hold a password."""
        words: list[str] = []
        if self.data_dir is not None:
            words += ["--data-dir", str(self.data_dir)]
        if self.database_url is not None:
            words += ["--database-url", "URL" if "@" in self.database_url else self.database_url]
        if self.toml_path is not None:
            words += ["--config", str(self.toml_path)]
        return tuple(words)


def database_options(command: _Command) -> _Command:
    """Add --database-url, --data-dir, --config and --set; the command gets them as `database`."""
    return gather(
        command,
        "database",
        DatabaseOptions,
        (
            click.option("--database-url", metavar="URL", help="PostgreSQL to use instead of the embedded one."),
            click.option(
                "--data-dir",
                type=click.Path(path_type=Path, file_okay=False),
                help="Directory of the embedded PostgreSQL.  [default: ./.penstock]",
            ),
            click.option(
                "--config",
                "toml_path",
                type=click.Path(path_type=Path, dir_okay=False),
                help="TOML file of settings.  [default: penstock.toml in the data directory, if there]",
            ),
            click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="One setting; repeatable."),
        ),
    )


log_format_option = click.option(
    "--log-format", type=click.Choice(["text", "json"]), help="Lines of the log: for people, or a JSON object each."
)


def gather(
    command: _Command, name: str, kind: type[Any], options: Sequence[Callable[[_Command], _Command]]
) -> _Command:
    """Add options to a command, which gets their values under one name, as the dataclass `kind`."""

    @functools.wraps(command)
    def call(**given: Any) -> Any:
        values = kind(**{field.name: given.pop(field.name) for field in dataclasses.fields(kind)})
        return command(**given, **{name: values})

    gathered: _Command = call
    for option in reversed(options):
        gathered = option(gathered)
    return gathered


def load_config(
    database: DatabaseOptions,
    *,
    root_path: str | None = None,
    public_url: str | None = None,
    **flags: float | str | None,
) -> Config:
    """Load the configuration from file, environment and command line; `flags` are options that name a setting."""
    from penstock import config_sources

    overrides = []
    for setting in database.settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise UsageError(f"--set {setting}: expected NAME=VALUE", hint="For example --set max_attempts=3")
        overrides.append((name.strip(), value.strip()))
    return config_sources.load(
        toml_path=database.toml_path or config_sources.find_toml(database.data_dir),
        overrides=overrides,
        flags=flags,
        database_url=database.database_url,
        data_dir=database.data_dir,
        root_path=root_path,
        public_url=public_url,
    )


def parse_span(text: str, digits: int) -> int | None:
    """Seconds of a span of time such as 90s, 30m, 2h or 1d, with at most so many digits; None if it is none."""
    match = re.fullmatch(rf"(\d{{1,{digits}}})([smhd])", text.strip())
    return int(match[1]) * _UNITS_S[match[2]] if match else None

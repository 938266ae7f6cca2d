"""Options shared by the commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.config import Config

_Command = Callable[..., Any]


def database_options(command: _Command) -> _Command:
    """--database-url, --data-dir, --config, --set: where the data is and how to treat it."""
    for option in reversed(
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
                help="TOML file of settings.",
            ),
            click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="One setting; repeatable."),
        )
    ):
        command = option(command)
    return command


def load_config(
    database_url: str | None,
    data_dir: Path | None,
    toml_path: Path | None,
    settings: tuple[str, ...],
    **flags: float | None,
) -> Config:
    """The configuration from file, environment and command line; `flags` are options that name a setting."""
    from penstock import config as configuration

    overrides = []
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise UsageError(f"--set {setting}: expected NAME=VALUE", hint="For example --set max_attempts=3")
        overrides.append((name.strip(), value.strip()))
    if toml_path is None:
        import os

        found = os.environ.get("PENSTOCK_CONFIG")
        toml_path = Path(found) if found else None
    return configuration.load(
        toml_path=toml_path, overrides=overrides, flags=flags, database_url=database_url, data_dir=data_dir
    )

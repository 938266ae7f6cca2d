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
    """Add --database-url, --data-dir, --config and --set: the database and the settings."""
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
                help="TOML file of settings.  [default: penstock.toml in the data directory, if there]",
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
    *,
    root_path: str | None = None,
    public_url: str | None = None,
    **flags: float | None,
) -> Config:
    """Load the configuration from file, environment and command line; `flags` are options that name a setting."""
    from penstock import config as configuration

    overrides = []
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise UsageError(f"--set {setting}: expected NAME=VALUE", hint="For example --set max_attempts=3")
        overrides.append((name.strip(), value.strip()))
    return configuration.load(
        toml_path=toml_path or _find_toml(data_dir),
        overrides=overrides,
        flags=flags,
        database_url=database_url,
        data_dir=data_dir,
        root_path=root_path,
        public_url=public_url,
    )


def _find_toml(data_dir: Path | None) -> Path | None:
    """Find the settings file if no option names it: PENSTOCK_CONFIG, or the one in the data directory."""
    import os

    if named := os.environ.get("PENSTOCK_CONFIG"):
        return Path(named)
    inside = (data_dir or Path(os.environ.get("PENSTOCK_DATA_DIR", ".penstock"))) / "penstock.toml"
    return inside if inside.is_file() else None

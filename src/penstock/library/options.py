"""Configuration of the library: as of the commands, from the environment and `penstock.toml`, with what the caller
says before both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from penstock import config_sources
from penstock.config import Config


def load_config(
    data_dir: str | Path | None,
    database_url: str | None,
    settings: Mapping[str, object] | None,
    *,
    concurrency: int | None = None,
) -> Config:
    """Load the configuration; raises UsageError for a setting that does not exist or is out of range."""
    folder = None if data_dir is None else Path(data_dir)
    return config_sources.load(
        toml_path=config_sources.find_toml(folder),
        overrides=[(name, str(value)) for name, value in (settings or {}).items()],
        flags={"concurrency": concurrency},
        database_url=database_url,
        data_dir=folder,
    )

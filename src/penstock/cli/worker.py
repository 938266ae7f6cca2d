"""`penstock worker`: workers alone, on any machine that reaches the database."""

from __future__ import annotations

import logging
from pathlib import Path

import click

from penstock.cli.options import database_options, load_config
from penstock.cli.serve import choose_providers, provider_options


@click.command(short_help="Run workers for a server elsewhere.")
@provider_options
@click.option("--workers", default=1, show_default=True, type=click.IntRange(1, 256), help="Worker processes.")
@click.option("--quiet", is_flag=True, help="Log warnings only.")
@database_options
def worker(
    base_url: str | None,
    api_key_env: str | None,
    api_key_file: str | None,
    ca_file: str | None,
    proxy: str | None,
    workers: int,
    quiet: bool,
    database_url: str | None,
    data_dir: Path | None,
    toml_path: Path | None,
    settings: tuple[str, ...],
) -> None:
    """Work off the batches that servers on the same database accept. Configure the same providers as theirs."""
    from penstock.server.serve import work

    config = load_config(database_url, data_dir, toml_path, settings)
    providers = choose_providers(config, base_url, api_key_env, api_key_file, ca_file, proxy)
    work(config, providers, workers, log_level=logging.WARNING if quiet else logging.INFO)

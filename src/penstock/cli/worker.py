"""`penstock worker`: workers alone, on any machine that reaches the database."""

from __future__ import annotations

import logging

import click

from penstock.cli.options import DatabaseOptions, database_options, load_config, log_format_option
from penstock.cli.serve import ProviderOptions, choose_providers, provider_options


@click.command(short_help="Run workers for a server elsewhere.")
@provider_options
@click.option("--workers", default=1, show_default=True, type=click.IntRange(1, 256), help="Worker processes.")
@click.option(
    "--metrics-port", type=click.IntRange(0, 65_535), help="Port for Prometheus; without it there is none. 0: any."
)
@click.option("--metrics-host", default="127.0.0.1", show_default=True, help="Address for Prometheus.")
@click.option("--quiet", is_flag=True, help="Log warnings only.")
@log_format_option
@database_options
def worker(
    provider: ProviderOptions,
    workers: int,
    metrics_port: int | None,
    metrics_host: str,
    quiet: bool,
    log_format: str | None,
    database: DatabaseOptions,
) -> None:
    """Work off the batches that servers on the same database accept. Configure the same providers as theirs."""
    from penstock.server.serve import WorkPlan, work

    config = load_config(database, log_format=log_format)
    providers = choose_providers(config, provider)
    log_level = logging.WARNING if quiet else logging.INFO
    work(WorkPlan(config, providers, workers, metrics_host, metrics_port, log_level))

"""`penstock serve`: the batch API and its workers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.options import DatabaseOptions, database_options, gather, load_config, log_format_option
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.dispatch.providers import Provider


@dataclass(frozen=True, slots=True)
class ProviderOptions:
    """Options that name one provider for every model: its URL, its key and the way there."""

    base_url: str | None
    api_key_env: str | None
    api_key_file: str | None
    ca_file: str | None
    proxy: str | None
    max_concurrency: int | None
    max_rpm: int | None
    max_tpm: int | None


def provider_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --base-url, its key and the way there; the command gets them as `provider`."""
    return gather(
        command,
        "provider",
        ProviderOptions,
        (
            click.option("--base-url", metavar="URL", help="Endpoint that serves every model, in place of providers."),
            click.option("--api-key-env", metavar="NAME", help="Variable that holds the endpoint's key."),
            click.option("--api-key-file", metavar="FILE", help="File that holds the endpoint's key."),
            click.option("--ca-file", metavar="FILE", help="Certificates to trust instead of the system's (PEM)."),
            click.option("--proxy", metavar="URL", help="HTTP proxy to reach the endpoint by."),
            click.option("--max-concurrency", type=click.IntRange(1), help="Most calls at a time, over all processes."),
            click.option("--rpm", "max_rpm", type=click.IntRange(1), help="Most requests a minute, of each model."),
            click.option("--tpm", "max_tpm", type=click.IntRange(1), help="Most tokens a minute, of each model."),
        ),
    )


def choose_providers(config: Config, named: ProviderOptions, rows_paths: tuple[str, ...] = ()) -> tuple[Provider, ...]:
    """Choose the providers of the file or of the command line. Raises if a key or a certificate cannot be read."""
    providers = name_providers(config, named, rows_paths)
    for provider in providers:
        provider.check()
    return providers


def name_providers(config: Config, named: ProviderOptions, rows_paths: tuple[str, ...] = ()) -> tuple[Provider, ...]:
    """The same, with keys and certificates not looked at yet."""
    from penstock.dispatch.http.connect import ConnectOptions
    from penstock.dispatch.providers import single
    from penstock.dispatch.target import check_connect_flags

    check_connect_flags(named.base_url, named.ca_file, named.proxy)
    if named.base_url is None:
        if rows_paths:
            raise UsageError("--rows-path without --base-url", hint="Providers in penstock.toml have rows_paths.")
        if named.max_concurrency or named.max_rpm or named.max_tpm:
            raise UsageError("a limit without --base-url", hint="Providers in penstock.toml have limits of their own.")
        if named.api_key_env or named.api_key_file:
            raise UsageError("a key without --base-url", hint="Providers in penstock.toml name their own keys.")
        if not config.providers and not config.processors:
            raise UsageError(
                "no provider is configured: no model would be served",
                hint="Give --base-url URL, or [[providers]] or [[processors]] in penstock.toml (docs/serve.md).",
            )
        return config.providers
    if config.providers:
        raise UsageError(
            "--base-url, and providers in the configuration", hint="Add the endpoint to the file, or use no file."
        )
    if named.api_key_env and named.api_key_file:
        raise UsageError("--api-key-env and --api-key-file", hint="Give one of them.")
    options = ConnectOptions(ca_file=named.ca_file, proxy=named.proxy)
    one = single(named.base_url, named.api_key_env, named.api_key_file, options, rows_paths)
    limits = {name: getattr(named, name) for name in ("max_concurrency", "max_rpm", "max_tpm")}
    return (replace(one, **limits),)


@click.command(short_help="Serve the batch API, with workers.")
@provider_options
@click.option(
    "--rows-path",
    "rows_paths",
    metavar="PATH",
    multiple=True,
    help="What HTTP jobs may ask of --base-url, such as 'GET /prices/' for all below it. May be repeated.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8080, show_default=True, type=click.IntRange(0, 65_535), help="0 takes a free one.")
@click.option("--workers", default=1, show_default=True, type=click.IntRange(0, 256), help="Worker processes.")
@click.option("--root-path", metavar="PATH", help="Prefix that a proxy puts before every path, such as /penstock.")
@click.option(
    "--public-url", metavar="URL", help="URL by which clients reach the server, if not the address it listens on."
)
@click.option("--forwarded-prefix", is_flag=True, help="Trust the proxy's X-Forwarded-Prefix.")
@click.option("--quiet", is_flag=True, help="Log warnings only, no requests.")
@log_format_option
@database_options
def serve(
    provider: ProviderOptions,
    rows_paths: tuple[str, ...],
    host: str,
    port: int,
    workers: int,
    root_path: str | None,
    public_url: str | None,
    forwarded_prefix: bool,
    quiet: bool,
    log_format: str | None,
    database: DatabaseOptions,
) -> None:
    """Serve the batch API for OpenAI and Anthropic clients, and work off their batches.

    Without API keys the server has one user and listens on this machine only; `penstock keys create` makes keys.
    """
    from penstock.server.serve import ServePlan
    from penstock.server.serve import serve as run

    config = load_config(database, root_path=root_path, public_url=public_url, log_format=log_format)
    providers = choose_providers(config, provider, rows_paths)
    for sink in config.sinks:
        sink.secret()  # fail now rather than at the first answer
    log_level = logging.WARNING if quiet else logging.INFO
    run(ServePlan(config, providers, host, port, workers, forwarded_prefix, log_level))

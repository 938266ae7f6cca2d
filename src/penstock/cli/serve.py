"""`penstock serve`: the batch API and its workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.options import database_options, load_config
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.providers import Provider


def provider_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--base-url and its key: one provider for every model."""
    for option in reversed(
        (
            click.option("--base-url", metavar="URL", help="Endpoint that serves every model, in place of providers."),
            click.option("--api-key-env", metavar="NAME", help="Variable that holds the endpoint's key."),
            click.option("--api-key-file", metavar="FILE", help="File that holds the endpoint's key."),
        )
    ):
        command = option(command)
    return command


def chosen_providers(
    config: Config, base_url: str | None, api_key_env: str | None, api_key_file: str | None
) -> tuple[Provider, ...]:
    """The providers of the file or of the command line, with keys that can be read."""
    from penstock.providers import single

    if base_url is None:
        if api_key_env or api_key_file:
            raise UsageError("a key without --base-url", hint="Providers in penstock.toml name their own keys.")
        if not config.providers:
            raise UsageError(
                "no provider is configured: nobody would serve any model",
                hint="Give --base-url URL, or [[providers]] in penstock.toml (docs/serve.md).",
            )
        providers = config.providers
    elif config.providers:
        raise UsageError(
            "--base-url, and providers in the configuration", hint="Add the endpoint to the file, or use no file."
        )
    else:
        if api_key_env and api_key_file:
            raise UsageError("--api-key-env and --api-key-file", hint="Give one of them.")
        providers = (single(base_url, api_key_env, api_key_file),)
    for provider in providers:
        provider.api_key()
    return providers


@click.command(short_help="Serve the batch API, with workers.")
@provider_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8080, show_default=True, type=click.IntRange(0, 65_535), help="0 takes a free one.")
@click.option("--workers", default=1, show_default=True, type=click.IntRange(0, 256), help="Worker processes.")
@click.option("--root-path", metavar="PATH", help="What a proxy puts before every path, such as /penstock.")
@click.option("--public-url", metavar="URL", help="Where clients reach the server, if not where it listens.")
@click.option("--forwarded-prefix", is_flag=True, help="Trust the proxy's X-Forwarded-Prefix.")
@click.option("--quiet", is_flag=True, help="Log warnings only, no requests.")
@database_options
def serve(
    base_url: str | None,
    api_key_env: str | None,
    api_key_file: str | None,
    host: str,
    port: int,
    workers: int,
    root_path: str | None,
    public_url: str | None,
    forwarded_prefix: bool,
    quiet: bool,
    database_url: str | None,
    data_dir: Path | None,
    toml_path: Path | None,
    settings: tuple[str, ...],
) -> None:
    """Serve the batch API for OpenAI and Anthropic clients, and work off what they send.

    Without API keys the server has one user and listens on this machine only; `penstock keys create` makes keys.
    """
    from penstock.cli.serving import ServePlan
    from penstock.cli.serving import serve as run

    config = load_config(database_url, data_dir, toml_path, settings, root_path=root_path, public_url=public_url)
    providers = chosen_providers(config, base_url, api_key_env, api_key_file)
    for sink in config.sinks:
        sink.secret()  # fail now rather than at the first answer
    run(ServePlan(config, providers, host, port, workers, forwarded_prefix, verbose=not quiet))

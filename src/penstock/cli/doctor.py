"""`penstock doctor`: examine an installation and say what is wrong, and what to do."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from penstock.cli.client import print_json
from penstock.cli.figures import count_text
from penstock.cli.options import DatabaseOptions, database_options, load_config
from penstock.cli.serve import ProviderOptions, name_providers, provider_options
from penstock.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from penstock.observe.doctor.finding import Finding

_COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}


@click.command(short_help="Examine an installation: what is wrong, and what to do.")
@provider_options
@click.option(
    "--workers",
    default=1,
    show_default=True,
    type=click.IntRange(0, 256),
    help="Worker processes of the server that is examined.",
)
@click.option("--json", "as_json", is_flag=True, help="Answer as JSON.")
@database_options
def doctor(provider: ProviderOptions, workers: int, as_json: bool, database: DatabaseOptions) -> None:
    """Examine the configuration, the machine, the database, the providers and the work; change nothing.

    Give the options that `penstock serve` gets. Exit code 1 if there is a problem; warnings do not count.
    """
    import asyncio
    import logging

    from penstock.observe.doctor.examine import examine
    from penstock.observe.doctor.finding import Installation, refused
    from penstock.observe.logs import log_to

    log_to(logging.NullHandler(), logging.CRITICAL)
    found: list[Finding] = []

    def report(finding: Finding) -> None:
        found.append(finding)
        if not as_json:
            _show(finding)

    try:
        config = load_config(database)
        providers = name_providers(config, provider) if config.providers or provider.base_url else ()
    except UsageError as error:
        report(refused("configuration", error))
    else:
        asyncio.run(examine(Installation(config, providers, workers), report))
    problems = sum(finding.result == "problem" for finding in found)
    warnings = sum(finding.result == "warning" for finding in found)
    if as_json:
        print_json({"problems": problems, "warnings": warnings, "findings": [asdict(finding) for finding in found]})
    else:
        told = (count_text(len(found), "finding"), count_text(problems, "problem"), count_text(warnings, "warning"))
        click.echo("{}: {}, {}".format(*told))
    raise SystemExit(ExitCode.OPERATIONAL if problems else ExitCode.OK)


def _show(finding: Finding) -> None:
    result = click.style(f"{finding.result:<8}", fg=_COLOURS[finding.result])
    click.echo(f"{result} {finding.check}: {finding.seen}")
    if finding.remedy:
        click.echo(f"{'':9}{finding.remedy}")

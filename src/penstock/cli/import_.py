"""`penstock import`: move in from a database of the eager layout, and back."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

import click

from penstock.cli.client import print_json
from penstock.cli.options import DatabaseOptions, database_options, load_config, parse_span
from penstock.db.start import check_conninfo, explain_database_errors, migrate_database, start_database
from penstock.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.moving.batch_import import BatchWishes
    from penstock.moving.report import Report
    from penstock.moving.source import Source

_GOES_ON = (
    "Nothing is half imported: each file and batch is whole or not there. Check that the database has room and may be"
    " written to; the same command goes on where this one ended."
)


@click.command("import", short_help="Move in from a database with a row per request, or back.")
@click.option("--from", "source_url", metavar="URL", help="PostgreSQL of the old system; it is only read.")
@click.option("--schema", default="public", show_default=True, help="Schema of the old system's tables.")
@click.option("--map", "maps", multiple=True, metavar="NAME=NAME", help="What a table or column is called; repeatable.")
@click.option("--only", multiple=True, metavar="BATCH", help="Import this batch, with its file; repeatable.")
@click.option("--owner", default="local", show_default=True, help="Owner of what has none in the source.")
@click.option("--extend", metavar="SPAN", help="Give unfinished batches at least so long from now on, such as 6h.")
@click.option("--workers-stopped", is_flag=True, help="Go on although requests were claimed of late.")
@click.option("--dry-run", is_flag=True, help="Say what would be done; change nothing.")
@click.option("--verify", is_flag=True, help="Then read both sides and compare everything.")
@click.option("--back", is_flag=True, help="Hand unfinished batches, and what was answered, back to the old system.")
@click.option("--to", "back_url", metavar="URL", help="With --back: PostgreSQL of the old system, which is written.")
@click.option("--base-url", metavar="URL", help="With --back: endpoint of requests that were made here.")
@database_options
@click.option("--json", "as_json", is_flag=True, help="Report as JSON.")
def import_command(
    source_url: str | None,
    back_url: str | None,
    back: bool,
    database: DatabaseOptions,
    as_json: bool,
    **given: Any,
) -> None:
    """Bring files, batches and answers from a database that has a row for each request.

    Answers become results, and nothing that was answered is called again; what was pending, claimed or in process is
    run by Penstock. The source is only read. Each file and each batch is stored whole or not at all: interrupted or
    killed, the same command goes on, and run later, it brings what has come since.

    The maintenance window step by step, and the way back: docs/howto/moving-in.md.
    """
    if back != (back_url is not None) or back == (source_url is not None):
        raise UsageError(
            "import takes --from URL, or --back --to URL",
            hint="See `penstock import --help` and docs/howto/moving-in.md.",
        )
    config = load_config(database)
    if back_url is not None:
        report = _hand_back(config, check_conninfo(back_url, "--to"), as_json, given)
    else:
        report = _bring(config, check_conninfo(source_url or "", "--from"), as_json, given)
    if as_json:
        print_json(report.as_json())
    else:
        _print(report)
    if report.differences:
        raise SystemExit(ExitCode.OPERATIONAL)


def _bring(config: Config, source_url: str, as_json: bool, given: dict[str, Any]) -> Report:
    from penstock.moving.layout import Layout
    from penstock.moving.source import open_source

    layout = Layout.parse(given["schema"], given["maps"])
    only = [_batch_id(text) for text in given["only"]]
    wishes = _wishes(config, given)
    with open_source(source_url, layout) as source:
        if given["dry_run"]:
            return _plan_only(config, source, only)
        with start_database(config) as conninfo:
            migrate_database(conninfo)
            with explain_database_errors(_GOES_ON):
                return _import(config, source, conninfo, only, wishes, as_json, given)


def _plan_only(config: Config, source: Source, only: list[UUID]) -> Report:
    """What an import would find. Penstock's database is not even opened."""
    from penstock.moving.dry_run import foresee
    from penstock.moving.importing import make_plan

    return foresee(source, make_plan(source, only, _serves(config)))


def _import(
    config: Config,
    source: Source,
    conninfo: str,
    only: list[UUID],
    wishes: BatchWishes,
    as_json: bool,
    given: dict[str, Any],
) -> Report:
    from penstock.cli.progress import Display, duration
    from penstock.moving.importing import Import, check_quiet, make_plan
    from penstock.moving.target import connect_target
    from penstock.moving.verify import Verification
    from penstock.moving.watch import Watch

    if not given["workers_stopped"]:
        with source.snapshot():
            check_quiet(source.activity())
    plan = make_plan(source, only, _serves(config))

    with Display(quiet=as_json) as display, connect_target(conninfo) as target:

        def watch(name: str) -> Watch:
            display.stage(name)

            def show(done: int, total: int) -> None:
                rate = display.rate(done)
                left = f"  ETA {duration((total - done) / rate)}" if rate > 0 and total > done else ""
                display.show(name, done, total, f"{done:,}/{total:,} rows  {rate:,.0f}/s{left}")

            return Watch(show)

        report = Import(source, target, plan, wishes, config.intake, watch("importing")).run()
        if given["verify"]:
            Verification(source, target, plan, wishes, watch("comparing")).run()
        return report


def _hand_back(config: Config, back_url: str, as_json: bool, given: dict[str, Any]) -> Report:
    from penstock.cli.progress import Display
    from penstock.moving.back import BackWishes, HandBack, check_stopped
    from penstock.moving.layout import Layout
    from penstock.moving.old import open_old_database
    from penstock.moving.target import connect_target
    from penstock.moving.watch import Watch

    layout = Layout.parse(given["schema"], given["maps"])
    wishes = BackWishes([_batch_id(text) for text in given["only"]], given["base_url"], given["dry_run"])
    with (
        open_old_database(back_url, layout) as old,
        start_database(config) as conninfo,
        explain_database_errors(_GOES_ON),
        connect_target(conninfo) as here,
        Display(quiet=as_json) as display,
    ):
        if not given["dry_run"]:
            migrate_database(conninfo)
        if not given["workers_stopped"]:
            check_stopped(here, config.liveness.heartbeat_grace_s)
        display.stage("handing back")
        watch = Watch(lambda done, _total: display.amount("handing back", done, None, "rows"))
        return HandBack(here, old, wishes, watch).run()


def _serves(config: Config) -> Any:
    """Whether a model is served; without providers in the configuration, a server's --base-url serves every model."""
    from penstock.dispatch.providers import Providers

    known = Providers(config.providers)
    return lambda model: not len(known) or known.pool_of(model) is not None


def _wishes(config: Config, given: dict[str, Any]) -> BatchWishes:
    from penstock.dispatch.providers import DEFAULT_NAME, Providers
    from penstock.moving.batch_import import BatchWishes
    from penstock.pools import batch_pool

    known = Providers(config.providers)
    extend_s = None if given["extend"] is None else parse_span(given["extend"], 4)
    if given["extend"] is not None and extend_s is None:
        raise UsageError(f"--extend {given['extend']}: expected a span of time", hint="For example 90m, 6h or 2d.")
    extend = None if extend_s is None else timedelta(seconds=extend_s)
    # A batch of a pool that nobody serves is moved to one that does, by the servers.
    return BatchWishes(given["owner"], lambda model: known.pool_of(model) or batch_pool(DEFAULT_NAME), extend)


def _batch_id(text: str) -> UUID:
    from penstock.model import parse_id

    found = parse_id("batch", text.strip())
    if found is None:
        raise UsageError(f"--only {text}: not the id of a batch", hint="Write the uuid that the old system has.")
    return found


def _print(report: Report) -> None:
    from penstock.cli.figures import size_text

    say = click.echo
    verb = "would be imported" if report.dry_run else "imported"
    files = ", ".join(
        f"{count:,} {what}" for what, count in report.files.items() if what not in ("lines", "body_bytes")
    )
    say(f"files    {files or 'none'}; {report.files['lines']:,} lines, {size_text(report.files['body_bytes'])}")
    say(f"batches  {', '.join(f'{count:,} {what}' for what, count in report.results.items()) or 'none'}")
    for name, counts in (("before", report.before), ("after", report.after)):
        told = ", ".join(f"{count:,} {state}" for state, count in counts.items() if count)
        say(f"{name:<8} {told or 'no requests'}")
    for line in report.batches:
        for note in line.notes:
            say(f"note     batch {line.id}: {note}")
    for what, count in report.notes.items():
        if count:
            say(f"note     {count:,} {what}")
    for what, count in report.left_behind.items():
        if count:
            say(f"left     {count:,} {what}")
    if report.verified:
        told = ", ".join(f"{count:,} {what}" for what, count in report.verified.items())
        say(f"compared {told}" + ("" if report.differences else "; no difference"))
    for difference in report.differences:
        click.echo(f"DIFFERS  {difference}", err=True)
    if not report.dry_run:
        rate = report.rows / report.seconds if report.seconds else 0
        say(f"{verb} {report.rows:,} rows in {report.seconds:,.1f} s ({rate:,.0f}/s)")

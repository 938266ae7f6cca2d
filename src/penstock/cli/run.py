"""`penstock run`: a file of requests in, every answer out."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import click

from penstock.cli.options import DatabaseOptions, database_options, load_config, parse_span
from penstock.cli.tables import TableOptions, table_options
from penstock.errors import PenstockError, UsageError, report


def parse_deadline(_: click.Context, __: click.Parameter, value: str | None) -> timedelta | None:
    if value is None:
        return None
    seconds = parse_span(value, digits=6)
    if not seconds:
        raise click.BadParameter(f"'{value}' is not a time span. Write 90s, 30m, 2h or 1d.")
    return timedelta(seconds=seconds)


@click.command(short_help="Work off a file of requests or rows, write every answer.")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path, allow_dash=True))
@click.option("--base-url", metavar="URL", help="Endpoint to call, ending in /v1.")
@click.option("--processor", metavar="MODULE:FUNCTION", help="Python function to call instead.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, allow_dash=True),
    help="File for the answers; - is standard output.",
)
@table_options
@click.option(
    "--concurrency",
    type=int,
    help="Most calls in flight per worker process.  [default: as many as pay, found out; 64 of a function]",
)
@click.option("--rpm", type=click.IntRange(1), help="Most requests a minute, of each model, over all workers.")
@click.option("--tpm", type=click.IntRange(1), help="Most tokens a minute, of each model, over all workers.")
@click.option("--workers", type=click.IntRange(1, 64), default=1, show_default=True, help="Worker processes.")
@click.option("--api-key-env", metavar="NAME", help="Environment variable of the key.  [default: OPENAI_API_KEY]")
@click.option("--api-key-file", metavar="PATH", help="File that holds the key.")
@click.option("--ca-file", metavar="PATH", help="Certificates to trust instead of the system's (PEM).")
@click.option("--proxy", metavar="URL", help="HTTP proxy to reach the endpoint by.")
@click.option(
    "--deadline",
    metavar="TIME",
    callback=parse_deadline,
    help="Give up after this long (90s, 30m, 2h, 1d): what is done is written, the rest goes to the errors.",
)
@click.option("--retry-failed", is_flag=True, help="Run again what failed in this run before; nothing else.")
@click.option("--continue", "continues", is_flag=True, help="Of a file that has grown, call what is new alone.")
@click.option("--partial", is_flag=True, help="Write what is there when the run stops before its end.")
@click.option("--new", "start_anew", is_flag=True, help="Start over, even if this run is known.")
@click.option("--console", is_flag=True, help="Serve the console on this machine while it runs.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON; no progress display.")
@click.option("-v", "--verbose", is_flag=True, help="Log to standard error.")
@database_options
def run(
    files: tuple[Path, ...],
    base_url: str | None,
    processor: str | None,
    output: Path | None,
    concurrency: int | None,
    rpm: int | None,
    tpm: int | None,
    workers: int,
    api_key_env: str | None,
    api_key_file: str | None,
    ca_file: str | None,
    proxy: str | None,
    deadline: timedelta | None,
    retry_failed: bool,
    continues: bool,
    partial: bool,
    start_anew: bool,
    console: bool,
    as_json: bool,
    verbose: bool,
    table: TableOptions,
    database: DatabaseOptions,
) -> None:
    """Work off FILE, one request or row each, and write every answer to the output.

    FILE is JSONL in the Batch API's shape, or a table: .csv, .tsv, .xlsx, or JSONL where --prompt is given or the
    output is .csv or .xlsx. Text may be packed (.gz, .zst). Images are a table too: a zip, a folder, or several files.
    Everything is stored before anything is sent. When interrupted, the same command goes on where it stopped; when
    done, it writes the output again. The run is the same if the file has the same content and the same is asked of it:
    another output, port, key or concurrency is no other run. Failures of requests go to a file beside the output:
    answers.jsonl has answers.errors.jsonl. A table's output is a sheet (.csv, .xlsx or .jsonl, each also with .gz) of
    all its rows, each with its result.

    \b
    penstock run requests.jsonl --base-url http://127.0.0.1:8000/v1 -o answers.jsonl
    penstock run rows.csv --processor mymodule:work -o answers.xlsx
    penstock run products.csv --base-url http://127.0.0.1:8000/v1 --model small \\
      --prompt 'Which category is {{ title }}?' -o answers.csv
    penstock run photos/ --base-url http://127.0.0.1:8000/v1 --model small --prompt 'What is this?' -o answers.csv
    """
    from penstock.cli import tables
    from penstock.dispatch.target import make_target

    try:
        config = load_config(database, concurrency=concurrency)
        target = make_target(base_url, processor, api_key_env, api_key_file, ca_file, proxy, rpm, tpm)
        rows = tables.plan_rows(files, table, target) if tables.is_table(files, table, output) else None
        if rows is None and table.any:
            raise UsageError(
                f"{files[0]} is no table: --model, --prompt, --sheet, --limit and the like are for tables",
                hint="A table's name ends in .csv, .tsv, .xlsx, .zip or as an image's; "
                "with --prompt or -o answers.csv it may be JSONL.",
            )
        if rows is not None and table.dry_run:
            click.echo(tables.first_request(rows, config))
            return
        if output is None:
            ending = "jsonl" if rows is None else "xlsx"
            raise UsageError("-o is missing", hint=f"Name the file for the answers, such as -o answers.{ending}")
        if rows is not None and str(output) != "-":
            tables.check_output(output)
        if start_anew and (retry_failed or continues):
            other = "--retry-failed" if retry_failed else "--continue"
            raise UsageError(f"--new and {other} at once", hint="--new runs everything again. Give one.")
    except PenstockError as error:
        report(error, as_json=as_json)
        raise SystemExit(error.exit_code) from error

    import sys

    from penstock.cli.plan import Plan
    from penstock.cli.running import execute

    plan = Plan(
        files[0],
        output,
        target if rows is None else rows.target,
        workers,
        deadline,
        rows=rows,
        start_anew=start_anew,
        retry_failed=retry_failed,
        continues=continues,
        partial=partial,
        as_json=as_json,
        verbose=verbose,
        console=console,
        command=tuple(sys.argv[1:]),
        place=database.as_words(),
    )
    raise SystemExit(execute(plan, config))

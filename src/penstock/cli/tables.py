"""Options of `penstock run` over a table: which rows, and what is asked of the model for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.options import gather
from penstock.errors import UsageError

if TYPE_CHECKING:
    from uuid import UUID

    from penstock.config import Config
    from penstock.db.pool import Connection
    from penstock.dispatch.target import Target
    from penstock.intake.ingest import StoredTable
    from penstock.intake.local_table import LocalTable
    from penstock.intake.tables.table import TableSpec

OWNER = "local"
"""Owner of everything that commands on this machine make."""

_PACKED = (".gz", ".zst")
_TABLES = (".csv", ".tsv", ".xlsx", ".zip", ".png", ".jpg", ".jpeg", ".gif", ".webp")
_OUTPUTS = "answers.csv, answers.xlsx or answers.jsonl, each also with .gz"


@dataclass(frozen=True, slots=True)
class TableOptions:
    """Options that concern the rows of a table."""

    model: str | None
    prompt: str | None
    system: str | None
    schema: Path | None
    sheet: str | None
    limit: int | None
    dry_run: bool

    @property
    def any(self) -> bool:
        return any((self.model, self.prompt, self.system, self.schema, self.sheet, self.limit, self.dry_run))


def table_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options; the command gets them as `table`."""
    return gather(
        command,
        "table",
        TableOptions,
        (
            click.option("--model", metavar="NAME", help="Model to ask for each row of a table."),
            click.option("--prompt", metavar="TEXT", help="Prompt for each row: 'Which category is {{ title }}?'"),
            click.option("--system", metavar="TEXT", help="System message for each row, a template too."),
            click.option(
                "--schema",
                type=click.Path(path_type=Path, dir_okay=False),
                help="JSON schema of the answer; its properties become columns.",
            ),
            click.option("--sheet", metavar="NAME", help="Sheet of a workbook, by name or number."),
            click.option("--limit", type=click.IntRange(1), metavar="N", help="The first N rows of a table alone."),
            click.option("--dry-run", is_flag=True, help="Print the request of a table's first row; send nothing."),
        ),
    )


def is_table(paths: Sequence[Path], options: TableOptions) -> bool:
    """Whether the input is to be read as a table: several files, or a folder, are a table of images; one file is a
    table by its name, or because a prompt asks for something of each row."""
    if len(paths) > 1 or paths[0].is_dir():
        return True
    name = paths[0].name.lower()
    for packed in _PACKED:
        name = name.removesuffix(packed)
    return options.prompt is not None or name.endswith(_TABLES)


@dataclass(frozen=True, slots=True)
class RowsPlan:
    """How `penstock run` reads a table, and what it does with each row."""

    source: LocalTable
    spec: TableSpec
    target: Target
    limit: int | None


def plan_rows(paths: Sequence[Path], options: TableOptions, target: Target) -> RowsPlan:
    """Plan what is done with the rows of a table; checked as far as it can be without a row."""
    from penstock.intake.local_table import find_table
    from penstock.intake.tables.table import TableSpec

    definition = _definition(options)
    if definition is None and target.processor is None:
        raise UsageError(
            f"{paths[0]}: what is to be done with each row?",
            hint="--prompt with --model asks a model; --processor module:function calls a function.",
        )
    if definition is not None and target.base_url is None:
        raise UsageError("--prompt with --processor", hint="--prompt asks the model at --base-url.")
    sheet = options.sheet
    spec = TableSpec(sheet=int(sheet) if sheet is not None and sheet.isdecimal() else sheet)
    return RowsPlan(find_table(paths), spec, replace(target, definition=definition), options.limit)


def _definition(options: TableOptions) -> dict[str, Any] | None:
    """What to ask of the model for each row; None where a function works the rows off."""
    if options.prompt is None:
        for flag, given in (("--model", options.model), ("--system", options.system), ("--schema", options.schema)):
            if given is not None:
                raise UsageError(f"{flag} without --prompt", hint="--prompt says what is asked for each row.")
        return None
    if options.model is None:
        raise UsageError("--prompt without --model", hint="Name the model to ask: --model NAME")
    from penstock.dispatch.rows.definition import parse_definition

    told = {"model": options.model, "prompt": options.prompt, "system": options.system}
    definition = {"type": "chat", "provider": "run", **{name: text for name, text in told.items() if text is not None}}
    if options.schema is not None:
        definition["schema"] = _read_schema(options.schema)
    parse_definition(definition)
    return definition


def _read_schema(path: Path) -> Any:
    import msgspec

    try:
        return msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise UsageError(f"--schema {path}: {error.strerror}", hint="Name a file that holds a JSON schema.") from None
    except msgspec.DecodeError as error:
        raise UsageError(f"--schema {path}: not JSON: {error}", hint="A schema is one JSON object.") from None


def check_output(output: Path) -> None:
    """Refuse an output whose name asks for no format of sheets."""
    from penstock.export.sheet_file import sheet_format

    if sheet_format(output.name) is None:
        raise UsageError(f"-o {output}: a table's answers are a sheet", hint=f"Name it {_OUTPUTS}.")


async def make_job(connection: Connection, batch_id: UUID, rows: RowsPlan, job_type: str, stored: StoredTable) -> None:
    """Make the run's batch a job: all of its rows are stored."""
    from penstock.batches.jobs import insert_job

    target = rows.target
    await insert_job(
        connection,
        batch_id,
        owner=OWNER,
        job_type=job_type,
        spec={"processor": target.definition or target.processor},
        client="local",
        columns=stored.columns,
        images=stored.images,
        ingested=True,
    )


def first_request(rows: RowsPlan, config: Config) -> bytes:
    """The request of the first row, as it would be sent; for a Python function, the row as it would get it."""
    import msgspec

    from penstock.dispatch.rows.definition import parse_definition
    from penstock.dispatch.rows.render import Image, render
    from penstock.dispatch.rows.template import RenderError

    with rows.source.open(rows.spec, config.tables, config.intake) as table:
        first = next(iter(table.rows()))
    row = msgspec.json.decode(first.body)["row"]
    if rows.target.definition is None:
        return msgspec.json.format(msgspec.json.encode(row))
    image = None if first.blob is None else Image(first.blob.media_type, first.blob.data)
    try:
        request = render(parse_definition(rows.target.definition), row, attempt=1, image=image)
    except RenderError as error:
        raise UsageError(
            f"{rows.source.name}: the first row: {error}", hint="Correct the prompt or the table."
        ) from None
    head = f"{request.method} {request.path}\n".encode()
    return head + (b"" if request.body is None else msgspec.json.format(request.body))

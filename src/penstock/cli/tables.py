"""Options about the rows of a table: which of them, and what is asked of the model for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
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
    from penstock.intake.tables.table import TableRow, TableSpec

OWNER = "local"
"""Owner of everything that commands on this machine make."""

_TABLES = (".csv", ".tsv", ".xlsx", ".zip", ".png", ".jpg", ".jpeg", ".gif", ".webp")
_TEXT = (".csv", ".tsv", ".txt", ".jsonl", ".ndjson")
_OUTPUTS = "answers.csv, answers.xlsx or answers.jsonl, each also with .gz"


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Options that say what is asked of a model for each row."""

    model: str | None
    prompt: str | None
    system: str | None
    schema: Path | None

    def definition(self, provider: str) -> dict[str, Any] | None:
        """What to ask of the provider's model for each row; None if no prompt is given."""
        if self.prompt is None:
            for flag, given in (("--model", self.model), ("--system", self.system), ("--schema", self.schema)):
                if given is not None:
                    raise UsageError(f"{flag} without --prompt", hint="--prompt says what is asked for each row.")
            return None
        if self.model is None:
            raise UsageError("--prompt without --model", hint="Name the model to ask: --model NAME")
        from penstock.dispatch.rows.definition import parse_definition

        told = {"model": self.model, "prompt": self.prompt, "system": self.system}
        definition = {"type": "chat", "provider": provider}
        definition |= {name: text for name, text in told.items() if text is not None}
        if self.schema is not None:
            definition["schema"] = read_json(self.schema, "--schema", "Name a file with one JSON object, the schema.")
        parse_definition(definition)
        return definition


@dataclass(frozen=True, slots=True)
class TableOptions(PromptOptions):
    """Options that concern the rows of a table."""

    sheet: str | None
    delimiter: str | None
    encoding: str | None
    limit: int | None
    dry_run: bool
    bom: bool

    @property
    def any(self) -> bool:
        return any(getattr(self, field.name) for field in fields(self))


_PROMPT_OPTIONS = (
    click.option("--prompt", metavar="TEXT", help="Prompt for each row: 'Which category is {{ title }}?'"),
    click.option("--model", metavar="NAME", help="Model that is asked the prompt."),
    click.option("--system", metavar="TEXT", help="System message for each row, a template too."),
    click.option(
        "--schema",
        type=click.Path(path_type=Path, dir_okay=False),
        help="JSON schema of the answer; its properties become columns.",
    ),
)
SHEET_OPTION = click.option("--sheet", metavar="NAME", help="Sheet of a workbook, by name or number.")

BOM_OPTION = click.option("--bom", is_flag=True, help="Begin a CSV sheet with a byte order mark, for Excel.")


def prompt_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a prompt; the command gets them as `asked`."""
    return gather(command, "asked", PromptOptions, _PROMPT_OPTIONS)


def table_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options; the command gets them as `table`."""
    return gather(
        command,
        "table",
        TableOptions,
        (
            *_PROMPT_OPTIONS,
            SHEET_OPTION,
            click.option("--delimiter", metavar="CHAR", help="What separates the cells of a CSV.  [default: found]"),
            click.option("--encoding", metavar="NAME", help="Encoding of a CSV, such as cp1252.  [default: found]"),
            click.option("--limit", type=click.IntRange(1), metavar="N", help="The first N rows of a table alone."),
            click.option("--dry-run", is_flag=True, help="Print the request of a table's first row; send nothing."),
            BOM_OPTION,
        ),
    )


def is_table(paths: Sequence[Path], options: TableOptions, output: Path | None) -> bool:
    """Whether the input is to be read as a table: several files, or a folder, are a table of images; one file is a
    table by its name, because a prompt asks for something of each row, or because the output can only be a sheet."""
    if len(paths) > 1 or paths[0].is_dir():
        return True
    is_sheet = output is not None and _plain_name(output).endswith((".csv", ".xlsx"))
    return is_sheet or options.prompt is not None or _plain_name(paths[0]).endswith(_TABLES)


def _plain_name(path: Path) -> str:
    """Name in lower case, without the ending of a packed file."""
    name = path.name.lower()
    return name.removesuffix(".gz").removesuffix(".zst")


@dataclass(frozen=True, slots=True)
class RowsPlan:
    """How `penstock run` reads a table, and what it does with each row."""

    source: LocalTable
    spec: TableSpec
    target: Target
    limit: int | None
    bom: bool
    """Whether a CSV sheet begins with a byte order mark."""

    def check(self, rows: Iterator[TableRow]) -> Iterator[TableRow]:
        """Pass the rows on; refuse them if they have not what the prompt asks of them."""
        from penstock.dispatch.rows.check import check_rendering
        from penstock.dispatch.rows.definition import parse_definition

        told = self.target.definition
        return rows if told is None else check_rendering(parse_definition(told), self.source.name, rows)


def plan_rows(paths: Sequence[Path], options: TableOptions, target: Target) -> RowsPlan:
    """Plan what is done with the rows of a table; checked as far as it can be without a row."""
    from penstock.intake.local_table import find_table

    one_at_a_time = [path for path in paths if _plain_name(path).endswith((*_TEXT, ".xlsx"))]
    if len(paths) > 1 and one_at_a_time:
        raise UsageError(
            f"{one_at_a_time[0]}: files of requests and tables are run one at a time",
            hint="Give the command once for each of them. Only images may be several files.",
        )
    definition = options.definition("run")
    if definition is None and target.processor is None:
        raise UsageError(
            f"{paths[0]}: what is to be done with each row?",
            hint="--prompt with --model asks a model; --processor module:function calls a function.",
        )
    if definition is not None and target.base_url is None:
        raise UsageError("--prompt with --processor", hint="--prompt asks the model at --base-url.")
    spec = _table_spec(paths[0], options)
    return RowsPlan(find_table(paths), spec, replace(target, definition=definition), options.limit, options.bom)


def _table_spec(path: Path, options: TableOptions) -> TableSpec:
    from penstock.intake.tables.table import TableSpec

    if options.sheet is not None and _plain_name(path).endswith(_TEXT):
        raise UsageError(f"--sheet: {path} has no sheets", hint="It is for workbooks (.xlsx).")
    delimiter = "\t" if options.delimiter in ("\\t", "tab") else options.delimiter
    if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n'):
        raise UsageError(f"--delimiter {options.delimiter}: not one character", hint="For example ';' or tab.")
    return TableSpec(sheet=sheet_of(options.sheet), delimiter=delimiter, encoding=options.encoding)


def sheet_of(text: str | None) -> str | int | None:
    """Sheet that --sheet names: a number from 1, or a name."""
    return int(text) if text is not None and text.isdecimal() else text


def read_json(path: Path, option: str, hint: str) -> Any:
    """Read the JSON file that an option names."""
    import msgspec

    try:
        return msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror}", hint=hint) from None
    except msgspec.DecodeError as error:
        raise UsageError(f"{option} {path}: not JSON: {error}", hint=hint) from None


def check_output(output: Path) -> None:
    """Refuse an output whose name asks for no format of sheets."""
    from penstock.export.sheet_file import sheet_format

    if sheet_format(output.name) is None:
        raise UsageError(
            f"-o {output}: its ending names no format of sheets", hint=f"Rows become a sheet: name it {_OUTPUTS}."
        )


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
    from penstock.dispatch.rows.work import RenderError

    if rows.target.processor is not None:
        from penstock.dispatch.loading import load_processor

        load_processor(rows.target.processor)
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

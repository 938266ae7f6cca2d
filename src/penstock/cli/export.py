"""`penstock export`: a batch's results as files, a job's as a sheet."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.cli.client import CommandContext, Json, client_command, print_json
from penstock.cli.tables import BOM_OPTION
from penstock.errors import ExitCode, PenstockError, UsageError

if TYPE_CHECKING:
    from penstock.cli.progress import Display
    from penstock.client.api import Answer
    from penstock.export.draft import Draft


_STDOUT = "-"
_TRIES = 4
_REST_S = 0.5


@dataclass(frozen=True, slots=True)
class WrittenResults:
    """Result files that were written, and their lines."""

    batch: str
    complete: bool
    """Whether the batch has ended: no more results will come."""
    output: str
    output_lines: int
    errors: str | None
    error_lines: int


@click.command(short_help="Write the results of a batch, or a job's sheet.")
@click.argument("name", metavar="ID")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path, allow_dash=True),
    help="File for the results; - is standard output.",
)
@BOM_OPTION
@client_command(hints={404: "`penstock ls` and `penstock jobs ls` list what this key has on this server."})
async def export(context: CommandContext, name: str, output: Path, bom: bool) -> ExitCode:
    """Write the results of the batch or job ID to the output, in the order of the input.

    Of a batch, one answer per line (JSONL). Failures go to a file beside it: answers.jsonl has answers.errors.jsonl.
    While the batch is under way, what is done so far is written, in the order it was done. With `-o -` the answers
    go to standard output and failures are left out.

    Of a job, a sheet of all its rows as they are now, each with its result. The output's name says the format: .xlsx,
    .csv or .jsonl, each also with .gz. With `-o -` it is CSV on standard output.

    Files are written beside their final names and then renamed: they are whole or not there.
    """
    from penstock.cli.lookup import BATCH, JOB, find

    check_output(output, None)
    found = await find(context.api, name, BATCH, JOB)
    if found["id"].startswith(JOB.prefix):
        check_sheet_output(output, None)
        sheet = await export_job(context, found, output, bom=bom)
        if context.as_json and str(output) != _STDOUT:
            print_json(sheet)
        return ExitCode.OK
    if output.name.lower().endswith((".xlsx", ".csv")):
        raise UsageError(f"-o {output}: a batch's results are JSONL, not a sheet", hint="Name it answers.jsonl.")
    if found["status"] == "failed":
        from penstock.cli.figures import problem_lines

        listed = "".join(f"\n  {line}" for line in problem_lines(found))
        raise UsageError(
            f"{found['id']} has no results: it could not be run{listed}",
            hint="Correct the file, then submit it again.",
        )
    if found["status"] == "validating":
        raise PenstockError(
            f"{found['id']} has not been started yet",
            hint=f"`penstock watch {found['id']}` waits for it; without a running `penstock serve` nothing starts it.",
        )
    written = await export_results(context, found, output)
    if context.as_json and str(output) != _STDOUT:
        print_json(asdict(written))
    return ExitCode.OK


def check_output(output: Path, source: Path | None) -> None:
    """Refuse an output that cannot work, before anything is done."""
    if str(output) == _STDOUT:
        return
    from penstock.cli.paths import check_outputs

    check_outputs(output, () if source is None else (source,))


def check_sheet_output(output: Path, source: Path | None) -> None:
    """Refuse an output that cannot work for a job, before anything is done."""
    if str(output) != _STDOUT:
        from penstock.cli import tables

        tables.check_output(output)
        check_output(output, source)


async def export_results(context: CommandContext, batch: Json, output: Path) -> WrittenResults:
    """Stream the results of a batch to their files."""
    if str(output) == _STDOUT:
        return await _print_results(context, batch)
    from penstock.cli.figures import has_ended
    from penstock.cli.progress import Display
    from penstock.export.jsonl import errors_path

    errors = errors_path(output)
    with (
        _explain_write_errors(output),
        Display(quiet=context.as_json) as display,
        contextlib.ExitStack() as drafts,
    ):
        display.stage("writing")
        again = f"/v1/batches/{batch['id']}"
        good, good_lines, whole = await _download(
            context, lambda: _content(context, batch, "output_file_id"), again, output, drafts, display
        )
        bad, bad_lines, _ = await _download(
            context, lambda: _content(context, batch, "error_file_id"), again, errors, drafts, display
        )
        bad.publish(if_empty="remove")
        good.publish(if_empty="keep")
    complete = whole and has_ended(batch)
    written = WrittenResults(
        batch["id"], complete, str(output), good_lines, str(errors) if bad_lines else None, bad_lines
    )
    _say_written(context, written)
    return written


async def export_job(context: CommandContext, job: Json, output: Path, *, bom: bool = False) -> Json:
    """Stream a job's sheet to the output."""
    from penstock.cli.figures import job_counts_text
    from penstock.cli.progress import Display
    from penstock.export.sheet_file import sheet_format

    file_format, gzip = sheet_format(output.name) or ("csv", False)
    path, complete = f"/api/jobs/{job['id']}", job["endedAt"] is not None

    def content() -> AbstractAsyncContextManager[Answer]:
        asked = {"format": file_format, "gzip": str(gzip).lower(), "bom": str(bom).lower()}
        return context.api.stream(f"{path}/export", method="POST", query=asked)

    if str(output) == _STDOUT:
        async with content() as answer:
            async for piece in answer.pieces:
                sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
    else:
        with (
            _explain_write_errors(output),
            Display(quiet=context.as_json) as display,
            contextlib.ExitStack() as drafts,
        ):
            display.stage("writing")
            draft, _, _ = await _download(context, content, path, output, drafts, display)
            draft.publish(if_empty="keep")
        if not context.as_json:
            click.echo(f"  sheet  {output}  ({job_counts_text(job)})")
    if not complete:
        context.say("This is the sheet so far: the job has not ended.")
        context.say(f"To follow it: {context.command('jobs', 'watch', job['id'])}")
    return {"job": job["id"], "complete": complete, "output": str(output)}


@contextlib.contextmanager
def _explain_write_errors(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PenstockError(
            f"cannot write {error.filename or output}: {error.strerror}",
            hint="Nothing was half-written: make room or choose another -o, then run the command again.",
        ) from error


async def _download(
    context: CommandContext,
    content: Callable[[], AbstractAsyncContextManager[Answer | None]],
    again: str,
    path: Path,
    drafts: contextlib.ExitStack,
    display: Display,
) -> tuple[Draft, int, bool]:
    """Download one file into a draft. Returns the draft, its lines, and whether it is complete. Started over if it is
    cut, once the object at `again` can be read."""
    import asyncio

    from penstock.client.api import Refused, Unreachable
    from penstock.export.draft import Draft

    for left in reversed(range(_TRIES)):
        with contextlib.ExitStack() as held:
            draft = held.enter_context(Draft(path))
            lines, size, whole = 0, 0, True
            try:
                async with content() as answer:
                    if answer is not None:
                        whole = answer.headers.get("x-incomplete", "false") == "false"
                        async for piece in answer.pieces:
                            draft.write(piece)
                            lines, size = lines + piece.count(b"\n"), size + len(piece)
                            display.amount("writing", size, None, "bytes")
            except (Unreachable, Refused) as error:
                if not left or (isinstance(error, Refused) and not error.passing):
                    raise
                context.say(f"{error.message}: starting over")
            else:
                drafts.push(held.pop_all())
                return draft, lines, whole
        await asyncio.sleep(_REST_S)
        await context.api.get(again)  # waits for a server that is being restarted
    raise AssertionError("the last try returns or raises")


@contextlib.asynccontextmanager
async def _content(context: CommandContext, batch: Json, which: str) -> AsyncIterator[Answer | None]:
    """Open the content of one of a batch's files; None if there is no such file."""
    from penstock.client.api import Refused

    if not batch[which]:
        yield None
        return
    try:
        async with context.api.stream(f"/v1/files/{batch[which]}/content", accept="application/binary") as answer:
            yield answer
    except Refused as refusal:
        if refusal.status != 404:
            raise
        raise PenstockError(
            f"the results of {batch['id']} are no longer kept: {batch[which]} was deleted or has expired",
            hint="Results are kept for 30 days unless the batch asked for another time. Submit the file again.",
        ) from None


async def _print_results(context: CommandContext, batch: Json) -> WrittenResults:
    """Write the answers to standard output. Written lines cannot be taken back, so a cut is an error."""
    lines, complete = 0, True
    async with _content(context, batch, "output_file_id") as answer:
        if answer is not None:
            complete = answer.headers.get("x-incomplete", "false") == "false"
            async for piece in answer.pieces:
                sys.stdout.buffer.write(piece)
                lines += piece.count(b"\n")
    sys.stdout.buffer.flush()
    if batch["error_file_id"]:
        context.say(f"{batch['request_counts']['failed']:,} failed: they are not in this output; -o FILE writes both")
    return WrittenResults(batch["id"], complete, _STDOUT, lines, None, 0)


def _say_written(context: CommandContext, written: WrittenResults) -> None:
    if context.as_json:
        return
    from penstock.cli.figures import count_text

    click.echo(f"  output  {written.output}  ({count_text(written.output_lines, 'line')})")
    if written.errors is not None:
        click.echo(f"  errors  {written.errors}  ({count_text(written.error_lines, 'line')})")
    if not written.complete:
        context.say("These are the results so far: the batch has not ended.")
        context.say(f"To follow it: {context.command('watch', written.batch)}")

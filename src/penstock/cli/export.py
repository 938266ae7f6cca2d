"""`penstock export`: a batch's results as files."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.cli.client import CommandContext, Json, client_command, print_json
from penstock.errors import ExitCode, PenstockError, UsageError

if TYPE_CHECKING:
    from penstock.cli.api import Answer
    from penstock.cli.progress import Display
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


@click.command(short_help="Write a batch's results to files.")
@click.argument("batch", metavar="ID")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path, allow_dash=True),
    help="File for the answers (JSONL); - is standard output.",
)
@client_command()
async def export(context: CommandContext, batch: str, output: Path) -> ExitCode:
    """Write the results of the batch ID to the output, one answer per line, in the order of the input.

    Failures go to a file beside it: answers.jsonl has answers.errors.jsonl. Both are written beside their final names
    and then renamed: they are whole or not there. Of a batch still under way, what is done so far is written, in the
    order it was done. With `-o -` the answers go to standard output and failures are left out.
    """
    from penstock.cli.lookup import find_batch

    check_output(output, None)
    found = await find_batch(context.api, batch)
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


async def export_results(context: CommandContext, batch: Json, output: Path) -> WrittenResults:
    """Stream the results of a batch to their files."""
    if str(output) == _STDOUT:
        return await _print_results(context, batch)
    from penstock.cli.figures import has_ended
    from penstock.cli.progress import Display
    from penstock.export.jsonl import errors_path

    errors = errors_path(output)
    try:
        with Display(quiet=context.as_json) as display, contextlib.ExitStack() as drafts:
            display.stage("writing")
            good, good_lines, whole = await _download(context, batch, "output_file_id", output, drafts, display)
            bad, bad_lines, _ = await _download(context, batch, "error_file_id", errors, drafts, display)
            bad.publish(if_empty="remove")
            good.publish(if_empty="keep")
    except OSError as error:
        raise PenstockError(
            f"cannot write {error.filename or output}: {error.strerror}",
            hint="Nothing was half-written: make room or choose another -o, then run the command again.",
        ) from error
    complete = whole and has_ended(batch)
    written = WrittenResults(
        batch["id"], complete, str(output), good_lines, str(errors) if bad_lines else None, bad_lines
    )
    _say_written(context, written)
    return written


async def _download(
    context: CommandContext, batch: Json, which: str, path: Path, drafts: contextlib.ExitStack, display: Display
) -> tuple[Draft, int, bool]:
    """Download one file into a draft. Returns the draft, its lines, and whether it is complete. Started again if it is
    cut."""
    import asyncio

    from penstock.cli.api import Refused, Unreachable
    from penstock.export.draft import Draft

    for left in reversed(range(_TRIES)):
        with contextlib.ExitStack() as held:
            draft = held.enter_context(Draft(path))
            lines, whole = 0, True
            try:
                async with _content(context, batch, which) as answer:
                    if answer is not None:
                        whole = answer.headers.get("x-incomplete", "false") == "false"
                        async for piece in answer.pieces:
                            draft.write(piece)
                            lines += piece.count(b"\n")
                            display.amount("writing", lines, None, "lines")
            except (Unreachable, Refused) as error:
                if not left or (isinstance(error, Refused) and not error.passing):
                    raise
                context.say(f"{error.message}: starting over")
            else:
                drafts.push(held.pop_all())
                return draft, lines, whole
        await asyncio.sleep(_REST_S)
        await context.api.get(f"/v1/batches/{batch['id']}")  # waits for a server that is being restarted
    raise AssertionError("the last try returns or raises")


@contextlib.asynccontextmanager
async def _content(context: CommandContext, batch: Json, which: str) -> AsyncIterator[Answer | None]:
    """Open the content of one of a batch's files; None if there is no such file."""
    from penstock.cli.api import Refused

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
    click.echo(f"  output  {written.output}  ({written.output_lines:,} lines)")
    if written.errors is not None:
        click.echo(f"  errors  {written.errors}  ({written.error_lines:,} lines)")
    if not written.complete:
        context.say(f"The batch is still under way: these are the results so far. penstock watch {written.batch}")

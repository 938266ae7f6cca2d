"""`penstock export`: a batch's results as files."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.client import Session, client_command, print_json
from penstock.errors import ExitCode, PenstockError, UsageError

if TYPE_CHECKING:
    from penstock.cli.api import Answer
    from penstock.cli.progress import Display
    from penstock.export.jsonl import _Draft as Draft

Json = dict[str, Any]

_STDOUT = "-"
_TRIES = 4
_REST_S = 0.5


@dataclass(frozen=True, slots=True)
class Fetched:
    """What was written where."""

    batch: str
    complete: bool
    """Whether these are all results there will ever be."""
    output: str
    output_lines: int
    errors: str | None
    error_lines: int

    def as_dict(self) -> Json:
        return {name: getattr(self, name) for name in self.__slots__}


@click.command(short_help="Write a batch's results to files.")
@click.argument("batch", metavar="ID")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path, allow_dash=True),
    help="Where the answers go (JSONL); - is standard output.",
)
@client_command()
async def export(session: Session, batch: str, output: Path) -> ExitCode:
    """Write the results of the batch ID to the output, one answer per line, in the order of the input.

    Failures go to a file beside it: answers.jsonl has answers.errors.jsonl. Both are written beside their final names
    and then renamed: they are whole or not there. Of a batch still under way, what is done so far is written, in the
    order it was done. With `-o -` the answers go to standard output and failures are left out.
    """
    from penstock.cli.lookup import find_batch

    check_output(output, None)
    found = await find_batch(session.api, batch)
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
    fetched = await export_results(session, found, output)
    if session.as_json and str(output) != _STDOUT:
        print_json(fetched.as_dict())
    return ExitCode.OK


def check_output(output: Path, source: Path | None) -> None:
    """Refuse an output that cannot work, before anything is done."""
    if str(output) == _STDOUT:
        return
    from penstock.cli.paths import check_outputs

    check_outputs(output, source)


async def export_results(session: Session, batch: Json, output: Path) -> Fetched:
    """Stream the results of a batch to their files."""
    if str(output) == _STDOUT:
        return await _print_results(session, batch)
    from penstock.cli.figures import has_ended
    from penstock.cli.progress import Display
    from penstock.export.jsonl import errors_path

    errors = errors_path(output)
    try:
        with Display(quiet=session.as_json) as display, contextlib.ExitStack() as drafts:
            display.stage("writing")
            good, good_lines, whole = await _download(session, batch, "output_file_id", output, drafts, display)
            bad, bad_lines, _ = await _download(session, batch, "error_file_id", errors, drafts, display)
            bad.publish(if_empty="remove")
            good.publish(if_empty="keep")
    except OSError as error:
        raise PenstockError(
            f"cannot write {error.filename or output}: {error.strerror}",
            hint="Nothing was half-written: make room or choose another -o, then run the command again.",
        ) from error
    complete = whole and has_ended(batch)
    fetched = Fetched(batch["id"], complete, str(output), good_lines, str(errors) if bad_lines else None, bad_lines)
    _say_written(session, fetched)
    return fetched


async def _download(
    session: Session, batch: Json, which: str, path: Path, drafts: contextlib.ExitStack, display: Display
) -> tuple[Draft, int, bool]:
    """A draft of one file, its lines, and whether it holds all there will be. Begun anew if it is cut."""
    import asyncio

    from penstock.cli.api import Refused, Unreachable
    from penstock.export.jsonl import _Draft as Draft

    for left in reversed(range(_TRIES)):
        with contextlib.ExitStack() as held:
            draft = held.enter_context(Draft(path))
            lines, whole = 0, True
            try:
                async with _content(session, batch, which) as answer:
                    if answer is not None:
                        whole = answer.headers.get("x-incomplete", "false") == "false"
                        async for piece in answer.pieces:
                            draft.write(piece)
                            lines += piece.count(b"\n")
                            display.amount("writing", lines, None, "lines")
            except (Unreachable, Refused) as error:
                if not left or (isinstance(error, Refused) and not error.passing):
                    raise
                session.say(f"{error.message}: starting over")
            else:
                drafts.push(held.pop_all())
                return draft, lines, whole
        await asyncio.sleep(_REST_S)
        await session.api.get(f"/v1/batches/{batch['id']}")  # waits for a server that is being restarted
    raise AssertionError("the last try returns or raises")


@contextlib.asynccontextmanager
async def _content(session: Session, batch: Json, which: str) -> AsyncIterator[Answer | None]:
    """What one of a batch's files holds; None if there is no such file."""
    from penstock.cli.api import Refused

    if not batch[which]:
        yield None
        return
    try:
        async with session.api.stream(f"/v1/files/{batch[which]}/content", accept="application/binary") as answer:
            yield answer
    except Refused as refusal:
        if refusal.status != 404:
            raise
        raise PenstockError(
            f"the results of {batch['id']} are no longer kept: {batch[which]} was deleted or has expired",
            hint="They are kept for 30 days unless told otherwise. Submit the file again to have them again.",
        ) from None


async def _print_results(session: Session, batch: Json) -> Fetched:
    """The answers to standard output. What was written cannot be taken back, so a cut is an error."""
    lines, complete = 0, True
    async with _content(session, batch, "output_file_id") as answer:
        if answer is not None:
            complete = answer.headers.get("x-incomplete", "false") == "false"
            async for piece in answer.pieces:
                sys.stdout.buffer.write(piece)
                lines += piece.count(b"\n")
    sys.stdout.buffer.flush()
    if batch["error_file_id"]:
        session.say(f"{batch['request_counts']['failed']:,} failed: they are not in this output; -o FILE writes both")
    return Fetched(batch["id"], complete, _STDOUT, lines, None, 0)


def _say_written(session: Session, fetched: Fetched) -> None:
    if session.as_json:
        return
    click.echo(f"  output  {fetched.output}  ({fetched.output_lines:,} lines)")
    if fetched.errors is not None:
        click.echo(f"  errors  {fetched.errors}  ({fetched.error_lines:,} lines)")
    if not fetched.complete:
        session.say(f"The batch is still under way: these are the results so far. penstock watch {fetched.batch}")

"""`penstock submit`: a file becomes a batch on the server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.cli.client import CommandContext, Json, client_command, print_json
from penstock.errors import ExitCode, PenstockError, UsageError

if TYPE_CHECKING:
    from penstock.client.upload import Source


def parse_pairs(_: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """Parse `--metadata key=value`, repeatable."""
    pairs = {}
    for value in values:
        name, equals, content = value.partition("=")
        if not equals or not name.strip():
            raise click.BadParameter(f"'{value}' is not KEY=VALUE. Write for example team=search.", param=param)
        pairs[name.strip()] = content
    return pairs


@click.command(short_help="Send a file of requests to be worked off.")
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
@click.option("--endpoint", metavar="PATH", help="Endpoint of every line.  [default: that of the first line]")
@click.option(
    "--window", metavar="TIME", default="24h", show_default=True, help="Time to be done in: 90s, 30m, 2h, 1d."
)
@click.option("--metadata", metavar="KEY=VALUE", multiple=True, callback=parse_pairs, help="A note on it; repeatable.")
@click.option("--priority", type=int, help="Higher goes first.  [default: 0]")
@click.option("--wait", is_flag=True, help="Follow it until it ends.")
@click.option("-o", "--output", type=click.Path(path_type=Path, allow_dash=True), help="Wait, then write its results.")
@client_command(makes_database=True)
async def submit(
    context: CommandContext,
    file: Path,
    endpoint: str | None,
    window: str,
    metadata: dict[str, str],
    priority: int | None,
    wait: bool,
    output: Path | None,
) -> ExitCode:
    """Upload FILE, one request per line, and make a batch of it. Prints the batch's id.

    FILE is JSONL in the Batch API's shape, plain, .gz or .zst. With -o the command waits and writes the answers as
    `penstock export` does; its exit code is then the batch's, as of `penstock watch`.

    \b
    penstock submit requests.jsonl
    penstock submit requests.jsonl --metadata team=search -o answers.jsonl
    """
    from penstock.cli.export import check_output, export_results
    from penstock.cli.figures import exit_code_of, has_ended
    from penstock.cli.watch import print_end, watch_until_end
    from penstock.client.upload import Source

    if output is not None:
        check_output(output, file)
    source = Source(file)
    endpoint = endpoint or source.endpoint()
    # Before gigabytes are sent: checks that the server answers and accepts the key.
    await context.api.get("/v1/batches", {"limit": 1})
    waits = wait or output is not None
    if waits and not await context.api.is_served():
        raise UsageError(
            "no server runs on this data, so the batch would never end: nothing was stored",
            hint="Start `penstock serve` here first; or submit without --wait and -o.",
        )
    batch = await _create_batch(context, source, endpoint, window, metadata, priority)
    if not waits:
        await _say_what_next(context, batch)
        return ExitCode.OK
    context.say(f"{batch['id']} (Ctrl-C stops waiting; the batch goes on)")
    batch = await watch_until_end(context, batch)
    shown: Json = {**batch, "exit_code": exit_code_of(batch)}
    if not context.as_json:
        print_end(context, batch, output=None if output is None else str(output))
    if output is not None and has_ended(batch) and batch["status"] != "failed":
        shown["results"] = asdict(await export_results(context, batch, output))
    if context.as_json and str(output) != "-":
        print_json(shown)
    return ExitCode(shown["exit_code"])


async def _create_batch(
    context: CommandContext,
    source: Source,
    endpoint: str,
    window: str,
    metadata: dict[str, str],
    priority: int | None,
) -> Json:
    from uuid import uuid4

    from penstock.client.api import Refused

    with show_upload(context, source.size) as on_read:
        file = await context.api.upload(
            "PUT",
            "/v1/files",
            _body(source, on_read),
            key=f"submit-{uuid4().hex}",
            size=source.plain_size,
            query={"purpose": "batch", "filename": source.filename},
        )
    request: Json = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": window}
    if metadata:
        request["metadata"] = metadata
    if priority is not None:
        request["priority"] = priority
    try:
        return await context.api.post("/v1/batches", request, key=f"submit-{uuid4().hex}")
    except Refused:
        # No batch was made of the file: it is not needed any more.
        with contextlib.suppress(PenstockError):
            await context.api.delete(f"/v1/files/{file['id']}")
        raise


@contextlib.contextmanager
def show_upload(context: CommandContext, size: int) -> Iterator[Callable[[int], None]]:
    """Show the progress of an upload of so many bytes: yields what is to be told the bytes read so far."""
    from penstock.cli.figures import size_text
    from penstock.cli.progress import Display

    with Display(quiet=context.as_json) as display:
        display.stage("uploading")

        def on_read(read: int) -> None:
            speed = size_text(round(display.rate(read)))
            display.show("uploading", read, size, f"{size_text(read)} of {size_text(size)}  {speed}/s")

        yield on_read


def _body(source: Source, on_read: Callable[[int], None]) -> Callable[[], AsyncIterator[bytes]]:
    async def pieces() -> AsyncIterator[bytes]:
        for piece, read in source.pieces():
            on_read(read)
            yield piece

    return pieces


async def _say_what_next(context: CommandContext, batch: Json) -> None:
    if context.as_json:
        print_json(batch)
        return
    name = batch["id"]
    click.echo(name)
    context.say(f"  follow it    {context.command('watch', name)}")
    context.say(f"  its results  {context.command('export', name, '-o', 'answers.jsonl')}")
    await context.say_idle(name)

"""`penstock jobs submit`: files become a job on the server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.cli.client import CommandContext, Json, client_command, print_json
from penstock.cli.tables import SHEET_OPTION, PromptOptions, prompt_options
from penstock.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from penstock.client.upload import Source

_DEFAULT_PROVIDER = "default"
_HINTS = {
    404: "The server at --server knows no jobs: it is older than this program.",
    409: "`penstock jobs show` tells the job's state.",
}


@click.command(short_help="Send a table to be worked off row by row.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path, allow_dash=True))
@click.option("--processor", metavar="NAME", help="Processor of the server to run on each row.")
@prompt_options
@click.option(
    "--provider",
    metavar="NAME",
    help=f"Provider of the server that has the model.  [default: {_DEFAULT_PROVIDER}, as of `serve --base-url`]",
)
@click.option(
    "--spec",
    "spec_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="JSON file with the whole spec instead, as docs/jobs.md has it.",
)
@click.option("--type", "job_type", metavar="TEXT", help="What kind of job it is, for lists.  [default: job]")
@SHEET_OPTION
@click.option("--priority", type=int, help="Higher goes first.  [default: 0]")
@click.option("--wait", is_flag=True, help="Follow it until it ends.")
@click.option("-o", "--output", type=click.Path(path_type=Path, allow_dash=True), help="Wait, then write its sheet.")
@client_command(makes_database=True, hints=_HINTS)
async def submit(
    context: CommandContext,
    files: tuple[Path, ...],
    processor: str | None,
    asked: PromptOptions,
    provider: str | None,
    spec_file: Path | None,
    job_type: str | None,
    sheet: str | None,
    priority: int | None,
    wait: bool,
    output: Path | None,
) -> ExitCode:
    """Upload FILE, a table or images, and make a job of it: the same is done with each row. Prints the job's id.

    A table is CSV, TSV or XLSX, or JSON Lines. What is done with a row is one of the server's processors, a prompt to
    a model of one of its providers, or what the spec says. With -o the command waits and writes the sheet as `penstock
    export` does; its exit code is then the job's, as of `penstock jobs watch`.

    \b
    penstock jobs submit products.csv --processor price
    penstock jobs submit products.xlsx --model small --prompt 'Which category is {{ title }}?' -o sheet.xlsx
    """
    from penstock.cli.export import check_sheet_output, export_job
    from penstock.cli.figures import job_exit_code
    from penstock.cli.job_watch import print_job_end, watch_job_until_end
    from penstock.client.upload import Source

    if output is not None:
        for file in files:
            check_sheet_output(output, file)
    spec = _spec(processor, asked, provider, spec_file)
    _fill(spec, job_type, sheet, priority)
    sources = [Source(_checked(file)) for file in files]
    # Before gigabytes are sent: checks that the server answers and accepts the key.
    await context.api.get("/api/jobs", {"pageSize": 1})
    waits = wait or output is not None
    if waits and not await context.api.is_served():
        raise UsageError(
            "no server runs on this data, so the job would never end: nothing was stored",
            hint="Start `penstock serve` here first; or submit without --wait and -o.",
        )
    job = await _create_job(context, sources, spec)
    if not waits:
        await _say_what_next(context, job)
        return ExitCode.OK
    context.say(f"{job['id']} (Ctrl-C stops waiting; the job goes on)")
    job = await watch_job_until_end(context, job)
    shown: Json = {**job, "exit_code": job_exit_code(job)}
    if not context.as_json:
        print_job_end(context, job, output=None if output is None else str(output))
    if output is not None and job["endedAt"] is not None:
        shown["results"] = await export_job(context, job, output)
    if context.as_json and str(output) != "-":
        print_json(shown)
    return ExitCode(shown["exit_code"])


def _spec(processor: str | None, asked: PromptOptions, provider: str | None, spec_file: Path | None) -> Json:
    definition = asked.definition(provider or _DEFAULT_PROVIDER)
    if sum(given is not None for given in (processor, definition, spec_file)) != 1:
        raise UsageError(
            "what is to be done with each row? Give one of --processor, --prompt and --spec",
            hint="--processor NAME runs one of the server's, --prompt with --model asks a model, --spec FILE says all.",
        )
    if provider is not None and definition is None:
        raise UsageError("--provider without --prompt", hint="It is the provider that has the prompt's model.")
    if spec_file is None:
        return {"processor": processor or definition}
    from penstock.cli.tables import read_json

    hint = 'A spec is one JSON object, such as {"processor": "price"} (docs/jobs.md).'
    spec = read_json(spec_file, "--spec", hint)
    if not isinstance(spec, dict):
        raise UsageError(f"--spec {spec_file}: not a JSON object", hint=hint)
    return spec


def _fill(spec: Json, job_type: str | None, sheet: str | None, priority: int | None) -> None:
    """Put what the options say into the spec, over what it says itself."""
    from penstock.cli.tables import sheet_of

    if job_type is not None:
        spec["jobType"] = job_type
    if sheet is not None:
        spec["columns"] = {**(spec.get("columns") or {}), "sheet": sheet_of(sheet)}
    if priority is not None:
        spec["priority"] = priority


def _checked(file: Path) -> Path:
    if file.is_dir():
        raise UsageError(f"{file} is a directory", hint=f"Name its files: penstock jobs submit {file}/* ...")
    return file


async def _create_job(context: CommandContext, sources: Sequence[Source], spec: Json) -> Json:
    from uuid import uuid4

    from penstock.cli.submit import show_upload

    form = _Form(sources, spec)
    with show_upload(context, sum(source.size for source in sources)) as on_read:
        created = await context.api.upload(
            "POST",
            "/api/jobs",
            form.body(on_read),
            key=f"submit-{uuid4().hex}",
            size=form.size,
            content_type=form.content_type,
        )
    return await context.api.get(f"/api/jobs/{created['jobId']}")


class _Form:
    """Form of a job: its spec, and the files as they lie on disk, read while they are sent."""

    def __init__(self, sources: Sequence[Source], spec: Json) -> None:
        import json
        from uuid import uuid4

        boundary = uuid4().hex
        self.content_type = f"multipart/form-data; boundary={boundary}"
        self._sources = sources
        lead = f'--{boundary}\r\nContent-Disposition: form-data; name="spec"\r\n\r\n{json.dumps(spec)}\r\n'
        self._heads = []
        for source in sources:
            name = source.filename.translate({0x22: "%22", 0x0D: "%0D", 0x0A: "%0A"})
            lead += f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
            self._heads.append(lead.encode())
            lead = "\r\n"
        self._end = f"\r\n--{boundary}--\r\n".encode()
        self.size = sum(map(len, self._heads)) + len(self._end) + sum(source.size for source in sources)

    def body(self, on_read: Callable[[int], None]) -> Callable[[], AsyncIterator[bytes]]:
        """Makes the body anew for every try; `on_read` is told the bytes of the files read so far."""

        async def pieces() -> AsyncIterator[bytes]:
            read = 0
            for head, source in zip(self._heads, self._sources, strict=True):
                yield head
                for chunk in source.chunks():
                    read += len(chunk)
                    on_read(read)
                    yield chunk
            yield self._end

        return pieces


async def _say_what_next(context: CommandContext, job: Json) -> None:
    if context.as_json:
        print_json(job)
        return
    name = job["id"]
    click.echo(name)
    context.say(f"  follow it  {context.command('jobs', 'watch', name)}")
    context.say(f"  its sheet  {context.command('export', name, '-o', 'sheet.xlsx')}")
    await context.say_idle(name)

"""Preview of a job: its first rows and the first request, before anything is stored."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import msgspec

from penstock.api.endpoint import Call, Camel, Endpoint
from penstock.api.errors import ApiError
from penstock.api.multipart import Form, clean_filename, invalid, missing
from penstock.api.upload_threads import upload_work
from penstock.dispatch.rows.definition import parse_definition
from penstock.dispatch.rows.render import Image, render
from penstock.dispatch.rows.work import RenderError
from penstock.errors import UsageError
from penstock.intake.preview import Preview, read_preview
from penstock.intake.tables.table import ColumnType, TableSpec
from penstock.server.job_spec import JobSpec, place_job

_MAX_PREVIEW_BYTES: Final = 32 * 1024 * 1024
_SPEC_BYTES: Final = 1024 * 1024
_FORM: Final = {
    "type": "object",
    "required": ["file"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "spec": {"type": "string", "contentMediaType": "application/json"},
        "cut": {"description": "The file's beginning only: its last line may be broken.", "type": "string"},
    },
}


class PreviewColumn(Camel):
    name: str
    type: ColumnType | None


class PreviewRequest(Camel):
    method: str
    path: str
    headers: dict[str, str]
    body: msgspec.Raw | None


class PreviewProblem(Camel):
    message: str
    where: str
    """`file`, or the part of the spec."""


class JobPreview(Camel):
    columns: list[PreviewColumn]
    rows: list[dict[str, Any]]
    raw_rows: list[Any]
    images: bool
    sheets: list[str]
    request: PreviewRequest | None
    """The first row's; none for a Python function."""
    problems: list[PreviewProblem]


class _Columns(msgspec.Struct, forbid_unknown_fields=True):
    """Spec of a job of which it is not said yet what is done with each row."""

    columns: TableSpec = TableSpec()


async def preview_job(call: Call[None, None]) -> JobPreview:
    """The first rows of a file as a job would have them, and the first request. Nothing is stored; what stands in the
    way is told among the problems."""
    form = Form(call.request.headers.get("content-type", ""), "file", frozenset({"spec", "cut"}), _SPEC_BYTES)
    content = bytearray()
    async for data in call.request.stream():
        for piece in form.write(data):
            content += piece
        call.memory.resize(len(content))
        if len(content) > _MAX_PREVIEW_BYTES:
            raise ApiError(413, f"A preview is of at most {_MAX_PREVIEW_BYTES:,} bytes.", code="file_too_large")
    form.finish()
    if form.filename is None:
        raise missing("file")
    spec, columns = _read_spec(form.fields.get("spec"))
    config, work = call.server.config, upload_work(call)
    found: Preview = await work.run_for_client(
        partial(
            read_preview,
            bytes(content),
            clean_filename(form.filename),
            columns,
            config.tables,
            config.intake,
            cut=form.fields.get("cut") == "true",
        )
    )
    request, problems = await work.run_for_client(partial(_first_request, call, spec, found))
    if found.problem is not None:
        problems.insert(0, PreviewProblem(message=found.problem, where="file"))
    return JobPreview(
        columns=[PreviewColumn(name=column.name, type=column.type) for column in found.columns],
        rows=found.rows,
        raw_rows=found.raw,
        images=found.images,
        sheets=found.sheets,
        request=request,
        problems=problems,
    )


def _read_spec(text: str | None) -> tuple[JobSpec | None, TableSpec]:
    """The spec, if it says what is done with each row; and what it says about the table."""
    if text is None:
        return None, TableSpec()
    try:
        told = msgspec.json.decode(text)
        if isinstance(told, dict) and told.get("processor") is not None:
            spec = msgspec.convert(told, JobSpec)
            return spec, spec.columns
        columns = told.get("columns", {}) if isinstance(told, dict) else told
        return None, msgspec.convert({"columns": columns}, _Columns).columns
    except msgspec.ValidationError as error:
        raise invalid("spec", f"{error}.") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid("spec", f"it is not JSON: {error}.") from None


def _first_request(
    call: Call[Any, Any], spec: JobSpec | None, found: Preview
) -> tuple[PreviewRequest | None, list[PreviewProblem]]:
    if spec is None:
        return None, []
    try:
        place_job(spec, call.caller.owner, call.server.config.processors, call.server.providers)
        if isinstance(spec.processor, str) or not found.rows:
            return None, []
        image = Image("image/png", b"") if found.images else None
        request = render(parse_definition(spec.processor), found.rows[0], attempt=1, image=image)
    except UsageError as error:
        return None, [PreviewProblem(message=error.advice, where="processor")]
    except RenderError as error:
        return None, [PreviewProblem(message=f"row 1: {error}", where="processor")]
    body = msgspec.Raw(request.body) if request.body else None
    return PreviewRequest(method=request.method, path=request.path, headers=dict(request.headers), body=body), []


ENDPOINTS = (
    Endpoint(
        "POST",
        "/api/jobs/preview",
        preview_job,
        "The first rows of a file as a job would have them, and the first request.",
        form=_FORM,
        errors=(413,),
    ),
)

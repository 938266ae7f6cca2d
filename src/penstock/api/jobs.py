"""Jobs: a table or images in, what is to be done with each row, a sheet out."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from starlette.responses import Response

from penstock.adapters.source import FileNotReady, FileUnreadable, SourceUnavailable
from penstock.api.audit import actor_of, client_of, record
from penstock.api.batches import Move, steer
from penstock.api.endpoint import Call, Camel, Endpoint, Nothing
from penstock.api.errors import busy, check_priority, conflict, not_found
from penstock.api.files import refuse_too_large
from penstock.api.multipart import Feeder, Form, clean_filename, idempotency_key, invalid, missing
from penstock.api.upload_threads import upload_work
from penstock.batches import jobs, read
from penstock.batches import steer as batch_steer
from penstock.batches.read import Batch, get_batch
from penstock.db.pool import borrowed
from penstock.dispatch.rows.check import NotRenderable
from penstock.erase import erase
from penstock.errors import UsageError
from penstock.intake.job_upload import JobUpload
from penstock.model import BatchState, parse_id, public_id
from penstock.quotas.quotas import Quota, check_open_batches
from penstock.server.adapter_scan import feed_file
from penstock.server.job_spec import JobSpec, NewJob, SourceReference, place_job

_SPEC_BYTES = 1024 * 1024
_KEY_USED = "The idempotency key was used before for a job that differs."
_FORM = {
    "type": "object",
    "required": ["spec"],
    "properties": {
        "file": {
            "description": "A table, an image, or a zip of images; given more than once, images.",
            "type": "array",
            "items": {"type": "string", "format": "binary"},
            "minItems": 1,
        },
        "source": {"type": "string", "contentMediaType": "application/json"},
        "spec": {"type": "string", "contentMediaType": "application/json"},
    },
}

JobState = Literal["INGESTING", "QUEUED", "RUNNING", "PAUSED", "DONE", "FAILED", "CANCELLED"]


class JobCreated(Camel):
    job_id: str


class JobIngest(Camel):
    done: bool
    rows: int
    problem: str | None


class Job(Camel):
    id: str
    job_type: str
    state: JobState
    owner: str
    filename: str | None
    client: str
    created_at: datetime
    ended_at: datetime | None
    total: int
    processed: int
    failed: int
    not_found: int
    skipped: int
    in_flight: int
    pending: int
    rate_per_second: float | None
    eta_seconds: float | None
    last_heartbeat: datetime | None
    last_error: str | None
    ingest: JobIngest
    columns: list[str]
    stored_bytes: int
    """Bytes of the input as it came, and of the results."""


class JobList(Camel):
    jobs: list[Job]
    next: str | None


class JobsQuery(msgspec.Struct):
    after: str | None = None
    page_size: Annotated[int, msgspec.Meta(ge=1, le=100)] = msgspec.field(default=20, name="pageSize")


# -- creating


async def create_job(call: Call[None, None]) -> JobCreated:
    """Stores the upload, or the file that `source` names, reads it through, and answers: the rows are stored from there
    in the background."""
    content_type, most = call.request.headers.get("content-type", ""), call.server.config.tables.max_images
    fields = frozenset({"spec", "source"})
    form = Form(content_type, "file", fields, _SPEC_BYTES, max_files=most, instead="source")
    refuse_too_large(call)
    quota = await call.quota()
    if quota.max_open_batches and _key(call) is None:
        async with borrowed(call.database) as connection:
            await check_open_batches(connection, call.caller.owner, quota.max_open_batches)
    async with AsyncExitStack() as closing:
        feeder: Feeder | None = None
        async for data in call.request.stream():
            pieces = form.write(data)
            if feeder is None and form.filename is not None:
                upload = _open(call, form.filename, quota)
                feeder = await closing.enter_async_context(Feeder(upload, upload_work(call)))
            if feeder is not None:
                for piece in pieces:
                    await feeder.put(piece)
        form.finish()
        if "spec" not in form.fields:
            raise missing("spec")
        # Its templates are compiled, up to half a second each.
        spec = _read_spec(form.fields["spec"])
        new = partial(_new_job, call, spec, form.fields.get("source"), quota)
        job = await upload_work(call).run_for_client(new)
        if feeder is None:
            return await _create_from_source(call, job, quota)
        if job.source is not None:
            raise invalid("source", "a file is given too; give one of them.")
        await feeder.flush()
        parts = form.files if len(form.files) > 1 else None
        return await _finish(call, feeder, upload, replace(job, parts=parts))


def _open(call: Call[Any, Any], filename: str, quota: Quota) -> JobUpload:
    server = call.server
    return JobUpload(
        server.conninfo,
        owner=call.caller.owner,
        worker_id=server.worker_id,
        filename=filename,
        limits=server.config.intake,
        table_limits=server.config.tables,
        idempotency_key=_key(call),
        max_stored_bytes=quota.max_stored_bytes,
    )


def _key(call: Call[Any, Any]) -> str | None:
    """The caller's idempotency key, apart from those of other uploads and batches."""
    key = idempotency_key(call.request.headers)
    return None if key is None else f"job:{key}"


def _read_spec(text: str) -> JobSpec:
    try:
        return msgspec.json.decode(text, type=JobSpec)
    except msgspec.ValidationError as error:
        raise invalid("spec", f"{error}.") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid("spec", f"it is not JSON: {error}.") from None


def _new_job(call: Call[Any, Any], spec: JobSpec, source: str | None, quota: Quota) -> NewJob:
    """The job that a call asks for. `source` is JSON."""
    check_priority(spec.priority, quota)
    try:
        pool, route = place_job(spec, call.caller.owner, call.server.config.processors, call.server.providers)
    except UsageError as error:
        raise invalid("spec", error.advice) from None
    try:
        reference = None if source is None else msgspec.json.decode(source, type=SourceReference)
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid("source", f"{error}.") from None
    return NewJob(
        owner=call.caller.owner,
        spec=spec,
        pool=pool,
        route=route,
        client=client_of(call),
        actor=actor_of(call),
        key=_key(call),
        source=reference,
        max_open=quota.max_open_batches,
    )


async def _create_from_source(call: Call[Any, Any], job: NewJob, quota: Quota) -> JobCreated:
    """Fetch the file that a reference names, while the caller waits. Under a key that was used before, nothing is
    fetched: the file may be another now."""
    if job.source is None:
        raise missing("file")
    if (earlier := await _find_earlier(call, job)) is not None:
        return earlier
    try:
        source, file = await call.server.background.scans.find(job.source, call.caller.scope)
        upload = _open(call, clean_filename(file.path), quota)
        async with Feeder(upload, upload_work(call)) as feeder:
            await feed_file(feeder, source, file)
            return await _finish(call, feeder, upload, job)
    except FileUnreadable as error:
        raise invalid("source", error.advice) from None
    except FileNotReady as error:
        raise conflict(error.advice, param="source", code="source_changed") from None
    except SourceUnavailable as error:
        raise busy(error.advice) from None


async def _find_earlier(call: Call[Any, Any], job: NewJob) -> JobCreated | None:
    """The job that was made under the caller's key, if the same was asked."""
    if job.key is None:
        return None
    async with borrowed(call.database) as connection:
        earlier = await jobs.find_job_by_key(connection, job.owner, job.key)
    if earlier is None:
        return None
    if earlier[1] != job.fingerprint:
        raise conflict(_KEY_USED, param="Idempotency-Key", code="idempotency_conflict")
    return JobCreated(job_id=public_id("job", earlier[0]))


async def _finish(call: Call[Any, Any], feeder: Feeder, upload: JobUpload, job: NewJob) -> JobCreated:
    try:
        stored = await feeder.finish(
            partial(upload.finish, job.spec.columns, job.create, job.parts, through=job.check(upload.filename))
        )
    except NotRenderable as problem:
        raise invalid("spec", problem.advice) from None
    except jobs.KeyTaken as taken:
        raise conflict(f"{taken.message}.", param="Idempotency-Key", code="idempotency_conflict") from None
    if stored.existed:
        # The same bytes under the same key: the job of that time, if the same was asked.
        if (earlier := await _find_earlier(call, job)) is not None:
            return earlier
        raise conflict(_KEY_USED, param="Idempotency-Key", code="idempotency_conflict")
    call.server.background.wake("ingest")
    return JobCreated(job_id=public_id("job", job.id))


# -- showing


async def retrieve_job(call: Call[None, None]) -> Job:
    async with borrowed(call.database) as connection:
        batch = known_job(call, await get_batch(connection, call.id("job", "job_id"), call.caller.scope))
        found = await jobs.read_jobs(connection, [batch.id])
    return _job(batch, found[batch.id])


async def list_jobs(call: Call[JobsQuery, None]) -> JobList:
    query = call.query
    after = None
    if query.after is not None and (after := parse_id("job", query.after)) is None:
        raise invalid("after", "expected the 'next' of the page before.")
    async with borrowed(call.database) as connection:
        rows = await read.list_batches(
            connection, owner=call.caller.owner, dialect="job", after=after, limit=query.page_size + 1
        )
        page = rows[: query.page_size]
        found = await jobs.read_jobs(connection, [row.id for row in page])
    more = len(rows) > query.page_size
    return JobList(
        jobs=[_job(row, found[row.id]) for row in page if row.id in found],
        next=public_id("job", page[-1].id) if more else None,
    )


def known_job(call: Call[Any, Any], batch: Batch | None) -> Batch:
    if batch is None or batch.dialect != "job":
        raise not_found("Job", call.path["job_id"])
    return batch


def _job(batch: Batch, job: jobs.Job) -> Job:
    counts = batch.counts
    rate = None
    if batch.eta_s:
        rate = round((counts.pending + counts.in_flight) / batch.eta_s, 3)
    return Job(
        id=public_id("job", batch.id),
        job_type=job.job_type,
        state=_state(batch, job),
        owner=batch.owner,
        filename=job.filename,
        client=job.client,
        created_at=batch.created_at,
        ended_at=batch.ended_at,
        total=counts.total,
        processed=counts.settled,
        failed=counts.failed,
        not_found=counts.not_found,
        skipped=counts.skipped,
        in_flight=counts.in_flight,
        pending=counts.total - counts.settled - counts.in_flight,
        rate_per_second=rate,
        eta_seconds=batch.eta_s,
        last_heartbeat=job.last_heartbeat,
        last_error=job.problem or job.last_error,
        ingest=JobIngest(done=job.ingested_at is not None, rows=job.rows, problem=job.problem),
        columns=job.columns,
        stored_bytes=job.input_bytes + batch.output_bytes + batch.error_bytes,
    )


def _state(batch: Batch, job: jobs.Job) -> JobState:
    if job.problem is not None:
        return "FAILED"
    match batch.state:
        case BatchState.COMPLETED:
            return "DONE"
        case BatchState.CANCELLED | BatchState.CANCELLING:
            return "CANCELLED"
        case BatchState.EXPIRED | BatchState.FAILED:
            return "FAILED"
        case BatchState.PAUSED:
            return "PAUSED"
    if job.ingested_at is None:
        return "INGESTING"
    counts = batch.counts
    return "RUNNING" if counts.settled or counts.in_flight or counts.retried else "QUEUED"


# -- steering


async def pause_job(call: Call[None, Nothing | None]) -> Job:
    return await _steer(call, "pause", batch_steer.pause_batch, "PAUSED")


async def resume_job(call: Call[None, Nothing | None]) -> Job:
    return await _steer(call, "resume", batch_steer.resume_batch, "RUNNING", "QUEUED", "INGESTING")


async def cancel_job(call: Call[None, Nothing | None]) -> Job:
    return await _steer(call, "cancel", batch_steer.cancel_batch, "CANCELLED")


async def _steer(call: Call[Any, Any], verb: str, move: Move, *there: JobState) -> Job:
    """Move the job to a state; one that is there already is left as it is."""
    job_id = call.id("job", "job_id")
    async with borrowed(call.database) as connection:
        found = known_job(call, await get_batch(connection, job_id, call.caller.scope))
        moved = await steer(call, connection, found, move, verb)
        batch = known_job(call, await get_batch(connection, job_id, call.caller.scope))
        job = _job(batch, (await jobs.read_jobs(connection, [batch.id]))[batch.id])
    if not moved and job.state not in there:
        raise conflict(f"Cannot {verb} a job that is {job.state}.")
    return job


async def delete_job(call: Call[None, None]) -> Response:
    job_id = call.id("job", "job_id")
    async with borrowed(call.database) as connection:
        batch = known_job(call, await get_batch(connection, job_id, call.caller.scope))
        async with connection.transaction():
            if await erase.delete_batch(connection, job_id, call.caller.scope):
                await record(call, connection, "delete", batch)
    call.server.background.wake("purge")
    return Response(status_code=204)


_ONE = "/api/jobs/{job_id}"

ENDPOINTS = (
    Endpoint(
        "POST",
        "/api/jobs",
        create_job,
        "Do something with every row of a table, or every image.",
        form=_FORM,
        errors=(403, 409, 413),
    ),
    Endpoint("GET", "/api/jobs", list_jobs, "List jobs, newest first."),
    Endpoint("GET", _ONE, retrieve_job, "One job.", errors=(404,)),
    Endpoint("DELETE", _ONE, delete_job, "Erase a job, its rows and its results.", status=204, errors=(404, 409)),
    Endpoint("POST", f"{_ONE}/pause", pause_job, "Start nothing more of a job for now.", errors=(404, 409)),
    Endpoint("POST", f"{_ONE}/resume", resume_job, "Go on with a paused job.", errors=(404, 409)),
    Endpoint("POST", f"{_ONE}/cancel", cancel_job, "Start nothing more of a job.", errors=(404, 409)),
)

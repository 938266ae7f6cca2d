"""Jobs: a table in, what is to be done with each row, a sheet out."""

from __future__ import annotations

import hashlib
import json
from contextlib import AsyncExitStack
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
import psycopg
from starlette.responses import Response

from penstock.api import batches
from penstock.api.endpoint import Call, Endpoint, Nothing
from penstock.api.errors import conflict, not_found
from penstock.api.files import refuse_too_large
from penstock.api.multipart import Feeder, Form, idempotency_key, in_thread, invalid, missing
from penstock.batches import jobs, read
from penstock.batches import steer as batch_steer
from penstock.batches.read import Batch, get_batch
from penstock.db.pool import borrowed
from penstock.dispatch.rows.definition import ChatDefinition, parse_definition
from penstock.erase import erase
from penstock.errors import UsageError
from penstock.intake.job_upload import JobUpload
from penstock.intake.tables.table import TableSpec
from penstock.model import BatchState, new_id, parse_id, public_id

_SPEC_BYTES = 1024 * 1024
_FORM = {
    "type": "object",
    "required": ["file", "spec"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "spec": {"type": "string", "contentMediaType": "application/json"},
    },
}

JobState = Literal["INGESTING", "QUEUED", "RUNNING", "PAUSED", "DONE", "FAILED", "CANCELLED"]


class Camel(msgspec.Struct, rename="camel", kw_only=True):
    """Struct whose fields are camelCase on the wire."""


class JobSpec(msgspec.Struct, rename="camel", forbid_unknown_fields=True, frozen=True):
    """What is done with each row."""

    processor: str | dict[str, Any]
    """A registered processor's name, or a definition of what is asked of a provider."""
    job_type: Annotated[str, msgspec.Meta(min_length=1, max_length=100)] = "job"
    columns: TableSpec = TableSpec()
    max_attempts: Annotated[int, msgspec.Meta(ge=1, le=100)] | None = None
    max_concurrency: Annotated[int, msgspec.Meta(ge=1, le=100_000)] | None = None
    """Rows that are in flight at once, over all workers; those that wait for another try count too."""
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] = 0


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
    ingest: JobIngest
    columns: list[str]


class JobList(Camel):
    jobs: list[Job]
    next: str | None


class JobsQuery(msgspec.Struct):
    after: str | None = None
    page_size: Annotated[int, msgspec.Meta(ge=1, le=100)] = msgspec.field(default=20, name="pageSize")


# -- creating


async def create_job(call: Call[None, None]) -> JobCreated:
    """Stores the upload, reads it through, and answers: the rows are stored from there in the background."""
    form = Form(call.request.headers.get("content-type", ""), "file", frozenset({"spec"}), _SPEC_BYTES)
    refuse_too_large(call)
    async with AsyncExitStack() as closing:
        feeder: Feeder | None = None
        async for data in call.request.stream():
            pieces = form.write(data)
            if feeder is None and form.filename is not None:
                upload = _open(call, form.filename)
                feeder = await closing.enter_async_context(Feeder(upload))
            if feeder is not None:
                for piece in pieces:
                    await feeder.put(piece)
        form.finish()
        if feeder is None:
            raise missing("file")
        if "spec" not in form.fields:
            raise missing("spec")
        spec = _read_spec(form.fields["spec"])
        pool, route = _place(call, spec)
        await feeder.flush()
        return await _finish(call, upload, spec, pool, route)


def _open(call: Call[Any, Any], filename: str) -> JobUpload:
    server = call.server
    return JobUpload(
        server.conninfo,
        owner=call.caller.owner,
        worker_id=server.worker_id,
        filename=filename,
        limits=server.config.intake,
        table_limits=server.config.tables,
        idempotency_key=_key(call),
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
    except msgspec.DecodeError as error:
        raise invalid("spec", f"it is not JSON: {error}.") from None


def _place(call: Call[Any, Any], spec: JobSpec) -> tuple[str, str]:
    """Pool and route of the job's lane. Tenants name processors and providers; what these are, the operator says."""
    server = call.server
    if isinstance(spec.processor, str):
        for known in server.config.processors:
            if known.name == spec.processor:
                return known.pool, known.name
        names = ", ".join(known.name for known in server.config.processors) or "none is registered"
        raise invalid("spec", f"there is no processor '{spec.processor[:100]}'; there are: {names}.")
    try:
        definition = parse_definition(spec.processor)
    except UsageError as error:
        raise invalid("spec", f"{error.message}.") from None
    for provider in server.providers:
        if provider.name == definition.provider:
            return provider.pool, definition.model if isinstance(definition, ChatDefinition) else "http"
    raise invalid("spec", f"processor.provider: there is no provider '{definition.provider[:100]}'.")


async def _finish(call: Call[Any, Any], upload: JobUpload, spec: JobSpec, pool: str, route: str) -> JobCreated:
    batch_id, key, owner = new_id(), _key(call), call.caller.owner
    told = {**msgspec.to_builtins(spec), "route": route}
    fingerprint = hashlib.sha256(msgspec.json.encode(told, order="deterministic")).digest()
    client = call.request.client

    def alongside(connection: psycopg.Connection, file_id: UUID) -> None:
        jobs.create_job(
            connection,
            batch_id,
            owner=owner,
            file_id=file_id,
            pool=pool,
            key=key,
            fingerprint=fingerprint,
            priority=spec.priority,
            job_type=spec.job_type,
            spec=json.dumps(told),
            client=client.host if client else "",
        )

    try:
        stored = await in_thread(partial(upload.finish, spec.columns, alongside))
    except jobs.KeyTaken as taken:
        raise conflict(f"{taken.message}.", param="Idempotency-Key", code="idempotency_conflict") from None
    if stored.existed:
        # The same bytes under the same key: the job of that time, if the same was asked.
        async with borrowed(call.server.database) as connection:
            earlier = await jobs.find_job_by_key(connection, owner, str(key))
        if earlier is None or earlier[1] != fingerprint:
            message = "The idempotency key was used before for a job that differs."
            raise conflict(message, param="Idempotency-Key", code="idempotency_conflict")
        batch_id = earlier[0]
    call.server.background.wake("ingest")
    return JobCreated(job_id=public_id("job", batch_id))


# -- showing


async def retrieve_job(call: Call[None, None]) -> Job:
    async with borrowed(call.server.database) as connection:
        batch = known_job(call, await get_batch(connection, call.id("job", "job_id"), call.caller.scope))
        found = await jobs.read_jobs(connection, [batch.id])
    return _job(batch, found[batch.id])


async def list_jobs(call: Call[JobsQuery, None]) -> JobList:
    query = call.query
    after = None
    if query.after is not None and (after := parse_id("job", query.after)) is None:
        raise invalid("after", "expected the 'next' of the page before.")
    async with borrowed(call.server.database) as connection:
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
        ingest=JobIngest(done=job.ingested_at is not None, rows=job.rows, problem=job.problem),
        columns=job.columns,
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
    return "RUNNING" if batch.counts.settled or batch.counts.in_flight else "QUEUED"


# -- steering


async def pause_job(call: Call[None, Nothing | None]) -> Job:
    return await _steer(call, "pause", batch_steer.pause_batch, "PAUSED")


async def resume_job(call: Call[None, Nothing | None]) -> Job:
    return await _steer(call, "resume", batch_steer.resume_batch, "RUNNING", "QUEUED", "INGESTING")


async def cancel_job(call: Call[None, Nothing | None]) -> Job:
    return await _steer(call, "cancel", batch_steer.cancel_batch, "CANCELLED")


async def _steer(call: Call[Any, Any], verb: str, move: batches.Move, *there: JobState) -> Job:
    """Move the job to a state; one that is there already is left as it is."""
    job_id = call.id("job", "job_id")
    async with borrowed(call.server.database) as connection:
        found = known_job(call, await get_batch(connection, job_id, call.caller.scope))
        moved = await batches.steer(call, connection, found, move)
        batch = known_job(call, await get_batch(connection, job_id, call.caller.scope))
        job = _job(batch, (await jobs.read_jobs(connection, [batch.id]))[batch.id])
    if not moved and job.state not in there:
        raise conflict(f"Cannot {verb} a job that is {job.state}.")
    return job


async def delete_job(call: Call[None, None]) -> Response:
    job_id = call.id("job", "job_id")
    async with borrowed(call.server.database) as connection:
        batch = known_job(call, await get_batch(connection, job_id, call.caller.scope))
        await erase.delete_batch(connection, job_id, call.caller.scope)
        if batch.file_id is not None:
            await erase.delete_file(connection, batch.file_id, call.caller.scope)
    call.server.background.wake("purge")
    return Response(status_code=204)


_ONE = "/api/jobs/{job_id}"

ENDPOINTS = (
    Endpoint("POST", "/api/jobs", create_job, "Do something with every row of a table.", form=_FORM, errors=(409, 413)),
    Endpoint("GET", "/api/jobs", list_jobs, "List jobs, newest first."),
    Endpoint("GET", _ONE, retrieve_job, "One job.", errors=(404,)),
    Endpoint("DELETE", _ONE, delete_job, "Erase a job, its rows and its results.", status=204, errors=(404, 409)),
    Endpoint("POST", f"{_ONE}/pause", pause_job, "Start nothing more of a job for now.", errors=(404, 409)),
    Endpoint("POST", f"{_ONE}/resume", resume_job, "Go on with a paused job.", errors=(404, 409)),
    Endpoint("POST", f"{_ONE}/cancel", cancel_job, "Start nothing more of a job.", errors=(404, 409)),
)

"""Work: batches and jobs in one list, and each of them as its page in the console shows it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec

from penstock.api.batches import Move, steer
from penstock.api.endpoint import Call, Caller, Camel, Endpoint, Nothing
from penstock.api.errors import conflict, no_work
from penstock.api.multipart import invalid
from penstock.batches import jobs, reprocess, work
from penstock.batches import steer as batch_steer
from penstock.batches.read import Batch, get_batch
from penstock.batches.work import NO_PACE, Pace, Work
from penstock.db.pool import Connection, borrowed
from penstock.export.grid import read_columns
from penstock.model import parse_id, public_id
from penstock.pools import provider_in

WorkState = Literal[
    "VALIDATING",
    "INGESTING",
    "QUEUED",
    "RUNNING",
    "PAUSED",
    "CANCELLING",
    "DONE",
    "FAILED",
    "CANCELLED",
    "EXPIRED",
]

_KINDS = ("job", "batch", "msgbatch")
_ID_PREFIX = re.compile(r"^(?:job|batch|msgbatch)_(?=[0-9a-f]+$)")
"""Before an id or its beginning, as people copy it. The id of a job is a batch's too: webhooks tell it as such."""
_NEWEST = UUID(int=2**128 - 1)
# A page looks at so many at most; it is shorter if few of them fit, and `next` goes on behind the last.
_MOST_LOOKED = 400
# The operation under way is looked for among so many of the newest.
_OPERATIONS_LOOKED = 20
_GATE_TEXTS = {
    "halted": "the provider refuses these calls, so nobody's are made until an operator has mended it",
    "waiting": "the provider asked for a pause",
}


class WorkCounts(Camel):
    """Rows by what became of them: they add up to `total`."""

    done: int
    failed: int
    not_found: int
    skipped: int
    retrying: int
    in_flight: int
    pending: int
    cancelled: int
    expired: int


class WorkEntry(Camel):
    id: str
    kind: Literal["job", "batch"]
    name: str
    state: WorkState
    owner: str
    created_at: datetime
    ended_at: datetime | None
    total: int
    counts: WorkCounts
    rate_per_second: float | None
    eta_seconds: float | None
    eta_range: tuple[float, float] | None
    job_type: str | None
    file_name: str | None
    changes: str
    """Another text whenever a row has moved."""
    reruns: int
    """How often rows were put back to run again: only then does one change that has ended."""


class WorkList(Camel):
    work: list[WorkEntry]
    next: str | None


class WorkLatency(Camel):
    """Of the last minute's calls, in milliseconds."""

    p50: float | None
    p95: float | None
    p99: float | None


class WorkTokens(Camel):
    input: int
    output: int


class WorkLimit(Camel):
    """How much of the model is called, over all processes, and why that last moved."""

    calls: float | None
    floor: float | None
    ceiling: float | None
    per_second: float | None
    why: str | None
    moved_at: datetime | None
    gate: Literal["waiting", "halted"] | None
    """The model is not called at the moment."""
    gate_until: datetime | None
    gate_code: str | None
    gate_message: str | None
    """The upstream's words, for admins; for others what the gate means."""


class WorkIngest(Camel):
    done: bool
    rows: int
    problem: str | None


class WorkOperation(Camel):
    id: str
    kind: Literal["reprocess"]
    row: int
    requeued: int
    created_at: datetime


class WorkDetails(WorkEntry):
    provider: str | None
    model: str | None
    latency: WorkLatency
    tokens: WorkTokens
    limit: WorkLimit | None
    last_error: str | None
    ingest: WorkIngest | None
    """Of a job."""
    operation: WorkOperation | None
    """The one that is under way."""
    idle: str | None
    """Of a run whose workers are gone: who goes on with it. No server works it off."""
    input_columns: list[str]
    columns: list[str]
    """The result's."""


class WorkQuery(msgspec.Struct):
    state: Annotated[str, msgspec.Meta(description=f"One or more, separated by commas: {', '.join(work.STATES)}.")] = ""
    kind: Literal["job", "batch"] | None = None
    owner: Annotated[str, msgspec.Meta(description="For admins: an owner, or * for all.")] | None = None
    q: Annotated[str, msgspec.Meta(max_length=200, description="A part of the name, the job type or the id.")] = ""
    page_size: Annotated[int, msgspec.Meta(ge=1, le=100)] = msgspec.field(default=25, name="pageSize")
    after: str | None = None


async def list_work(call: Call[WorkQuery, None]) -> WorkList:
    """Batches and jobs, newest first. A page may hold fewer than asked for: the list ends where `next` is null."""
    query = call.query
    states = _read_states(query.state)
    after = None if query.after is None else parse_work_id(query.after)
    if query.after is not None and after is None:
        raise invalid("after", "expected the 'next' of the page before.")
    owner = choose_owner(call.caller, query.owner)
    async with borrowed(call.database) as connection:
        page, next_ = await _find_page(connection, owner, states, query, after or _NEWEST)
        paces = await work.read_paces(connection, page)
    return WorkList(
        work=[describe(one, paces.get(one.id, NO_PACE)) for one in page],
        next=None if next_ is None else public_id("batch", next_),
    )


def choose_owner(caller: Caller, asked: str | None) -> str | None:
    """The owner whose work is listed, None for all: the caller itself, unless an admin asks for others."""
    if asked is None or caller.role != "admin":
        return caller.owner
    return None if asked == "*" else asked


async def _find_page(
    connection: Connection, owner: str | None, states: Sequence[str], query: WorkQuery, below: UUID
) -> tuple[list[Work], UUID | None]:
    """Find the next page, and where the one after it begins."""
    dialects = {"job": ("job", "run"), "batch": ("openai", "anthropic", "run"), None: work.DIALECTS}[query.kind]
    found: list[Work] = []
    looked, text = 0, _ID_PREFIX.sub("", query.q.strip()) or None
    while looked < _MOST_LOOKED:
        look = _MOST_LOOKED // 2 if text else query.page_size + 1
        met = await work.find_work(
            connection,
            owner=owner,
            dialects=dialects,
            states=work.states_behind(states or work.STATES),
            below=below,
            look=look,
            text=text,
        )
        fits = [id_ for id_, has_text in met if has_text][: query.page_size + 1]
        for one in await work.read_work(connection, fits, owner):
            if (states and one.state not in states) or (query.kind and (query.kind == "job") is not one.is_job):
                continue
            if len(found) == query.page_size:
                return found, found[-1].id
            found.append(one)
        if len(met) < look:
            return found, None
        # With more that fit than were read, the next look begins behind the last that was.
        below = fits[-1] if len(fits) > query.page_size else met[-1][0]
        looked += look
    return found, below


def _read_states(text: str) -> list[str]:
    states = [state for state in text.split(",") if state]
    if unknown := [state for state in states if state not in work.STATES]:
        raise invalid("state", f"there is no '{unknown[0][:50]}'; there are {', '.join(work.STATES)}.")
    return states


def parse_work_id(text: str) -> UUID | None:
    """The id of work in any of its forms."""
    return next((found for kind in _KINDS if (found := parse_id(kind, text)) is not None), None)


def work_id(call: Call[Any, Any], name: str = "work_id") -> UUID:
    """The id of work in the path."""
    found = parse_work_id(call.path[name])
    if found is None:
        raise no_work(call.path[name])
    return found


async def find_owned(call: Call[Any, Any], connection: Connection, name: str = "work_id") -> Batch:
    """The caller's batch or job in the path."""
    batch = await get_batch(connection, work_id(call, name), call.caller.scope)
    if batch is None:
        raise no_work(call.path[name])
    return batch


async def retrieve_work(call: Call[None, None]) -> WorkDetails:
    async with borrowed(call.database) as connection:
        return await _read_one(call, connection, work_id(call))


async def _read_one(call: Call[Any, Any], connection: Connection, id_: UUID) -> WorkDetails:
    found = await read_details(
        connection,
        id_,
        call.caller.scope,
        grace_s=call.server.config.liveness.heartbeat_grace_s,
        for_admin=call.caller.role == "admin",
    )
    if found is None or found.id != call.path["work_id"]:
        raise no_work(call.path["work_id"])
    return found


async def read_details(
    connection: Connection, id_: UUID, owner: str | None, *, grace_s: float, for_admin: bool
) -> WorkDetails | None:
    """Read everything that the page of a batch or a job shows; None if this owner has none of this id."""
    found = await work.read_work(connection, [id_], owner)
    if not found:
        return None
    one = found[0]
    paces = await work.read_paces(connection, found)
    job = (await jobs.read_jobs(connection, [id_])).get(id_) if one.is_job else None
    columns = await read_columns(connection, id_) if one.is_job else None
    operations = await reprocess.list_operations(connection, id_, limit=_OPERATIONS_LOOKED) if one.is_job else []
    p50, p95, p99 = await work.read_latency(connection, id_)
    entry = describe(one, paces.get(id_, NO_PACE))
    return WorkDetails(
        **{name: getattr(entry, name) for name in WorkEntry.__struct_fields__},
        provider=provider_in(one.pool),
        model=one.route,
        latency=WorkLatency(p50=p50, p95=p95, p99=p99),
        tokens=WorkTokens(input=one.input_tokens, output=one.output_tokens),
        limit=_limit(await work.read_limit(connection, one), for_admin=for_admin),
        last_error=None if job is None else job.problem or job.last_error,
        ingest=WorkIngest(done=one.ingested_at is not None, rows=one.rows or 0, problem=one.problem) if job else None,
        operation=next((_operation(each) for each in operations if each.state == "running"), None),
        idle=await work.explain_idle(connection, one, grace_s),
        input_columns=columns.input if columns else [],
        columns=columns.result if columns else [],
    )


def describe(one: Work, pace: Pace) -> WorkEntry:
    """A batch or a job as an entry of the list."""
    kind = "job" if one.is_job else "msgbatch" if one.dialect == "anthropic" else "batch"
    state: Any = one.state
    retrying = min(one.retrying, one.left)
    left = one.left - retrying
    gone = one.batch_state in ("cancelled", "cancelling", "expired")
    return WorkEntry(
        id=public_id(kind, one.id),
        kind="job" if one.is_job else "batch",
        name=one.given_name or one.filename or one.job_type or public_id(kind, one.id),
        state=state,
        owner=one.owner,
        created_at=one.created_at,
        ended_at=one.ended_at,
        total=one.total,
        counts=WorkCounts(
            done=one.completed,
            failed=one.failed,
            not_found=one.not_found,
            skipped=one.skipped,
            retrying=0 if gone else retrying,
            in_flight=one.in_flight,
            pending=0 if gone else left,
            cancelled=one.left if gone and one.batch_state != "expired" else 0,
            expired=one.left if one.batch_state == "expired" else 0,
        ),
        rate_per_second=pace.per_s,
        eta_seconds=pace.eta_s,
        eta_range=pace.eta_range_s,
        job_type=one.job_type,
        file_name=one.filename,
        changes=f"{one.settled}.{one.in_flight}.{one.retried}.{one.retrying}.{one.reruns}",
        reruns=one.reruns,
    )


def _limit(limit: work.LimitNow | None, *, for_admin: bool) -> WorkLimit | None:
    if limit is None:
        return None
    gate: Any = "halted" if limit.halted_at else "waiting" if limit.waits_until else None
    # The upstream's text is about the request that met the gate first, which may be another owner's.
    message = limit.message if for_admin or gate is None else f"{_GATE_TEXTS[gate]} ({limit.code or 'no code'})"
    return WorkLimit(
        calls=None if limit.calls is None else round(limit.calls, 1),
        floor=limit.floor,
        ceiling=limit.ceiling,
        per_second=None if limit.per_s is None else round(limit.per_s, 3),
        why=limit.reason,
        moved_at=limit.moved_at,
        gate=gate,
        gate_until=None if limit.halted_at else limit.waits_until,
        gate_code=limit.code,
        gate_message=message,
    )


def _operation(operation: reprocess.Operation) -> WorkOperation:
    return WorkOperation(
        id=public_id("operation", operation.id),
        kind="reprocess",
        row=operation.place + 1,
        requeued=operation.requeued,
        created_at=operation.created_at,
    )


# -- steering


async def pause_work(call: Call[None, Nothing | None]) -> WorkDetails:
    return await _steer(call, "pause", batch_steer.pause_batch, "PAUSED")


async def resume_work(call: Call[None, Nothing | None]) -> WorkDetails:
    return await _steer(call, "resume", batch_steer.resume_batch, "RUNNING", "QUEUED", "INGESTING", "VALIDATING")


async def cancel_work(call: Call[None, Nothing | None]) -> WorkDetails:
    return await _steer(call, "cancel", batch_steer.cancel_batch, "CANCELLED", "CANCELLING")


async def _steer(call: Call[Any, Any], verb: str, move: Move, *there: WorkState) -> WorkDetails:
    """Move a batch or a job to a state; one that is there already is left as it is."""
    id_ = work_id(call)
    async with borrowed(call.database) as connection:
        await _read_one(call, connection, id_)
        moved = await steer(call, connection, await find_owned(call, connection), move, verb)
        shown = await _read_one(call, connection, id_)
    if not moved and shown.state not in there:
        raise conflict(f"Cannot {verb} what is {shown.state}.")
    return shown


_ONE = "/api/work/{work_id}"

ENDPOINTS = (
    Endpoint("GET", "/api/work", list_work, "Batches and jobs, newest first."),
    Endpoint("GET", _ONE, retrieve_work, "One batch or job.", errors=(404,)),
    Endpoint("POST", f"{_ONE}/pause", pause_work, "Start nothing more of a batch or job for now.", errors=(404, 409)),
    Endpoint("POST", f"{_ONE}/resume", resume_work, "Go on with a paused batch or job.", errors=(404, 409)),
    Endpoint("POST", f"{_ONE}/cancel", cancel_work, "Start nothing more of a batch or job.", errors=(404, 409)),
)

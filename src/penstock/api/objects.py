"""Objects that OpenAI clients read: those of the Files, Uploads and Batches APIs, with explicit nulls and unix seconds.

Fields that OpenAI does not have come last in each object, after a comment that begins with "Ours".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Generic, Literal, Protocol, Self, TypeVar, cast, get_args

import msgspec

from penstock.batches.read import Batch as BatchRow
from penstock.erase.purge import Kind
from penstock.intake.files import FileRow
from penstock.model import BatchState, public_id

Seconds = Annotated[int, msgspec.Meta(description="Unix time, in seconds.")]
Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]
PURPOSES: tuple[str, ...] = get_args(Purpose)
Lifetime = Annotated[int, msgspec.Meta(ge=3600, le=2_592_000)]
DEFAULT_LIFETIME_S = 2_592_000
"""Seconds for which input files of batches and results are kept, unless the caller asks otherwise: 30 days."""

BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
RequestStatus = Literal["pending", "processing", "completed", "failed", "not_found", "skipped", "cancelled", "expired"]

UploadStatus = Literal["pending", "completed", "cancelled", "expired"]
REQUEST_STATUSES: tuple[str, ...] = get_args(RequestStatus)


class _Listed(Protocol):
    id: str


T = TypeVar("T", bound=_Listed)


class Page(msgspec.Struct, Generic[T], kw_only=True):
    """Page of a list."""

    object: Literal["list"] = "list"
    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, data: list[T], *, has_more: bool) -> Self:
        first_id, last_id = (data[0].id, data[-1].id) if data else (None, None)
        return cls(data=data, first_id=first_id, last_id=last_id, has_more=has_more)


class ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True):
    anchor: Literal["created_at"]
    seconds: Lifetime


# -- files


class File(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: Seconds
    filename: str
    purpose: str
    status: Literal["uploaded", "processed", "error"] = "processed"
    status_details: str | None = None
    expires_at: Seconds | None = None


class FileDeleted(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class FileList(Page[File]): ...


# -- uploads in parts


class Upload(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["upload"] = "upload"
    bytes: int
    created_at: Seconds
    expires_at: Seconds
    filename: str
    purpose: str
    status: UploadStatus
    file: File | None = None


class UploadPart(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["upload.part"] = "upload.part"
    created_at: Seconds
    upload_id: str


# -- batches


class BatchError(msgspec.Struct, kw_only=True):
    code: str | None = None
    line: int | None = None
    message: str | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(msgspec.Struct, kw_only=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class BatchUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Batch(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str | None
    """Id of the input file; null once the file has been deleted."""
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: Seconds
    in_progress_at: Seconds | None
    expires_at: Seconds | None
    finalizing_at: Seconds | None
    completed_at: Seconds | None
    failed_at: Seconds | None
    expired_at: Seconds | None
    cancelling_at: Seconds | None
    cancelled_at: Seconds | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None
    # Ours. A paused batch is `in_progress` to OpenAI's clients, which do not know pausing.
    paused_at: Seconds | None
    priority: int
    eta_seconds: int | None
    skipped: int
    """Requests that a function left out, which is no error; `request_counts` has them among the failed."""
    result_bytes: int
    """Bytes of the output and error file, as far as they are written."""
    target: str | None
    """What `penstock run` calls for its batch, a URL or a function; null for batches that servers work off."""


class BatchDeleted(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["batch"] = "batch"
    deleted: bool = True


class BatchList(Page[Batch]): ...


# -- one request of a batch (ours)


class RequestError(msgspec.Struct):
    code: str
    message: str


class RequestResponse(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw | None


class Request(msgspec.Struct, kw_only=True):
    """One request of a batch, with its answer."""

    id: str
    object: Literal["batch.request"] = "batch.request"
    line: int
    custom_id: str
    status: RequestStatus
    url: str
    body: msgspec.Raw
    response: RequestResponse | None
    error: RequestError | None
    attempts: int
    finished_at: Seconds | None


class RequestList(Page[Request]): ...


class Attempt(msgspec.Struct, kw_only=True):
    """One attempt that did not succeed."""

    id: str
    object: Literal["batch.attempt"] = "batch.attempt"
    request_id: str | None
    custom_id: str | None
    """Null, like `request_id`, once the input has been erased."""
    attempt: int
    counted: bool
    ended_at: Seconds
    duration_ms: int
    status_code: int | None
    error: RequestError
    not_before: Seconds | None


class AttemptList(Page[Attempt]): ...


# -- erasure (ours)


class Erased(msgspec.Struct, kw_only=True):
    """Rows deleted so far, by kind."""

    inputs: int
    chunks: int
    outcomes: int
    attempts: int
    others: int


class Erasure(msgspec.Struct, kw_only=True):
    """Report of an erasure: the object, and the rows deleted so far. Proof once `status` is `finished`."""

    id: str
    object: Literal["erasure"] = "erasure"
    kind: Kind
    object_id: str
    status: Literal["in_progress", "finished"]
    requested_at: Seconds
    finished_at: Seconds | None
    erased: Erased


class ErasureList(Page[Erasure]): ...


# -- from rows


def seconds(moment: datetime) -> int:
    return int(moment.timestamp())


def seconds_or_none(moment: datetime | None) -> int | None:
    return None if moment is None else int(moment.timestamp())


def file_object(row: FileRow) -> File:
    return File(
        id=public_id("file", row.id),
        bytes=row.bytes,
        created_at=seconds(row.created_at),
        filename=row.filename,
        purpose=row.purpose,
        expires_at=seconds_or_none(row.expires_at),
    )


def batch_object(row: BatchRow) -> Batch:
    counts, usage, state = row.counts, row.usage, row.state
    unfit = counts.failed + counts.not_found + counts.skipped
    not_run = counts.cancelled + counts.expired if state.terminal else 0
    started = row.validated_at is not None and state is not BatchState.FAILED
    ended = state.terminal
    has_output = started and (counts.completed > 0 or not ended)
    # Error lines of requests that were not run are made from the input: without it there are none.
    has_errors = started and (unfit > 0 or (not_run > 0 and row.file_id is not None))
    return Batch(
        id=public_id("batch", row.id),
        endpoint=row.endpoint or "",
        model=row.model,
        errors=_errors(row.problems),
        input_file_id=public_id("file", row.file_id) if row.file_id else None,
        completion_window=row.completion_window or "",
        status=cast(BatchStatus, "in_progress" if state is BatchState.PAUSED else state.value),
        output_file_id=public_id("file", row.output_file_id) if has_output and row.output_file_id else None,
        error_file_id=public_id("file", row.error_file_id) if has_errors and row.error_file_id else None,
        created_at=seconds(row.created_at),
        in_progress_at=seconds_or_none(row.validated_at),
        expires_at=seconds_or_none(row.deadline),
        # Results are read from the outcomes: between the last of them and the end there is nothing to wait for.
        finalizing_at=seconds_or_none(row.completed_at),
        completed_at=seconds_or_none(row.completed_at),
        failed_at=seconds_or_none(row.failed_at),
        expired_at=seconds_or_none(row.expired_at),
        cancelling_at=seconds_or_none(row.cancelling_at),
        cancelled_at=seconds_or_none(row.cancelled_at),
        # Zeros until the batch has been validated.
        request_counts=RequestCounts(total=counts.total, completed=counts.completed, failed=unfit + not_run)
        if started
        else RequestCounts(),
        usage=BatchUsage(
            input_tokens=usage.input_tokens,
            input_tokens_details=InputTokensDetails(usage.cached_tokens),
            output_tokens=usage.output_tokens,
            output_tokens_details=OutputTokensDetails(usage.reasoning_tokens),
            total_tokens=usage.input_tokens + usage.output_tokens,
        ),
        metadata=row.metadata or None,
        paused_at=seconds_or_none(row.paused_at),
        priority=row.priority,
        eta_seconds=None if row.eta_s is None else round(row.eta_s),
        skipped=counts.skipped,
        result_bytes=row.output_bytes + row.error_bytes,
        target=row.target,
    )


def _errors(problems: Sequence[Mapping[str, Any]] | None) -> BatchErrors | None:
    if problems is None:
        return None
    return BatchErrors(data=[msgspec.convert(dict(problem), BatchError) for problem in problems])

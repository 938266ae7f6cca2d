"""Answers for exceptions, in the words of the API; unexpected ones are logged."""

from __future__ import annotations

import logging
import traceback

import psycopg
from psycopg_pool import PoolClosed, PoolTimeout, TooManyRequests

from penstock.api.errors import ApiError, busy, conflict, disk_full, out_of_memory, over_quota, too_many_connections
from penstock.batches.run_again import NotRetryable
from penstock.erase.erase import NotErasable
from penstock.intake.parts import UploadMissing, UploadNotPending
from penstock.intake.refusal import IntakeGivenUp, IntakeRefused
from penstock.intake.writer import IdempotencyConflict
from penstock.quotas.quotas import QuotaExceeded
from penstock.server.acceptor import TooManyWaitingError
from penstock.server.connections import TooManyConnectionsError
from penstock.server.memory import MemoryUsedUpError

_log = logging.getLogger("penstock.api")


def to_api_error(error: Exception, request_id: str) -> ApiError:
    """The answer to a client for any exception."""
    match error:
        case ApiError():
            return error
        case NotErasable() | NotRetryable() | UploadNotPending():
            return conflict(error.advice)
        case IdempotencyConflict():
            return conflict(error.message, param="Idempotency-Key", code="idempotency_conflict")
        case UploadMissing():
            return ApiError(404, error.message, param="id")
        case IntakeRefused():
            status = 413 if error.code in ("file_too_large", "too_many_tasks") else 400
            return ApiError(status, error.advice, param=error.param, code=error.code)
        case QuotaExceeded():
            return over_quota(error)
        case MemoryUsedUpError():
            return out_of_memory()
        case TooManyConnectionsError():
            return too_many_connections()
        case IntakeGivenUp() | TooManyWaitingError():
            return busy(error.message)
        case psycopg.errors.DiskFull():
            _log.error("%s: the database's disk is full", request_id)
            return disk_full()
        case psycopg.errors.QueryCanceled():
            _log.warning("%s: a statement took longer than statement_timeout_s", request_id)
            return busy("The database is too slow at the moment.")
        case psycopg.OperationalError() | psycopg.InterfaceError() | PoolTimeout() | PoolClosed() | TooManyRequests():
            _log.warning("%s: the database is away: %s", request_id, type(error).__name__)
            return busy()
        case psycopg.DataError():
            # A NUL in a text, or a number past its column.
            return ApiError(400, "The request contains a value that cannot be stored.", code="invalid_value")
    log_error(error, request_id)
    return ApiError(500, f"Something went wrong here. Quote {request_id} to find it in the log.", type="server_error")


def log_error(error: Exception, request_id: str) -> None:
    """Log where an exception was raised; not its text, which may quote a request."""
    frames = traceback.extract_tb(error.__traceback__)
    way = " < ".join(f"{frame.filename.rsplit('penstock/', 1)[-1]}:{frame.lineno}" for frame in reversed(frames))
    state = f" {error.sqlstate}" if isinstance(error, psycopg.Error) and error.sqlstate else ""
    _log.error("%s: %s%s at %s", request_id, type(error).__name__, state, way)

"""Every metric of Penstock, and what its labels may say: nothing of an owner, a batch, a request or an address.

A label has few values: those of `provider` and `model` are the operator's words, all others are listed here. Counters
and histograms are counted where the work is done; gauges are read there, or from the database (`queue_figures.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from time import monotonic

from penstock.model import Again, Halt, Verdict
from penstock.observe.metrics import Cells, Labels, Sample, counter, gauge, histogram, read_from

_DOUBLING_S = tuple(2**step / 1000 for step in range(20))
"""From a millisecond to nine minutes."""
_DATABASE_S = _DOUBLING_S[:16]
_ROWS = tuple(digit * 10**power for power in range(5) for digit in (1, 2, 5))[:-1]

# -- items and calls

ITEMS = counter(
    "penstock_items_total",
    "Items whose outcome this process recorded, by outcome.",
    *("provider", "pool", "model", "outcome"),
)
CALLS = counter(
    "penstock_calls_total",
    "Attempts that ended, by class of HTTP status; none: there was no answer, or it was no HTTP.",
    *("provider", "pool", "model", "status"),
)
CALL_DURATION = histogram(
    "penstock_call_duration_seconds",
    "Duration of attempts.",
    *("provider", "pool", "model"),
    bounds=_DOUBLING_S,
)
CALL_ERRORS = counter(
    "penstock_call_errors_total", "Attempts that did not complete, by class of error.", "provider", "pool", "error"
)
THROTTLES = counter(
    "penstock_throttles_total", "Calls that the provider did not admit, by HTTP status.", "provider", "pool", "status"
)
RETRIES = counter(
    "penstock_retries_total", "Attempts after which the item is tried again.", "provider", "pool", "error"
)
HALTS = counter("penstock_halts_total", "Answers that halted their route until a person acts.", "provider", "pool")
IN_FLIGHT = gauge("penstock_calls_in_flight", "Calls that have begun and not ended.", "provider", "pool")
WAITING = gauge("penstock_waiting_items", "Items that a worker holds in memory and has not begun.", "provider", "pool")
CONCURRENCY = gauge(
    "penstock_concurrency",
    "Calls at a time that the settings allow the worker; those of a process's batches and sessions share theirs.",
    *("provider", "pool"),
)

# -- claims and workers

CLAIM_DURATION = histogram(
    "penstock_claim_duration_seconds", "Duration of claims.", "provider", "pool", bounds=_DATABASE_S
)
CLAIM_ITEMS = histogram("penstock_claim_items", "Items of a claim; 0 if none.", "provider", "pool", bounds=(0, *_ROWS))
RECLAIMED_LEASES = counter("penstock_reclaimed_leases_total", "Leases that this process took back from lost workers.")
RECLAIMED_ITEMS = counter("penstock_reclaimed_items_total", "Items on leases taken back from lost workers.")
IDENTITIES_LOST = counter("penstock_identities_lost_total", "Times that a worker had to go on under a new identity.")
HEARTBEAT_DURATION = histogram("penstock_heartbeat_duration_seconds", "Duration of check-ins.", bounds=_DATABASE_S)
HEARTBEAT_FAILURES = counter("penstock_heartbeat_failures_total", "Check-ins that failed.")
PROCESSES = gauge("penstock_processes", "Processes whose figures are here.")
PROCESS_RESTARTS = counter("penstock_process_restarts_total", "Worker processes restarted after they died.")

# -- the database, as this process sees it

FLUSH_ROWS = histogram("penstock_flush_rows", "Rows of a flush.", "writer", bounds=_ROWS)
FLUSH_DURATION = histogram(
    "penstock_flush_duration_seconds", "Duration of a flush, with its repetitions.", "writer", bounds=_DATABASE_S
)
FLUSH_FAILURES = counter("penstock_flush_failures_total", "Flushes that failed and are tried again.", "writer")
ROWS_REJECTED = counter("penstock_rejected_rows_total", "Rows that the database rejected for their content.", "writer")
BACKPRESSURE = counter("penstock_backpressure_total", "Times that a full buffer held back its producers.", "writer")
BUFFER_FILL = gauge(
    "penstock_buffer_fill_ratio", "Share of the fullest buffer that is in use; 1 is full.", "writer", merge="max"
)
SETTLED = counter(
    "penstock_settled_rows_total",
    "Rows of results by what became of them. A fenced one was refused: its lease had been taken back.",
    *("provider", "pool", "result"),
)
DATABASE_LATENCY = gauge(
    "penstock_database_latency_seconds",
    "Moving average of claims and flushes in the slowest process.",
    merge="max",
)
POOL_REQUESTS = counter("penstock_database_pool_requests_total", "Requests for a database connection.", "connections")
POOL_QUEUED = counter(
    "penstock_database_pool_queued_total", "Requests for a database connection that had to wait.", "connections"
)
POOL_WAIT = counter("penstock_database_pool_wait_seconds_total", "Time waited for database connections.", "connections")
POOL_CONNECTIONS = gauge(
    "penstock_database_pool_connections", "Database connections, by whether they are in use.", "connections", "state"
)

# -- the server

INGEST_DURATION = histogram(
    "penstock_ingest_duration_seconds", "Time from a file's first byte until it is stored.", bounds=_DOUBLING_S
)
INGEST_ROWS = counter("penstock_ingest_rows_total", "Requests and rows of stored files.")
INGEST_BYTES = counter("penstock_ingest_bytes_total", "Bytes of stored files, as they came.")
API_REQUESTS = counter(
    "penstock_api_requests_total", "Requests to the API, by route and class of status.", "method", "path", "status"
)
API_SECONDS = counter("penstock_api_seconds_total", "Time that answering requests to the API took.", "method", "path")

# -- the whole installation, read from the database

DATABASE_UP = gauge("penstock_database_up", "1 if the figures of the database could be read.", merge="max")
QUEUE_READ = gauge("penstock_queue_read_seconds", "Time that reading the figures of the database took.", merge="max")
QUEUE_ITEMS = gauge(
    "penstock_queue_items",
    "Items not decided yet: pending, to be tried again (due, later, held by a pause), or leased. Cached; of very many"
    " lanes, leases and deferrals the first 100,000 each.",
    *("provider", "pool", "model", "state"),
)
LEASES = gauge("penstock_leases", "Leases held by workers.", "provider", "pool")
WORKERS = gauge("penstock_workers", "Registered workers: alive, draining or silent.", "provider", "pool", "state")
GATES = gauge(
    "penstock_gates",
    "Routes closed for a while (waiting) or until a person acts (halted).",
    *("provider", "pool", "state"),
)
# Of several models that are `other`, the highest.
LIMIT = gauge(
    "penstock_limit",
    "Calls at a time that all processes together may have now, and the bounds between which that moves.",
    *("provider", "model", "bound"),
    merge="max",
)
RATE_LIMIT = gauge("penstock_rate_limit", "Calls per second that may begin now.", "provider", "model", merge="max")

# -- values of labels

OTHER = "other"
_POOL_KINDS = {"serve": "batch", "session": "session", "processor": "processor"}
_REFUSED = (429, 503, 529)
_PROTOCOL = frozenset({"protocol_error", "connection_reset", "response_too_large", "invalid_response"})
_MAX_ROUTES = 1_000

_models: frozenset[str] = frozenset()


def name_models(names: Iterable[str], limit: int) -> None:
    """Let `model` say these names, the first so many of them; all others are `other`. Tenants name models too."""
    global _models
    _models = frozenset(list(dict.fromkeys(names))[:limit])


def model_label(route: str) -> str:
    return route if route in _models else OTHER


def pool_labels(pool: str) -> Labels:
    """(provider, kind) of the pool of some work. That of a run holds the id of its batch."""
    kind, _, name = pool.partition(":")
    if kind in _POOL_KINDS and name:
        return name, _POOL_KINDS[kind]
    return "", "server" if pool in _POOL_KINDS else "run"


def status_label(status: int | None) -> str:
    return f"{status // 100}xx" if status is not None and 100 <= status < 600 else "none"


def error_label(verdict: Verdict) -> str:
    """Class of an attempt's error. Codes and messages are the upstream's own words, so they are no labels."""
    status, code = verdict.status_code, verdict.error_code or ""
    if isinstance(verdict, Halt):
        return "halted"
    if status in _REFUSED:
        return "refused"
    if code.startswith(("connect_", "proxy_", "tls_")):
        return "connect"
    if code.endswith("timeout"):
        return "timeout"
    if status is not None and status >= 500:
        return "server"
    if status is not None and status >= 400:
        return "client"
    if status is not None or code in _PROTOCOL:
        return "protocol"
    return "processor" if code.startswith("processor") else OTHER


class CallCounts:
    """Counts the attempts of one worker. Called for every item: it counts up cells that it has found before."""

    def __init__(self, pool: str) -> None:
        self._pool = pool_labels(pool)
        self._routes: dict[str, tuple[Cells, _StatusCells]] = {}

    def note(self, route: str, verdict: Verdict) -> None:
        cells = self._routes.get(route)
        if cells is None:
            cells = self._find(route)
        duration, statuses = cells
        seconds = verdict.duration_ms / 1000
        duration[bisect_left(_DOUBLING_S, seconds)] += 1
        duration[-1] += seconds
        statuses[verdict.status_code][0] += 1
        if verdict.error_code is not None:
            self._note_error(verdict)

    def _find(self, route: str) -> tuple[Cells, _StatusCells]:
        if len(self._routes) >= _MAX_ROUTES:
            self._routes.clear()
        labels = (*self._pool, model_label(route))
        found = self._routes[route] = (CALL_DURATION.cells(labels), _StatusCells(labels))
        return found

    def _note_error(self, verdict: Verdict) -> None:
        error = error_label(verdict)
        CALL_ERRORS.add((*self._pool, error))
        if verdict.status_code in _REFUSED:
            THROTTLES.add((*self._pool, str(verdict.status_code)))
        if isinstance(verdict, Again):
            RETRIES.add((*self._pool, error))
        elif isinstance(verdict, Halt):
            HALTS.add(self._pool)


class _StatusCells(dict[int | None, Cells]):
    """Cells by status, each found once."""

    def __init__(self, labels: Labels) -> None:
        self._labels = labels

    def __missing__(self, status: int | None) -> Cells:
        cells = CALLS.cells((*self._labels, status_label(status)))
        if status is None or 100 <= status < 600:
            self[status] = cells
        return cells


# -- latency of the database

_LATENCY_WEIGHT = 0.1
_LATENCY_IDLE_S = 60.0
_latency_s = 0.0
_latency_at = 0.0


def note_latency(seconds: float) -> None:
    """Note how long the database took for a statement."""
    global _latency_s, _latency_at
    now = monotonic()
    old = _latency_s if now - _latency_at < _LATENCY_IDLE_S else seconds
    _latency_s, _latency_at = old + _LATENCY_WEIGHT * (seconds - old), now


@read_from
def _read_process() -> list[Sample]:
    samples = [Sample(PROCESSES, (), 1)]
    if monotonic() - _latency_at < _LATENCY_IDLE_S:
        samples.append(Sample(DATABASE_LATENCY, (), _latency_s))
    return samples

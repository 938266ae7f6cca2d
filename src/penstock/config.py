"""Every limit and interval, with its range. Units are part of the names.

One name serves everywhere: `heartbeat_grace_s` in TOML is `PENSTOCK_HEARTBEAT_GRACE_S` in the
environment and `--set heartbeat_grace_s=30` on the command line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.adapters.config import Adapter
    from penstock.deliver.sink_config import Sink
    from penstock.dispatch.processors import ProcessorConfig
    from penstock.dispatch.providers import Provider

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


def _knob(default: float, low: float, high: float, about: str) -> Any:
    return field(default=default, metadata={"low": low, "high": high, "about": about})


def _choice(default: str, choices: tuple[str, ...], about: str) -> Any:
    return field(default=default, metadata={"choices": choices, "about": about})


def _switch(about: str) -> Any:
    return field(default=False, metadata={"choices": ("true", "false"), "about": about})


@dataclass(frozen=True, slots=True)
class IntakeLimits:
    """Limits of input files, and of how they are read."""

    max_file_bytes: int = _knob(64 * GIB, 1, 1024 * GIB, "largest input after decompression")
    max_upload_bytes: int = _knob(8 * GIB, 1, 1024 * GIB, "largest file that can be uploaded")
    max_part_bytes: int = _knob(64 * MIB, 1, 4 * GIB, "largest part of an upload in parts")
    max_upload_parts: int = _knob(10_000, 1, 100_000, "most parts of one upload")
    upload_ttl_s: float = _knob(3_600, 1, 7 * 86_400, "how long an upload in parts can be completed")
    max_message_batch_bytes: int = _knob(256 * MIB, KIB, 64 * GIB, "largest body that creates a message batch")
    max_message_batch_requests: int = _knob(100_000, 1, 10_000_000, "most requests in one message batch")
    max_line_bytes: int = _knob(16 * MIB, 64, 256 * MIB, "longest line of a JSONL file")
    max_lines: int = _knob(100_000_000, 1, 2_000_000_000, "most requests in one file")
    max_routes_per_file: int = _knob(1_000, 1, 100_000, "most different models and urls in one file")
    max_custom_id_chars: int = _knob(512, 1, 4096, "longest custom_id")
    max_nesting: int = _knob(128, 4, 512, "deepest JSON nesting in a line")
    max_reported_lines: int = _knob(20, 1, 1000, "bad lines listed before giving up")
    max_compression_ratio: int = _knob(1_000, 2, 100_000, "largest expansion of a .gz or .zst input")
    intake_min_rows: int = _knob(16, 1, 1_000_000, "rows to which the batches of an intake shrink when it goes badly")
    intake_max_rows: int = _knob(50_000, 1, 1_000_000, "most rows of a batch, which is one COPY and one transaction")
    intake_max_batch_bytes: int = _knob(32 * MIB, KIB, 256 * MIB, "most bytes of a batch; they are streamed, not held")


@dataclass(frozen=True, slots=True)
class TableLimits:
    """Limits of tables and images, and of how they are read."""

    max_rows: int = _knob(10_000_000, 1, 2_000_000_000, "most rows of one table")
    max_row_bytes: int = _knob(8 * MIB, KIB, 256 * MIB, "largest row as it is stored, cells as they came and typed")
    max_cell_bytes: int = _knob(MIB, 64, 64 * MIB, "largest cell of a CSV or XLSX file")
    max_columns: int = _knob(2_000, 1, 16_384, "most columns of one table")
    max_result_columns: int = _knob(2_000, 1, 16_384, "most columns of a job's results; a row that has more fails")
    max_column_name_chars: int = _knob(256, 8, 4_096, "longest name of a column")
    max_xlsx_memory_bytes: int = _knob(2 * GIB, 256 * MIB, 1024 * GIB, "memory of the process that reads an XLSX file")
    max_unpacked_bytes: int = _knob(8 * GIB, KIB, 1024 * GIB, "largest content of an XLSX file or a zip of images")
    max_zip_ratio: int = _knob(200, 2, 100_000, "largest expansion of a file in a zip, from 1 MiB on")
    max_zip_entries: int = _knob(100_000, 1, 1_000_000, "most files in an XLSX file or a zip")
    max_images: int = _knob(100_000, 1, 1_000_000, "most images of one job")
    max_image_bytes: int = _knob(32 * MIB, KIB, 256 * MIB, "largest image")
    max_image_side: int = _knob(65_535, 1, 2**31 - 1, "most pixels that an image has in a row or in a column")
    max_discovered_rows: int = _knob(1_000_000, 0, 100_000_000, "most rows that processors may add to one job")


@dataclass(frozen=True, slots=True)
class ClaimLimits:
    """Sizes and intervals of claims."""

    claim_min: int = _knob(8, 1, 10_000, "smallest claim")
    claim_max: int = _knob(2_000, 1, 100_000, "largest claim")
    claim_slice_s: float = _knob(5.0, 0.1, 60, "work a claim should last for")
    claim_safety: float = _knob(0.7, 0.1, 1, "share of the slice that is really claimed")
    claim_poll_s: float = _knob(0.25, 0.01, 60, "wait between claims that found nothing; 5 s while notices work")
    ready_max_bytes: int = _knob(32 * MIB, 64 * KIB, 4 * GIB, "input bodies a worker holds in memory")


@dataclass(frozen=True, slots=True)
class SettleLimits:
    """Bounds of the buffer of results."""

    settle_max_rows: int = _knob(1_000, 1, 20_000, "most outcomes per flush")
    settle_max_bytes: int = _knob(16 * MIB, 64 * KIB, 512 * MIB, "most response bytes per flush")
    settle_interval_s: float = _knob(0.03, 0.001, 5, "longest an outcome waits for more to be written with it")
    settle_capacity_rows: int = _knob(10_000, 10, 1_000_000, "unflushed outcomes at which dispatch stops")
    settle_capacity_bytes: int = _knob(64 * MIB, 64 * KIB, 4 * GIB, "unflushed bytes at which dispatch stops")
    settle_retry_s: float = _knob(120, 1, 3_600, "how long a failing flush is retried")


@dataclass(frozen=True, slots=True)
class SampleLimits:
    """Samples for charts: how a worker process writes them."""

    sample_interval_s: float = _knob(1, 0.05, 60, "how often a worker process writes the samples of its batches")
    sample_capacity_rows: int = _knob(10_000, 10, 1_000_000, "unwritten samples at which further ones are dropped")


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    """Bounds of one call to an upstream."""

    concurrency: int = _knob(
        0, 0, 10_000, "most calls in flight per process; 0: as many as pay, which is found out (functions: 64)"
    )
    concurrency_start: int = _knob(16, 1, 10_000, "calls in flight, over all processes, with which a new model begins")
    connect_timeout_s: float = _knob(10, 0.1, 300, "time to connect")
    first_byte_timeout_s: float = _knob(120, 0.1, 3_600, "time from sending a request to the answer's first byte")
    idle_timeout_s: float = _knob(60, 0.1, 3_600, "longest silence inside an answer")
    attempt_timeout_s: float = _knob(120, 0.1, 7_200, "whole time of one attempt")
    max_response_bytes: int = _knob(16 * MIB, KIB, 512 * MIB, "largest answer, after decompression")

    @property
    def most_calls(self) -> int:
        """Calls in flight to one provider, in one process."""
        return self.concurrency or 1_000

    @property
    def most_functions(self) -> int:
        """Calls in flight of one Python function, in one process."""
        return self.concurrency or 64


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """Retries: when and how often a failed attempt is repeated."""

    max_attempts: int = _knob(5, 1, 100, "attempts charged to an input before it fails for good")
    max_attempts_lifetime: int = _knob(50, 1, 10_000, "attempts charged to an input, however often it is run again")
    max_attempts_not_found: int = _knob(2, 1, 100, "attempts of an input of which a processor says NotFound")
    retry_base_s: float = _knob(1, 0.001, 60, "first backoff of a charged attempt; doubled each time, full jitter")
    retry_cap_s: float = _knob(60, 0.01, 3_600, "longest backoff")
    refusal_rest_s: float = _knob(0.1, 0, 60, "shortest rest of a route that did not admit a call")
    halt_probe_s: float = _knob(
        300, 0, 86_400, "a model halted for its key or quota is tried again so often; 0: only when it is resumed"
    )
    retry_after_max_s: float = _knob(3_600, 1, 86_400, "longest wait that an upstream can ask for")
    stop_after_failures: int = _knob(
        30, 0, 1_000_000, "failures of one kind after which a run pauses in which nothing has succeeded; 0: it goes on"
    )

    def after(self, spent: int, max_attempts: int | None = None) -> RetryLimits:
        """Limits for an input that has had `spent` attempts before it was run again, in a job with its own limit."""
        if not spent and max_attempts is None:
            return self
        left = max(1, min(max_attempts or self.max_attempts, self.max_attempts_lifetime - spent))
        return dataclasses.replace(self, max_attempts=left)


@dataclass(frozen=True, slots=True)
class LivenessLimits:
    """Liveness: when a worker counts as lost."""

    heartbeat_interval_s: float = _knob(15, 0.05, 300, "how often a worker checks in")
    heartbeat_grace_s: float = _knob(
        30, 0.1, 3_600, "silence after which a worker is dead (twice the interval or more)"
    )
    stuck_buffer_s: float = _knob(30, 0.1, 3_600, "added to attempt_timeout_s before an idle lease is reclaimed")
    reclaim_action: str = _choice("requeue", ("requeue", "fail"), "what becomes of items whose worker was lost")
    max_reclaims: int = _knob(5, 1, 100, "worker losses before an input fails as worker_lost")
    drain_timeout_s: float = _knob(30, 0.1, 3_600, "how long a stopping worker waits for calls in flight")


@dataclass(frozen=True, slots=True)
class DatabaseLimits:
    """Connections and their time bounds."""

    pool_max: int = _knob(4, 2, 100, "connections per process")
    connect_wait_s: float = _knob(30, 0.1, 600, "how long to wait for the database to accept a connection")
    statement_timeout_s: float = _knob(60, 1, 3_600, "time bound of one statement")


@dataclass(frozen=True, slots=True)
class WebhookLimits:
    """Deliveries of events to webhooks and sinks."""

    webhook_timeout_s: float = _knob(15, 0.1, 120, "whole time of one webhook delivery")
    webhook_retry_base_s: float = _knob(5, 0.01, 3_600, "first wait after a failed delivery; then doubled, jittered")
    webhook_retry_cap_s: float = _knob(21_600, 1, 86_400, "longest wait between deliveries of one event")
    webhook_give_up_s: float = _knob(259_200, 1, 2_592_000, "age at which an undelivered event is given up")
    webhook_keep_s: float = _knob(2_592_000, 60, 315_360_000, "how long the record of a delivery is kept")
    webhook_batch: int = _knob(64, 1, 1_000, "deliveries taken at once")


@dataclass(frozen=True, slots=True)
class ServeLimits:
    """The HTTP server's bounds."""

    api_pool_max: int = _knob(10, 2, 200, "database connections of the API")
    max_connections: int = _knob(
        10_000, 10, 1_000_000, "clients connected at once, half of them without a key yet; more are answered 503"
    )
    request_memory_bytes: int = _knob(
        256 * MIB, 16 * MIB, 1024 * GIB, "memory for bodies and answers over all connections; beyond it, 503"
    )
    max_head_bytes: int = _knob(64 * KIB, 4 * KIB, MIB, "largest request line and headers")
    max_json_bytes: int = _knob(8 * MIB, KIB, 256 * MIB, "largest JSON body of a request; files are not bound by it")
    head_timeout_s: float = _knob(20, 0.1, 600, "time for a request's line and headers to arrive")
    body_idle_timeout_s: float = _knob(30, 0.1, 600, "longest silence inside a request's body")
    linger_s: float = _knob(10, 0, 300, "how long a refused request's body is still taken, so that the refusal is read")
    body_min_bytes_per_s: int = _knob(1_024, 1, 1_000_000_000, "slower bodies are cut off, after body_idle_timeout_s")
    send_timeout_s: float = _knob(120, 0.1, 3_600, "longest a client may leave an answer unread")
    send_min_bytes_per_s: int = _knob(
        32 * KIB, 1, 1_000_000_000, "clients that read an answer more slowly are cut off, after send_timeout_s"
    )
    max_exports: int = _knob(4, 1, 1_000, "sheets that are written at once; more are answered 503")
    keep_alive_s: float = _knob(15, 0.1, 3_600, "how long an idle connection is kept")
    key_cache_s: float = _knob(5, 0, 300, "how long a revoked key still works, and what it has open goes on, at most")
    pending_dashboard: bool = _switch("whether GET /api/pending answers: what is pending in all of one's jobs")


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Sessions: how long their callers wait, and how many requests may wait."""

    session_wait_timeout_s: float = _knob(120, 0.1, 3_600, "longest a caller waits for its answer; then 503")
    session_max_queued: int = _knob(10_000, 1, 10_000_000, "requests that wait in one session; more are answered 429")
    session_max_body_bytes: int = _knob(8 * MIB, KIB, 128 * MIB, "largest body of a request queued or passed on")
    session_keep_s: float = _knob(
        2_592_000, 60, 315_360_000, "how long a session is kept after its last answer; not while anything waits in it"
    )
    session_accept_max: int = _knob(10_000, 1, 1_000_000, "requests waiting to be stored; more are answered 503")


@dataclass(frozen=True, slots=True)
class ScanLimits:
    """Files that adapters find."""

    scan_timeout_s: float = _knob(60, 0.1, 3_600, "longest silence of a store or an FTP server")


@dataclass(frozen=True, slots=True)
class EraseLimits:
    """Erasure: how deleted data is removed."""

    purge_batch_size: int = _knob(1_000, 1, 100_000, "rows removed per statement")
    purge_throttle_ms: int = _knob(100, 0, 60_000, "rest between two statements")
    purge_interval_ms: int = _knob(3_600_000, 100, 86_400_000, "how often a server looks for what is left to remove")
    keep_s: float = _knob(
        0,
        0,
        315_360_000,
        "how long ended batches and jobs are kept, with inputs and results; 0: until they are removed",
    )
    audit_keep_s: float = _knob(31_536_000, 60, 315_360_000, "how long the record of a change to a job is kept")


@dataclass(frozen=True, slots=True)
class QuotaLimits:
    """Limits of each owner that has none of its own (`penstock db limit`); 0 is no limit."""

    owner_max_open_batches: int = _knob(0, 0, 1_000_000, "open batches and jobs of one owner; more are answered 429")
    owner_max_stored_bytes: int = _knob(
        0, 0, 1024 * 1024 * GIB, "bytes that one owner may store; more are answered 429"
    )
    owner_requests_per_minute: int = _knob(0, 0, 10_000_000, "requests of one owner a minute; more are answered 429")
    owner_max_priority: int = _knob(0, 0, 100, "highest priority that an owner may ask for; more is answered 403")


@dataclass(frozen=True, slots=True)
class ObserveLimits:
    """Logs, and when a server calls itself ready."""

    log_format: str = _choice("text", ("text", "json"), "lines of the log: for people, or a JSON object each")
    min_free_bytes: int = _knob(
        64 * MIB,
        0,
        1024 * GIB,
        "free space on the data directory's disk below which a server is not ready, and takes no uploads",
    )
    old_snapshot_s: float = _knob(300, 0, 86_400, "age from which `penstock doctor` names a transaction as held")


@dataclass(frozen=True, slots=True)
class MetricsLimits:
    """Metrics for Prometheus."""

    metrics_public: bool = _switch("whether GET /metrics answers without a key; otherwise an admin's key is needed")
    metrics_cache_s: float = _knob(30, 0.1, 600, "how long the figures that /metrics reads from the database are kept")
    metrics_max_models: int = _knob(50, 0, 1_000, "models that have figures of their own; the others are one, `other`")


@dataclass(frozen=True, slots=True)
class Config:
    intake: IntakeLimits = field(default_factory=IntakeLimits)
    tables: TableLimits = field(default_factory=TableLimits)
    claim: ClaimLimits = field(default_factory=ClaimLimits)
    settle: SettleLimits = field(default_factory=SettleLimits)
    samples: SampleLimits = field(default_factory=SampleLimits)
    dispatch: DispatchLimits = field(default_factory=DispatchLimits)
    retry: RetryLimits = field(default_factory=RetryLimits)
    liveness: LivenessLimits = field(default_factory=LivenessLimits)
    database: DatabaseLimits = field(default_factory=DatabaseLimits)
    webhooks: WebhookLimits = field(default_factory=WebhookLimits)
    serve: ServeLimits = field(default_factory=ServeLimits)
    sessions: SessionLimits = field(default_factory=SessionLimits)
    scan: ScanLimits = field(default_factory=ScanLimits)
    erase: EraseLimits = field(default_factory=EraseLimits)
    quotas: QuotaLimits = field(default_factory=QuotaLimits)
    observe: ObserveLimits = field(default_factory=ObserveLimits)
    metrics: MetricsLimits = field(default_factory=MetricsLimits)
    providers: tuple[Provider, ...] = ()
    processors: tuple[ProcessorConfig, ...] = ()
    sinks: tuple[Sink, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    public_url: str | None = None
    """URL by which clients reach the server, if that is not where it listens."""
    root_path: str = ""
    """Prefix that a proxy puts before every path."""
    webhook_allow: tuple[str, ...] = ()
    """Networks and host names that webhooks may go to although they are not public."""
    secrets_key_file: Path | None = None
    """File of the keys that seal secrets in the database, if they are not in the environment or the data directory."""
    database_url: str | None = None
    data_dir: Path = Path(".penstock")


@dataclass(frozen=True, slots=True)
class Knob:
    """One setting: its group, its range, its meaning."""

    name: str
    group: str
    kind: type[int] | type[float] | type[str] | type[bool]
    default: Any
    about: str
    low: float = 0
    high: float = 0
    choices: tuple[str, ...] = ()

    @property
    def span(self) -> str:
        """Range or choices of the setting, as a person writes them."""
        return ", ".join(self.choices) if self.choices else f"{plain(self.low)} – {plain(self.high)}"

    @property
    def variable(self) -> str:
        """Name of the setting in the environment."""
        return f"PENSTOCK_{self.name.upper()}"


GROUPS: dict[str, type[Any]] = {
    "intake": IntakeLimits,
    "tables": TableLimits,
    "claim": ClaimLimits,
    "settle": SettleLimits,
    "samples": SampleLimits,
    "dispatch": DispatchLimits,
    "retry": RetryLimits,
    "liveness": LivenessLimits,
    "database": DatabaseLimits,
    "webhooks": WebhookLimits,
    "serve": ServeLimits,
    "sessions": SessionLimits,
    "scan": ScanLimits,
    "erase": EraseLimits,
    "quotas": QuotaLimits,
    "observe": ObserveLimits,
    "metrics": MetricsLimits,
}


def knobs() -> Iterator[Knob]:
    """Every knob, in the order of the reference page."""
    for group, limits in GROUPS.items():
        for entry in dataclasses.fields(limits):
            kind = {"int": int, "float": float, "str": str, "bool": bool}[str(entry.type)]
            default = str(entry.default).lower() if kind is bool else entry.default
            yield Knob(entry.name, group, kind, default, **entry.metadata)


def plain(value: float | str) -> str:
    """A setting's value as a person writes it."""
    if isinstance(value, str):
        return value
    number = value
    return f"{number:,.0f}" if number == int(number) else f"{number:g}"

"""Figures of batches and jobs as texts for people: its state, its progress, its end."""

from __future__ import annotations

import time
from datetime import datetime

import click

from penstock.cli.client import Json
from penstock.errors import ExitCode, plain

ENDED = ("completed", "failed", "expired", "cancelled")
_UNITS = ("B", "kB", "MB", "GB", "TB")


def state_of(batch: Json) -> str:
    """State of a batch; the API calls a paused batch `in_progress`, since OpenAI's clients know no pausing."""
    return "paused" if batch["status"] == "in_progress" and batch.get("paused_at") else str(batch["status"])


def has_ended(batch: Json) -> bool:
    return batch["status"] in ENDED


def exit_code_of(batch: Json) -> ExitCode:
    """Exit code of a command that waited for the batch."""
    state = state_of(batch)
    if state == "failed":
        return ExitCode.USAGE
    if state == "paused":
        return ExitCode.PAUSED
    if not has_ended(batch):
        return ExitCode.OPERATIONAL
    failed = batch["request_counts"]["failed"] - batch.get("skipped", 0)
    return ExitCode.FAILED_ROWS if failed or state != "completed" else ExitCode.OK


def count_text(number: int, noun: str) -> str:
    """`1 line`, `2,000 lines`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def counts_text(batch: Json) -> str:
    """`2,000 requests, 1,997 completed, 3 failed`."""
    counts = batch["request_counts"]
    total, completed, failed = counts["total"], counts["completed"], counts["failed"]
    skipped = batch.get("skipped", 0)
    parts = [count_text(total, "request"), f"{completed:,} completed"]
    if failed > skipped:
        parts.append(f"{failed - skipped:,} failed")
    if skipped:
        parts.append(f"{skipped:,} skipped")
    if not has_ended(batch) and total > completed + failed:
        parts.append(f"{total - completed - failed:,} to go")
    return ", ".join(parts)


def job_moment(text: str) -> float:
    """Moment of a job's object, as `age` and `moment` take it."""
    return datetime.fromisoformat(text).timestamp()


def job_at_rest(job: Json) -> bool:
    """Whether nothing more comes of a job by itself."""
    return job["state"] == "PAUSED" or job["endedAt"] is not None


def is_run(one: Json) -> bool:
    """Whether a batch or job is one of `penstock run`: no server works it off."""
    return one["client"] == "local" if "client" in one else one.get("target") is not None


def job_exit_code(job: Json) -> ExitCode:
    """Exit code of a command that waited for the job."""
    if job["ingest"]["problem"] is not None:
        return ExitCode.USAGE
    if job["state"] == "PAUSED":
        return ExitCode.PAUSED
    if job["endedAt"] is None:
        return ExitCode.OPERATIONAL
    return ExitCode.FAILED_ROWS if job["failed"] or job["notFound"] or job["state"] != "DONE" else ExitCode.OK


def job_counts_text(job: Json) -> str:
    """`2,000 rows, 1,990 done, 7 failed, 3 not found`."""
    total, unlucky = job["total"], job["failed"] + job["notFound"] + job["skipped"]
    parts = [count_text(total, "row"), f"{job['processed'] - unlucky:,} done"]
    for name, words in (("failed", "failed"), ("notFound", "not found"), ("skipped", "skipped")):
        if job[name]:
            parts.append(f"{job[name]:,} {words}")
    if total > job["processed"]:
        parts.append(f"{total - job['processed']:,} {'not run' if job['endedAt'] else 'to go'}")
    return ", ".join(parts)


def problem_lines(batch: Json) -> list[str]:
    """Problems for which a batch could not run, line by line."""
    lines = []
    for problem in (batch.get("errors") or {}).get("data", []):
        place = f"line {problem['line']}: " if problem.get("line") else ""
        code = f" ({problem['code']})" if problem.get("code") else ""
        lines.append(plain(f"{place}{problem.get('message') or 'not valid'}{code}"))
    return lines


def error_text(request: Json) -> str:
    """Error of a request that was not completed: its code and message, or the status of the answer."""
    error, response = request["error"], request["response"]
    if error is not None:
        return f"{error['code']}: {error['message']}"
    return f"HTTP {response['status_code']}" if response is not None else str(request["status"])


def age(since: float) -> str:
    """Time since a moment, in short: 12s, 5m, 3h, 2d."""
    seconds = max(0, int(time.time() - since))
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= 2 * size or (unit != "d" and seconds >= size):
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def moment(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def size_text(count: int) -> str:
    """`1.5 MB`."""
    amount, unit = float(count), 0
    while amount >= 999.95 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1000, unit + 1
    return f"{count} B" if unit == 0 else f"{amount:.1f} {_UNITS[unit]}"


def print_row(label: str, text: str) -> None:
    """Print one line of what a `show` command shows."""
    click.echo(f"  {label:<10} {text}")

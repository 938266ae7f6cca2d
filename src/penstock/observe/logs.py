"""Log of every command, without secrets and without users' data: lines for people, or a JSON object a line."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

# Each takes time in proportion to a line, whatever the line says.
_SECRETS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"\b(sk|whsec)([-_])[\w+/=-]{6,}"), r"\1\2[hidden]"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[^\s'\",]+"), r"\1 [hidden]"),
    (re.compile(r"(\b\w+://[^\s:/@]*):[^\s@/]+@"), r"\1:[hidden]@"),
    (re.compile(r"(?i)\b(password|api[-_]?key|secret|token)(['\"]?\s*[=:]\s*)\S+"), r"\1\2[hidden]"),
    (re.compile(r"(https?://[^\s?'\"]+)(\?[^\s'\"]+)?"), lambda url: f"{url[1]}?[hidden]" if url[2] else url[1]),
)
# The database quotes the values it complains about in these lines, up to whole rows.
_QUOTES = re.compile(r"\n?\b(?:DETAIL|CONTEXT|STATEMENT|LINE \d+):.*", re.DOTALL)
_CODE = re.compile(r"[\w.:-]{1,64}")
_EVENT = "penstock_event"
_REPEAT_EVERY_S = 5.0
_MAX_KINDS = 200


def redacted(text: str) -> str:
    """The text without parts that look like a secret or like a user's data."""
    text = _QUOTES.sub("", text)
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


def plain_code(code: str) -> str:
    """An error's code, if it is one: upstreams write there what they like."""
    return code if _CODE.fullmatch(code) else "other"


def event(name: str, **fields: object) -> dict[str, Any]:
    """Name and fields of what a line is about, as its `extra`: programs read them from the JSON format."""
    return {_EVENT: (name, fields)}


class _TextFormat(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        # Tracebacks too: the last line of one is the exception's text.
        return redacted(super().format(record))


class _JsonFormat(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        name, fields = getattr(record, _EVENT, ("log", {}))
        told: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "event": name,
            "message": redacted(record.getMessage()),
        }
        if fields:
            told["fields"] = {key: _plain(value) for key, value in fields.items()}
        if record.exc_info:
            told["exception"] = redacted(self.formatException(record.exc_info))
        return json.dumps(told)


def _plain(value: object) -> object:
    """A field's value as JSON has it; texts without secrets."""
    return value if value is None or isinstance(value, int | float) else redacted(str(value))


FORMATS: dict[str, Callable[[], logging.Formatter]] = {"text": _TextFormat, "json": _JsonFormat}


def log_to(handler: logging.Handler, level: int, log_format: str = "text") -> None:
    """Log to this handler alone, without secrets and users' data, from this level on."""
    handler.setFormatter(FORMATS[log_format]())
    # A log that cannot be written must not end the process.
    logging.raiseExceptions = False
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # Its messages quote requests; Penstock logs the same errors itself, without them.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)


def log_to_stderr(level: int, log_format: str = "text") -> None:
    """Log to standard error, from this level on."""
    log_to(logging.StreamHandler(sys.stderr), level, log_format)


def log_run(data_dir: Path, log_format: str, *, verbose: bool) -> None:
    """Log of `penstock run` and its workers: to standard error, or what matters to a file in the data directory."""
    handler: logging.Handler = logging.NullHandler()
    if verbose:
        handler = logging.StreamHandler(sys.stderr)
    else:
        # Opened now: a log that cannot be written must neither end the run nor disturb the display later.
        with contextlib.suppress(OSError):
            handler = logging.FileHandler(data_dir / "penstock.log")
    log_to(handler, logging.INFO if verbose else logging.WARNING, log_format)


class RepeatedEvents:
    """Events that may come by the thousand: of each kind one line every few seconds, with how many there were."""

    def __init__(self, logger: logging.Logger, level: int, name: str, message: str) -> None:
        """`message` says in %-format what happened, of the fields and of `count`."""
        self._logger = logger
        self._level = level
        self._name = name
        self._message = message
        self._unsaid: dict[tuple[tuple[str, object], ...], int] = {}
        self._said_at: dict[tuple[tuple[str, object], ...], float] = {}

    def note(self, **kind: object) -> None:
        """Note one event of a kind, which is its fields."""
        if not self._logger.isEnabledFor(self._level):
            return
        key = tuple(kind.items())
        if key not in self._said_at and len(self._said_at) >= _MAX_KINDS:
            key = tuple((name, "others") for name in kind)
        self._unsaid[key] = self._unsaid.get(key, 0) + 1
        if key not in self._said_at:
            self._say(key)

    def flush(self) -> None:
        """Log what is due; called about once a second."""
        due = monotonic() - _REPEAT_EVERY_S
        for key, said_at in list(self._said_at.items()):
            if said_at > due:
                continue
            if key in self._unsaid:
                self._say(key)
            else:
                del self._said_at[key]

    def _say(self, key: tuple[tuple[str, object], ...]) -> None:
        fields = {**dict(key), "count": self._unsaid.pop(key)}
        self._said_at[key] = monotonic()
        self._logger.log(self._level, self._message, fields, extra=event(self._name, **fields))

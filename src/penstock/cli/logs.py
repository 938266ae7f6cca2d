"""The log of the long-running commands, without secrets and without anybody's data."""

from __future__ import annotations

import logging
import re
import sys

_SECRETS = (
    (re.compile(r"\b(sk|whsec)([-_])[\w+/=-]{6,}"), r"\1\2[hidden]"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[^\s'\",]+"), r"\1 [hidden]"),
    (re.compile(r"(\w+://[^\s:/@]*):[^\s@/]+@"), r"\1:[hidden]@"),
    (re.compile(r"(?i)\b(password|api[-_]?key|secret|token)(['\"]?\s*[=:]\s*)\S+"), r"\1\2[hidden]"),
    (re.compile(r"(https?://[^\s?'\"]+)\?[^\s'\"]+"), r"\1?[hidden]"),
)
# The database quotes the values it complains about in these lines, up to whole rows.
_QUOTES = re.compile(r"\n?\b(?:DETAIL|CONTEXT|STATEMENT|LINE \d+):.*", re.DOTALL)


def redacted(text: str) -> str:
    """The text without what looks like a secret or like somebody's data."""
    text = _QUOTES.sub("", text)
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


class _Redacting(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        # Tracebacks too: the last line of one is the exception's text.
        return redacted(super().format(record))


def log_to_stderr(*, verbose: bool) -> None:
    """Everything to standard error: warnings, and with `verbose` the course of things."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Redacting("%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"))
    # A log that cannot be written must not end the server.
    logging.raiseExceptions = False
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[handler], force=True)
    # What it has to say quotes requests, and is said better elsewhere.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)

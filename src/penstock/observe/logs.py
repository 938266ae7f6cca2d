"""Log of the long-running commands, without secrets and without users' data."""

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
    """The text without parts that look like a secret or like a user's data."""
    text = _QUOTES.sub("", text)
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


class _Redacting(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        # Tracebacks too: the last line of one is the exception's text.
        return redacted(super().format(record))


def log_to(handler: logging.Handler, level: int, formatter: type[logging.Formatter] = logging.Formatter) -> None:
    """Log to this handler alone, from this level on."""
    handler.setFormatter(formatter("%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"))
    # A log that cannot be written must not end the process.
    logging.raiseExceptions = False
    logging.basicConfig(level=level, handlers=[handler], force=True)


def log_to_stderr(level: int) -> None:
    """Log to standard error without secrets and users' data, from this level on."""
    log_to(logging.StreamHandler(sys.stderr), level, _Redacting)
    # Its messages quote requests; Penstock logs the same errors itself, without them.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)

from __future__ import annotations

import json
import logging
import os
from datetime import datetime
from io import StringIO

import pytest

from penstock.observe.logs import FORMATS, RepeatedEvents, event, plain_code, redacted


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("key sk-penstock-AbCdEf123456-CANARYCANARY refused", "refused"),
        ("Authorization: Bearer CANARY-1234", "Authorization"),
        ("secret whsec_CANARYCANARY= used", "used"),
        ("postgresql://user:CANARY@host:5432/db is away", "postgresql://user"),
        ("host=x password=CANARY user=y", "user=y"),
        ("GET http://host/path?canary=CANARY failed", "http://host/path"),
        ("duplicate key\nDETAIL:  Key (name)=(CANARY) already exists.", "duplicate key"),
        ('bad copy\nCONTEXT:  COPY templates, line 3, column body: "CANARY"', "bad copy"),
    ],
)
def test_secrets_and_data_are_not_logged(text: str, kept: str) -> None:
    assert "CANARY" not in redacted(text)
    assert kept in redacted(text)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("text", ["a" * 200_000, "http://" * 100_000, "https://a" * 100_000])
def test_a_long_line_is_read_once(text: str) -> None:
    assert redacted(text) == text


def logged(log_format: str, *, level: int = logging.INFO) -> tuple[logging.Logger, StringIO]:
    """A logger of the test's own, and its lines."""
    lines = StringIO()
    logger = logging.Logger("penstock.test", level)
    handler = logging.StreamHandler(lines)
    handler.setFormatter(FORMATS[log_format]())
    logger.addHandler(handler)
    return logger, lines


def test_a_json_line_has_the_event_and_its_fields_without_secrets() -> None:
    logger, lines = logged("json")
    logger.warning("took %d\nfor sk-CANARYCANARY", 3, extra=event("taken", count=3, key="sk-CANARYCANARY", none=None))
    said = "password=CANARY\nDETAIL:  CANARY"
    logger.error("plain", exc_info=ValueError(said))
    assert "CANARY" not in lines.getvalue()
    first, second = map(json.loads, lines.getvalue().splitlines())
    assert datetime.fromisoformat(first.pop("time")).tzinfo is not None
    assert first == {
        "level": "warning",
        "logger": "penstock.test",
        "process": os.getpid(),
        "event": "taken",
        "message": "took 3\nfor sk-[hidden]",
        "fields": {"count": 3, "key": "sk-[hidden]", "none": None},
    }
    assert (second["event"], second["message"]) == ("log", "plain")
    assert "ValueError" in second["exception"]


def test_events_that_repeat_are_one_line_with_their_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("penstock.observe.logs.monotonic", lambda: now)
    logger, lines = logged("text")
    retries = RepeatedEvents(logger, logging.INFO, "retry", "%(route)s: %(count)d: %(code)s")
    for _ in range(10):
        retries.note(route="a", code="timeout")
    retries.note(route="b", code="timeout")
    retries.flush()
    now = 6.0
    retries.flush()
    now = 12.0
    retries.flush()
    retries.note(route="a", code="timeout")
    said = [line.split(": ", 1)[1] for line in lines.getvalue().splitlines()]
    assert said == ["a: 1: timeout", "b: 1: timeout", "a: 9: timeout", "a: 1: timeout"]


def test_kinds_of_repeated_events_are_bounded() -> None:
    logger, lines = logged("text")
    retries = RepeatedEvents(logger, logging.INFO, "retry", "%(code)s")
    for number in range(1_000):
        retries.note(code=f"code_{number}")
    assert len(lines.getvalue().splitlines()) == 201
    assert lines.getvalue().endswith(": others\n")


def test_an_upstreams_code_is_logged_only_if_it_looks_like_one() -> None:
    assert plain_code("rate_limit_exceeded") == "rate_limit_exceeded"
    assert plain_code("you sent: my secret question") == "other"
    assert plain_code("") == "other"

from __future__ import annotations

import pytest

from penstock.observe.logs import redacted


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

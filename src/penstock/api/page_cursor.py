"""Cursors of pages: where the next page begins, as a text that only this server can make.

A cursor is base64url, without padding, of a signature and the position, which is a JSON list. What is signed is the
owner and the query, too, which the cursor does not carry: a cursor of another owner or of another query fails like one
that was changed, and no answer tells which of them it was.
"""

from __future__ import annotations

import hashlib
import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.api.multipart import invalid
from penstock.db.pool import Connection, fetch_one

MAX_CURSOR_CHARS = 1024
_MIN_SECRET_BYTES = 16
_SIGNATURE_BYTES = hashlib.sha256().digest_size


class PageCursors:
    """Maker and reader of cursors. All servers of an installation have the same secret."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < _MIN_SECRET_BYTES:
            raise ValueError(f"the secret of cursors has {len(secret)} bytes; it needs {_MIN_SECRET_BYTES}")
        self._secret = secret

    def encode(self, position: Sequence[Any], *, owner: str, query: Any) -> str:
        """Cursor of a position: a few JSON values, such as the last row's time and id. `query` is a JSON value that
        tells the query apart: the endpoint, and every parameter that decides which rows are shown in which order."""
        content = msgspec.json.encode(position)
        text = _to_text(self._sign(content, owner, query) + content)
        if len(text) > MAX_CURSOR_CHARS:
            raise ValueError(f"a cursor of {len(text)} characters; it has at most {MAX_CURSOR_CHARS}")
        return text

    def decode(self, text: str, *, owner: str, query: Any, name: str = "after") -> list[Any]:
        """Position in a cursor that was made for this owner and query, else 400. `name` is the parameter's."""
        signed = _to_bytes(text)
        content = signed[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signed[:_SIGNATURE_BYTES], self._sign(content, owner, query)):
            raise invalid(name, "it is the cursor that the page before gave, for the same query.")
        position: list[Any] = msgspec.json.decode(content)
        return position

    def _sign(self, content: bytes, owner: str, query: Any) -> bytes:
        # JSON has no raw line break in text: the two cannot be split in another way.
        signed = msgspec.json.encode((owner, query)) + b"\n" + content
        return hmac.digest(self._secret, signed, hashlib.sha256)


async def read_cursors(connection: Connection) -> PageCursors:
    """The maker of cursors of this installation: its secret is in the database."""
    row = await fetch_one(connection, b"SELECT secret FROM penstock.cursor_secret", {})
    if row is None:
        raise AssertionError("the migration makes the secret")
    return PageCursors(row[0])


def _to_text(content: bytes) -> str:
    return urlsafe_b64encode(content).rstrip(b"=").decode()


def _to_bytes(text: str) -> bytes:
    """Bytes that have exactly this text; nothing if there are none, which no signature fits."""
    if len(text) > MAX_CURSOR_CHARS:
        return b""
    try:
        content = urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except ValueError:
        return b""
    # The decoder passes over characters that are not base64, and over bits at the end.
    return content if _to_text(content) == text else b""

"""Standard Webhooks signatures (standardwebhooks.com): HMAC-SHA256 over id, time and body."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets

_PREFIX = "whsec_"
_SECRET_BYTES = 24
"""192 bits, and a multiple of three: the text has no padding."""
_HINT_CHARS = 4


def new_secret() -> bytes:
    return secrets.token_bytes(_SECRET_BYTES)


def encode_secret(secret: bytes) -> str:
    """The secret as receivers are given it."""
    return _PREFIX + base64.b64encode(secret).decode()


def hint(secret: bytes) -> str:
    """The last characters of a secret: enough to tell one from another, and no more."""
    if not secret:
        return f"{_PREFIX}..."
    return f"{_PREFIX}...{encode_secret(secret)[-_HINT_CHARS:]}"


def headers(message_id: str, at_s: int, body: bytes, keys: list[bytes]) -> dict[str, str]:
    """The three headers of a signed message; one signature for each key a receiver may hold."""
    signed = b"%s.%d.%s" % (message_id.encode(), at_s, body)
    signatures = [base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode() for key in keys]
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(at_s),
        "webhook-signature": " ".join(f"v1,{signature}" for signature in signatures),
    }

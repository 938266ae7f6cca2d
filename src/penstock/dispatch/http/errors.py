"""Calls that brought no whole answer: their codes (docs/serve.md has the table) and what they say."""

from __future__ import annotations

from penstock.config import DispatchLimits

NEVER_SENT = frozenset(
    {
        "connect_failed",
        "connect_timeout",
        "proxy_refused",
        "tls_certificate_expired",
        "tls_certificate_untrusted",
        "tls_client_certificate_refused",
        "tls_client_certificate_required",
        "tls_failed",
        "tls_hostname_mismatch",
    }
)
"""Codes of calls that no upstream has read: there was no connection to send them on."""


class TransportError(Exception):
    """No whole answer came. `code` is one of the documented error codes; the text is `message`, and `hint` if any."""

    def __init__(self, code: str, message: str, status_code: int | None = None, hint: str = "") -> None:
        super().__init__(f"{message}; {hint}" if hint else message)
        self.code = code
        self.message = message
        self.status_code = status_code
        self.hint = hint
        """Hint for the operator: which setting of the provider to look at."""


def timed_out(code: str, limits: DispatchLimits) -> TransportError:
    """Which of the limits, in words."""
    if code == "first_byte_timeout":
        return TransportError(code, f"no answer within {limits.first_byte_timeout_s:g} s ({code}_s)")
    if code == "idle_timeout":
        return TransportError(code, f"the answer stopped for {limits.idle_timeout_s:g} s ({code}_s)")
    return TransportError(code, f"no whole answer within {limits.attempt_timeout_s:g} s (attempt_timeout_s)")


def too_large(status: int, limits: DispatchLimits) -> TransportError:
    message = f"HTTP {status} with more than {limits.max_response_bytes} bytes (max_response_bytes)"
    return TransportError("response_too_large", message, status)

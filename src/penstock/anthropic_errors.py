"""Anthropic's name for an error, by the HTTP status it comes with."""

from __future__ import annotations

_BY_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
ERROR_TYPES = frozenset(_BY_STATUS.values())


def error_type(status: int) -> str:
    """Anthropic's error type for a status; for a status that Anthropic does not use, that of a similar one."""
    return _BY_STATUS.get(status, "invalid_request_error" if 400 <= status < 500 else "api_error")

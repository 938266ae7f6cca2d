"""Headers that tell of rate limits, in the dialect of each API."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

from penstock.mock.behaviour import LimitHeaders
from penstock.mock.limits import TokenBucket

Headers = list[tuple[str, str]]


def state_headers(kind: str, bucket: TokenBucket, *, anthropic: bool) -> Headers:
    """The limit, what remains of it, and when it is whole again. `kind` is `requests` or `tokens`."""
    limit, remaining = str(max(1, int(bucket.limit.amount))), str(bucket.remaining)
    if anthropic:
        reset = (datetime.now(UTC) + timedelta(seconds=bucket.full_s)).isoformat(timespec="seconds")
        return [
            (f"anthropic-ratelimit-{kind}-limit", limit),
            (f"anthropic-ratelimit-{kind}-remaining", remaining),
            (f"anthropic-ratelimit-{kind}-reset", reset.replace("+00:00", "Z")),
        ]
    return [
        (f"x-ratelimit-limit-{kind}", limit),
        (f"x-ratelimit-remaining-{kind}", remaining),
        (f"x-ratelimit-reset-{kind}", go_duration(bucket.full_s)),
    ]


def retry_headers(wait_s: float, chosen: LimitHeaders) -> Headers:
    if chosen is LimitHeaders.NONE:
        return []
    headers = [("retry-after", str(math.ceil(wait_s)))]
    if chosen is LimitHeaders.FULL:
        headers.append(("retry-after-ms", str(math.ceil(wait_s * 1000))))
    return headers


def go_duration(seconds: float) -> str:
    """Duration as Go prints it, which is how OpenAI states them: `12ms`, `1.5s`, `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds, 3), 60)
    return f"{int(minutes)}m{rest:g}s" if minutes else f"{rest:g}s"

"""Verdicts on an answer or a failure: the item is decided, tried again later, or its route is halted.

Pure functions of the answer, the limits, a random source and the clock, so that every rule
can be stated as a table in the tests. The upstream's bodies and headers are parsed in `http/answer.py`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.backoff import doubled, jittered
from penstock.config import RetryLimits
from penstock.dispatch.http.answer import (
    Answer,
    UpstreamError,
    error_of,
    json_with_usage,
    kept_body,
    short,
    wait_hint_s,
)
from penstock.dispatch.http.errors import NEVER_SENT
from penstock.model import Again, Halt, Item, Outcome, OutcomeState, Verdict

# Not admitted: the upstream did no work, so the item is not charged with an attempt.
_NOT_ADMITTED = frozenset({429, 503, 529})
# 520 to 524 are a proxy's statuses for an origin that broke off or was silent.
_CHARGED = frozenset({408, 425, 500, 502, 504, 520, 521, 522, 523, 524})
_NEEDS_A_PERSON = frozenset({401, 402})
_QUOTA_CODES = frozenset(
    {
        "credit_balance_exhausted",
        "organization_spend_limit_exceeded",
        "project_spend_limit_exceeded",
        "organization_usage_limit_exceeded",
        "insufficient_quota",
        "enforced_spend_limit_reached",
    }
)
_PERMANENT = frozenset({"response_too_large", "invalid_request"})


@dataclass(slots=True, frozen=True)
class Failure:
    """An attempt that brought no whole answer: the transport broke, or time ran out."""

    code: str
    message: str
    duration_ms: int = 0
    status_code: int | None = None


@dataclass(slots=True)
class Refusals:
    """Episodes in which a route refuses every call.

    A refusal charges no attempt, so the attempt number cannot make the backoff grow. The length of
    the episode can, and it needs no count: sixty-four calls refused at once are one refusal. One call
    admitted ends it: an upstream that limits the rate is not one that is down, and long waits would
    only leave its allowance unused.
    """

    limits: RetryLimits
    _episodes: dict[str, tuple[float, float]] = field(default_factory=dict)

    def note_refusal(self, route: str, now_s: float) -> float:
        """Note a refusal now. Returns the seconds that the route's episode has lasted."""
        first, last = self._episodes.get(route, (now_s, now_s))
        if now_s - last > 2 * self.limits.retry_cap_s:
            first = now_s
        self._episodes[route] = (first, now_s)
        return now_s - first

    def end(self, route: str) -> None:
        """End the route's episode: a call was admitted."""
        if self._episodes:
            self._episodes.pop(route, None)


def backoff_s(attempt: int, limits: RetryLimits, rng: random.Random) -> float:
    """Backoff of a charged attempt, exponential with full jitter: anywhere between nothing and the doubled base."""
    return jittered(doubled(limits.retry_base_s, limits.retry_cap_s, attempt), 0, rng=rng)


def refused_backoff_s(lasting_s: float, limits: RetryLimits, rng: random.Random) -> float:
    """Backoff of a refused call, from the base up to twice the time the route has been refusing: doubles as the episode
    lasts."""
    return rng.uniform(limits.retry_base_s, _window_s(lasting_s, limits))


def route_rest_s(lasting_s: float, limits: RetryLimits) -> float:
    """Seconds for which a route that refused starts nothing. A refusal comes back at once, so without a rest every
    waiting item would collect one; and the longer the route has been down, the less often it needs asking."""
    return max(limits.refusal_rest_s, min(limits.retry_cap_s, lasting_s / 4))


def _window_s(lasting_s: float, limits: RetryLimits) -> float:
    """Longest backoff of a call to a route that has been refusing for so long."""
    return max(limits.retry_base_s, min(limits.retry_cap_s, 2 * (limits.retry_base_s + lasting_s)))


def limits_for(limits: RetryLimits, item: Item) -> RetryLimits:
    """Limits of an item: what its earlier runs took is gone, and its job may have a limit of its own."""
    return limits.after(item.spent, item.max_attempts)


def needs_a_person(status: int, error: UpstreamError) -> bool:
    """Whether the provider refuses the operator's key, or has no credit left for it: every call would fare the same."""
    return status in _NEEDS_A_PERSON or (status >= 400 and bool(_QUOTA_CODES & error.words))


def judge_answer(
    answer: Answer,
    attempt: int,
    limits: RetryLimits,
    rng: random.Random,
    *,
    now_s: float,
    refusing_s: float = 0.0,
    secrets: Sequence[str] = (),
) -> Verdict:
    """The verdict on a whole HTTP answer.

    `now_s` is the wall clock, for dates in headers. `secrets` are kept out of failures: some upstreams
    repeat the key they did not like, and their text is shown to the owner of the request.
    """
    status = answer.status
    if 200 <= status < 300:
        return _judge_success(answer, attempt, limits, rng, secrets)
    if status < 200:
        failure = Failure("protocol_error", f"HTTP {status} as a final answer", answer.duration_ms, status)
        return judge_failure(failure, attempt, limits, rng)
    error = error_of(answer, secrets)
    if needs_a_person(status, error):
        return Halt(error.code, error.message, status, answer.duration_ms)
    if status in _NOT_ADMITTED:
        hint_s = wait_hint_s(answer, limits, now_s, with_budgets=True)
        gate_s = max(hint_s, route_rest_s(refusing_s, limits))
        # The floor is the same for all refused items; the jitter keeps them from waking together.
        delay_s = gate_s + refused_backoff_s(refusing_s, limits, rng)
        return Again(error.code, error.message, delay_s, False, status, answer.duration_ms, gate_s)
    if status in _CHARGED and attempt < limits.max_attempts:
        gate_s = wait_hint_s(answer, limits, now_s, with_budgets=False)
        delay_s = gate_s + backoff_s(attempt, limits, rng)
        return Again(error.code, error.message, delay_s, True, status, answer.duration_ms, gate_s)
    return Outcome(
        OutcomeState.FAILED,
        kept_body(answer.body, secrets),
        status,
        answer.request_id,
        error.code,
        error.message,
        answer.duration_ms,
    )


def _judge_success(
    answer: Answer, attempt: int, limits: RetryLimits, rng: random.Random, secrets: Sequence[str]
) -> Verdict:
    valid, usage = json_with_usage(answer.body)
    if valid:
        return Outcome(
            OutcomeState.COMPLETED,
            answer.body,
            answer.status,
            answer.request_id,
            duration_ms=answer.duration_ms,
            usage=usage,
        )
    message = short(f"HTTP {answer.status} with a body of {len(answer.body)} bytes that is not JSON")
    if attempt < limits.max_attempts:
        delay_s = backoff_s(attempt, limits, rng)
        return Again("invalid_response", message, delay_s, True, answer.status, answer.duration_ms)
    return Outcome(
        OutcomeState.FAILED,
        kept_body(answer.body, secrets),
        answer.status,
        answer.request_id,
        "invalid_response",
        message,
        answer.duration_ms,
    )


def judge_failure(
    failure: Failure,
    attempt: int,
    limits: RetryLimits,
    rng: random.Random,
    *,
    refusing_s: float = 0.0,
) -> Verdict:
    """The verdict on an attempt without a whole answer."""
    if failure.code in NEVER_SENT:
        # A connection that was never made says nothing about the item, and a restart of the upstream must not fail
        # every item that meets it.
        gate_s = route_rest_s(refusing_s, limits)
        delay_s = gate_s + refused_backoff_s(refusing_s, limits, rng)
        return Again(failure.code, failure.message, delay_s, False, duration_ms=failure.duration_ms, gate_s=gate_s)
    if failure.code in _PERMANENT or attempt >= limits.max_attempts:
        return Outcome(
            OutcomeState.FAILED,
            status_code=failure.status_code,
            error_code=failure.code,
            error_message=failure.message,
            duration_ms=failure.duration_ms,
        )
    return Again(
        failure.code,
        failure.message,
        backoff_s(attempt, limits, rng),
        True,
        failure.status_code,
        failure.duration_ms,
    )


def judge_timeout(timeout_s: float, attempt: int, limits: RetryLimits, rng: random.Random, duration_ms: int) -> Verdict:
    """The verdict on a call that did not end within `attempt_timeout_s`."""
    message = f"no result within {timeout_s:g} s (attempt_timeout_s)"
    return judge_failure(Failure("request_timeout", message, duration_ms), attempt, limits, rng)


def judge_retry(
    message: str,
    after_s: float | None,
    attempt: int,
    limits: RetryLimits,
    rng: random.Random,
    *,
    duration_ms: int = 0,
    status_code: int | None = None,
) -> Verdict:
    """The verdict on an item whose processor asks for another attempt, after these seconds if it says so."""
    failure = Failure("processor_retry", message, duration_ms, status_code)
    verdict = judge_failure(failure, attempt, limits, rng)
    if after_s is None or not isinstance(verdict, Again):
        return verdict
    return msgspec.structs.replace(verdict, delay_s=min(max(0.0, after_s), limits.retry_after_max_s))


def judge_not_found(
    message: str,
    attempt: int,
    limits: RetryLimits,
    rng: random.Random,
    *,
    duration_ms: int = 0,
    status_code: int | None = None,
    request_id: str | None = None,
) -> Verdict:
    """The verdict on an item that has no answer: tried again, perhaps by another strategy, `max_attempts_not_found`
    times in all."""
    if attempt < min(limits.max_attempts_not_found, limits.max_attempts):
        return Again("not_found", message, backoff_s(attempt, limits, rng), True, status_code, duration_ms)
    return Outcome(OutcomeState.NOT_FOUND, None, status_code, request_id, "not_found", message, duration_ms)


def refuses(code_or_status: str | int | None) -> bool:
    """Whether this status or failure code means the item was not admitted, and so not charged."""
    return code_or_status in _NOT_ADMITTED or code_or_status in NEVER_SENT

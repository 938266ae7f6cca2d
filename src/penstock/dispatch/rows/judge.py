"""Verdicts on the answer to a row's request. A row that is done has one JSON object as its body: its result columns.

Pure functions, like `retry`, which says what an answer means that no rule speaks of.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from penstock.config import MIB, RetryLimits
from penstock.dispatch.http.answer import Answer, json_with_usage, short
from penstock.dispatch.retry import Failure, judge_answer, judge_failure, judge_not_found, judge_retry
from penstock.dispatch.rows.answer_path import MISSING, find
from penstock.dispatch.rows.definition import ChatDefinition, Definition, HttpDefinition, Rule
from penstock.dispatch.rows.schema import misfit, same_json
from penstock.dispatch.rows.template import compiled, context_of_answer
from penstock.dispatch.rows.work import RenderError
from penstock.model import Halt, Outcome, OutcomeState, Verdict

_GONE = frozenset({404, 410})
# Of an answer that is not JSON, a rule that says "done" keeps the text.
_MAX_TEXT_BYTES = MIB
_FENCE = "```"

_encoder = msgspec.json.Encoder()


class _Judgement(NamedTuple):
    """An answer, and what its verdict depends on besides."""

    answer: Answer
    attempt: int
    limits: RetryLimits
    rng: random.Random
    secrets: Sequence[str]

    def done(self, columns: dict[str, Any]) -> Verdict:
        answer = self.answer
        usage = json_with_usage(answer.body)[1]
        body = _encoder.encode(columns)
        return Outcome(
            OutcomeState.COMPLETED,
            body,
            answer.status,
            answer.request_id,
            duration_ms=answer.duration_ms,
            usage=usage,
        )

    def ended(self, state: OutcomeState, code: str, message: str) -> Verdict:
        answer = self.answer
        return Outcome(
            state,
            None,
            answer.status,
            answer.request_id,
            code,
            self.text(message),
            answer.duration_ms,
            json_with_usage(answer.body)[1],
        )

    def failed(self, code: str, message: str) -> Verdict:
        return self.ended(OutcomeState.FAILED, code, message)

    def retried(self, code: str, message: str) -> Verdict:
        """Another attempt, which is charged; the last one fails."""
        answer = self.answer
        failure = Failure(code, self.text(message), answer.duration_ms, answer.status)
        verdict = judge_failure(failure, self.attempt, self.limits, self.rng)
        return self.failed(code, message) if isinstance(verdict, Outcome) else verdict

    def not_found(self, message: str) -> Verdict:
        answer = self.answer
        return judge_not_found(
            self.text(message),
            self.attempt,
            self.limits,
            self.rng,
            duration_ms=answer.duration_ms,
            status_code=answer.status,
            request_id=answer.request_id,
        )

    def text(self, message: str) -> str:
        for secret in self.secrets:
            message = message.replace(secret, "[redacted]")
        return short(message)


def judge_row(
    definition: Definition,
    answer: Answer,
    attempt: int,
    limits: RetryLimits,
    rng: random.Random,
    *,
    now_s: float,
    refusing_s: float = 0.0,
    secrets: Sequence[str] = (),
) -> Verdict:
    """The verdict on a whole answer, as `judge_answer` for an item that is no row; the arguments are the same."""
    chosen = definition.for_attempt(attempt)
    case = _Judgement(answer, attempt, limits, rng, secrets)
    verdict = _by_rules(chosen, case) if isinstance(chosen, HttpDefinition) else None
    if verdict is not None:
        return verdict
    if isinstance(chosen, HttpDefinition) and chosen.method == "GET" and answer.status in _GONE:
        return case.not_found(f"HTTP {answer.status}")
    verdict = judge_answer(answer, attempt, limits, rng, now_s=now_s, refusing_s=refusing_s, secrets=secrets)
    if isinstance(verdict, Halt) and isinstance(chosen, HttpDefinition):
        # The job chose the path: its 401 says nothing of the provider's other work, and must not wait for an operator.
        return case.retried(verdict.error_code, verdict.error_message)
    if not isinstance(verdict, Outcome):
        return verdict
    if verdict.state is not OutcomeState.COMPLETED:
        return msgspec.structs.replace(verdict, body=None)  # the upstream's error is not the row's result
    decoded = decode_json(answer.body)
    if isinstance(chosen, ChatDefinition):
        return _judge_chat(chosen, decoded, case)
    return case.done(_columns(chosen, decoded))


# -- HTTP


def _by_rules(http: HttpDefinition, case: _Judgement) -> Verdict | None:
    decoded = decode_json(case.answer.body) if http.rules else None
    for number, rule in enumerate(http.rules):
        if _matches(rule, case.answer.status, decoded):
            return _apply(rule, number, http, decoded, case)
    return None


def _matches(rule: Rule, status: int, decoded: Any) -> bool:
    if rule.status is not None and not any(each in (status, f"{status // 100}xx") for each in rule.statuses):
        return False
    if rule.path is None:
        return True
    found = find(decoded, rule.path)
    if rule.exists or rule.missing:
        return (found is MISSING) == rule.missing
    if rule.equals is not msgspec.UNSET:
        return found is not MISSING and same_json(found, rule.equals)
    if isinstance(found, str):
        return isinstance(rule.contains, str) and rule.contains in found
    return isinstance(found, list) and any(same_json(each, rule.contains) for each in found)


def _apply(rule: Rule, number: int, http: HttpDefinition, decoded: Any, case: _Judgement) -> Verdict:
    answer = case.answer
    if rule.outcome == "done":
        whole = decoded if decoded is not MISSING else answer.body[:_MAX_TEXT_BYTES].decode("utf-8", "replace")
        return case.done(_columns(http, whole))
    message = f"HTTP {answer.status}: rules[{number}] says {rule.outcome}"
    if rule.message is not None:
        try:
            context = context_of_answer(None if decoded is MISSING else decoded, answer.status)
            message = compiled(rule.message).render(context)
        except RenderError as error:
            message = f"{message}; its message: {error}"
    if rule.outcome == "not_found":
        return case.not_found(message)
    if rule.outcome == "skipped":
        return case.ended(OutcomeState.SKIPPED, "skipped", message)
    if rule.outcome == "fail":
        return case.failed(rule.code or "processor_failed", message)
    after_s = _seconds(find(decoded, rule.after)) if isinstance(rule.after, str) else rule.after
    return judge_retry(
        case.text(message),
        after_s,
        case.attempt,
        case.limits,
        case.rng,
        duration_ms=answer.duration_ms,
        status_code=answer.status,
    )


def _columns(http: HttpDefinition, decoded: Any) -> dict[str, Any]:
    found = {name: find(decoded, path) for name, path in http.columns.items()}
    return {name: None if value is MISSING else value for name, value in found.items()}


def _seconds(value: Any) -> float | None:
    """Seconds that an answer names; None if it is no number."""
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None


# -- chat


class _Message(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


def _judge_chat(chat: ChatDefinition, decoded: Any, case: _Judgement) -> Verdict:
    try:
        choice = msgspec.convert(decoded, _Completion).choices[0]
    except (msgspec.ValidationError, IndexError):
        return case.retried("invalid_answer", "the answer is not a chat completion")
    content = choice.message.content
    if choice.message.refusal:
        return case.failed("refused", f"the model refused: {choice.message.refusal}")
    if choice.finish_reason == "content_filter":
        return case.failed("refused", "the provider's content filter stopped the answer")
    if chat.schema is not None and choice.finish_reason == "length":
        return case.retried("truncated", "the answer was cut off at its token limit before its JSON was whole")
    if content is None:
        return case.retried("invalid_answer", "the answer has no text")
    if chat.schema is None:
        return case.done({chat.column: content})
    value = decode_json(_inside_fence(content).encode())
    if value is MISSING:
        return case.retried("invalid_answer", "the answer is not JSON")
    problem = misfit(value, chat.schema)
    if problem is not None:
        return case.retried("invalid_answer", f"the answer does not fit the schema: {problem}")
    return case.done({name: value.get(name) for name in chat.schema["properties"]})


def _inside_fence(content: str) -> str:
    """The text of an answer, without the fence of Markdown that some models put around their JSON."""
    text = content.strip()
    if not text.startswith(_FENCE) or not text.endswith(_FENCE):
        return content
    return text.partition("\n")[2].removesuffix(_FENCE)


def decode_json(body: bytes) -> Any:
    """The JSON value of an answer, which can be encoded again; MISSING if it is none."""
    try:
        return msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return _decode_leniently(body) if b"\\u" in body else MISSING


def _decode_leniently(body: bytes) -> Any:
    """The same for an answer with half of a surrogate pair, as one cut off inside an emoji has it: U+FFFD instead."""
    try:
        text = json.dumps(json.loads(body), ensure_ascii=False)
        whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return msgspec.json.decode(whole)
    except (ValueError, RecursionError):
        return MISSING

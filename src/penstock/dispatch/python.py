"""Python functions as processors: found by name, called on items, their results made verdicts."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any, Self

import msgspec

from penstock.config import DispatchLimits, RetryLimits
from penstock.dispatch.coroutines import CoroutineDispatcher
from penstock.dispatch.dispatcher import Dispatcher
from penstock.dispatch.http.answer import is_json, short
from penstock.dispatch.loading import describe, load_processor
from penstock.dispatch.retry import Failure, backoff_s, judge_failure
from penstock.dispatch.signals import CHUNK_ATTRIBUTE, Fail, NotFound, Retry, Signal, Skip
from penstock.dispatch.threads import ThreadDispatcher
from penstock.model import Again, Item, Outcome, OutcomeState, Verdict

__all__ = ["PythonProcessor", "chunk_size_of", "load_processor"]

_DEFAULT_CHUNK = 100
_LIST_OF_ITEMS = re.compile(r"(?:typing\.)?[Ll]ist\[(?:\w+\.)*Item\]")

_encoder = msgspec.json.Encoder()


class PythonProcessor:
    """Processor that calls `fn` on each item, or on chunks of them. Async functions run on the loop, others on
    threads."""

    def __init__(
        self,
        fn: Callable[..., Any],
        dispatch: DispatchLimits,
        retry: RetryLimits,
        *,
        rng: random.Random | None = None,
    ) -> None:
        self._fn = fn
        self._limits = dispatch
        self._retry = retry
        self._rng = rng or random.Random()  # noqa: S311 -- jitter
        self.name = getattr(fn, "__name__", type(fn).__name__)
        self.is_async = _is_async(fn)
        self.chunk_size = chunk_size_of(fn)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def dispatcher(self) -> Dispatcher:
        limits, chunk = self._limits, self.chunk_size or 1
        if self.is_async:
            call = self._call_chunk if self.chunk_size else self._call_one
            return CoroutineDispatcher(
                call, limits.concurrency, self._retry, timeout_s=limits.attempt_timeout_s, chunk=chunk
            )
        return ThreadDispatcher(
            self._run_chunk if self.chunk_size else self._run_one,
            limits.concurrency,
            self._retry,
            timeout_s=limits.attempt_timeout_s,
            chunk=chunk,
            name=self.name,
        )

    async def _call_one(self, items: list[Item]) -> tuple[Verdict]:
        item, started = items[0], monotonic()
        try:
            value = await self._fn(item)
        except Exception as error:
            return (self._judge_exception(item, error, _since_ms(started)),)
        return (self._judge(item, value, _since_ms(started)),)

    async def _call_chunk(self, items: list[Item]) -> list[Verdict]:
        started = monotonic()
        try:
            values = await self._fn(list(items))
        except Exception as error:
            return [self._judge_exception(item, error, _since_ms(started)) for item in items]
        return self._judge_chunk(items, values, _since_ms(started))

    def _run_one(self, items: list[Item]) -> tuple[Verdict]:
        item, started = items[0], monotonic()
        try:
            value = self._fn(item)
        except BaseException as error:
            return (self._judge_exception(item, error, _since_ms(started)),)
        return (self._judge(item, value, _since_ms(started)),)

    def _run_chunk(self, items: list[Item]) -> list[Verdict]:
        started = monotonic()
        try:
            values = self._fn(list(items))
        except BaseException as error:
            return [self._judge_exception(item, error, _since_ms(started)) for item in items]
        return self._judge_chunk(items, values, _since_ms(started))

    def _judge_chunk(self, items: list[Item], values: Any, duration_ms: int) -> list[Verdict]:
        if not isinstance(values, Sequence) or isinstance(values, str | bytes) or len(values) != len(items):
            found = f"{len(values)} results" if isinstance(values, list | tuple) else _describe_type(values)
            message = f"{self.name} returned {found} for {len(items)} items: return a list of as many"
            _close(values)
            return [_invalid(message, duration_ms) for _ in items]
        return [self._judge(item, value, duration_ms) for item, value in zip(items, values, strict=True)]

    def _judge(self, item: Item, value: Any, duration_ms: int) -> Verdict:
        """The verdict on a returned value."""
        if isinstance(value, BaseException):
            return self._judge_exception(item, value, duration_ms)
        if isinstance(value, bytes):
            if not is_json(value):
                return _invalid(f"{self.name} returned bytes that are not JSON", duration_ms)
            return Outcome(OutcomeState.COMPLETED, value, duration_ms=duration_ms)
        try:
            body = _encoder.encode(value)
        except Exception as error:
            _close(value)
            return _invalid(f"{self.name} returned {_describe_type(value)} that is not JSON: {error}", duration_ms)
        return Outcome(OutcomeState.COMPLETED, body, duration_ms=duration_ms)

    def _judge_exception(self, item: Item, error: BaseException, duration_ms: int) -> Verdict:
        """The verdict on an exception: a signal says what it means, any other is worth another try."""
        if isinstance(error, Signal):
            return self._judge_signal(item, error, duration_ms)
        failure = Failure("processor_error", short(describe(error)), duration_ms)
        return judge_failure(failure, item.attempt, self._retry.after(item.spent), self._rng)

    def _judge_signal(self, item: Item, signal: Signal, duration_ms: int) -> Verdict:
        limits, message = self._retry.after(item.spent), short(signal.message)
        if isinstance(signal, Skip):
            return Outcome(OutcomeState.SKIPPED, None, None, None, "skipped", message, duration_ms)
        if isinstance(signal, Fail):
            return Outcome(OutcomeState.FAILED, None, None, None, signal.code, message, duration_ms)
        if isinstance(signal, NotFound):
            if item.attempt >= min(limits.max_attempts_not_found, limits.max_attempts):
                return Outcome(OutcomeState.NOT_FOUND, None, None, None, "not_found", message, duration_ms)
            delay_s = backoff_s(item.attempt, limits, self._rng)
            return Again("not_found", message, delay_s, True, duration_ms=duration_ms)
        verdict = judge_failure(Failure("processor_retry", message, duration_ms), item.attempt, limits, self._rng)
        if isinstance(verdict, Again) and isinstance(signal, Retry) and signal.after is not None:
            delay_s = min(max(0.0, float(signal.after)), limits.retry_after_max_s)
            return msgspec.structs.replace(verdict, delay_s=delay_s)
        return verdict


def chunk_size_of(fn: Callable[..., Any]) -> int | None:
    """Items that a chunk function takes at most; None for a function of one item.

    A chunk function is marked by `@chunk(size)`, or its first parameter is annotated as `list[Item]`.
    """
    size = getattr(fn, CHUNK_ATTRIBUTE, None)
    if isinstance(size, int):
        return size
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return None
    if not parameters:
        return None
    annotation = parameters[0].annotation
    if isinstance(annotation, str):
        # Not evaluated: `Item` may be imported for the type checker alone.
        return _DEFAULT_CHUNK if _LIST_OF_ITEMS.fullmatch(annotation.strip("'\" ")) else None
    return _DEFAULT_CHUNK if annotation == list[Item] else None


def _is_async(fn: Callable[..., Any]) -> bool:
    while isinstance(fn, partial):
        fn = fn.func
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004


def _since_ms(started: float) -> int:
    return int((monotonic() - started) * 1000)


def _describe_type(value: Any) -> str:
    if inspect.iscoroutine(value):
        return "a coroutine (define the function with 'async def')"
    return f"a value of type {type(value).__name__}"


def _close(value: Any) -> None:
    if inspect.iscoroutine(value):
        value.close()  # never awaited: Python would warn about it later, elsewhere


def _invalid(message: str, duration_ms: int) -> Outcome:
    return Outcome(
        OutcomeState.FAILED,
        error_code="invalid_response",
        error_message=short(message),
        duration_ms=duration_ms,
    )

"""Python processors: found by name, called on items, their results made verdicts.

A processor is a function of an item, or of a list of items. One that needs a model, a connection or another thing made
once per process is a class: it is instantiated in each worker process, `setup()` is called before the first item and
`close()` after the last, and the instance is called as a function would be. Both methods may be missing, or async:

    class Embed:
        def setup(self) -> None:
            self.model = load_model()

        def __call__(self, item: Item) -> dict[str, Any]:
            return {"vector": self.model.embed(item.body["text"])}

        def close(self) -> None:
            self.model.free()

A `__call__` that is not async runs on several threads at a time.
"""

from __future__ import annotations

import inspect
import logging
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
from penstock.dispatch.retry import Failure, judge_failure, judge_not_found, judge_retry, limits_for
from penstock.dispatch.signals import CHUNK_ATTRIBUTE, Fail, NotFound, Retry, Signal, Skip
from penstock.dispatch.threads import ThreadDispatcher
from penstock.errors import UsageError
from penstock.model import Item, Outcome, OutcomeState, Verdict, strategy_of
from penstock.validators import find_no_number

__all__ = ["PythonProcessor", "chunk_size_of", "load_processor"]

_log = logging.getLogger("penstock.dispatch")

_DEFAULT_CHUNK = 100
_ITEMS = re.compile(r"(?:(?:typing\.)?[Ll]ist\[)?(?:\w+\.)*Item\]?")
_LIST_OF_ITEMS = re.compile(r"(?:typing\.)?[Ll]ist\[(?:\w+\.)*Item\]")

_encoder = msgspec.json.Encoder()


class PythonProcessor:
    """Processor that calls `fn`, a function or a class, on each item, or on chunks of them. Async functions run on the
    loop, others on threads."""

    def __init__(
        self,
        fn: Callable[..., Any],
        dispatch: DispatchLimits,
        retry: RetryLimits,
        *,
        strategies: Sequence[str] = (),
        values: bool = False,
        chunk: int | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """`strategies` are rotated through by the item's attempts; `chunk` is the size of a chunk function's chunks.
        With `values` the function gets the item's body, unless its parameter is annotated as `Item`."""
        self._fn = fn
        self._instance: Any = None
        """What the processor's class made, if it is one."""
        self._strategies = strategies
        self._limits = dispatch
        self._retry = retry
        self._rng = rng or random.Random()  # noqa: S311 -- jitter
        self.name = getattr(fn, "__name__", type(fn).__name__)
        self._takes_body = values and not _takes_item(fn)
        call = fn.__call__ if inspect.isclass(fn) else fn
        self.is_async = _is_async(call)
        self.chunk_size = chunk_size_of(fn)
        if chunk is not None:
            if self.chunk_size is None:
                raise UsageError(
                    f"{self.name} takes one item, not chunks of {chunk}",
                    hint="Leave chunk out, or annotate the first parameter as list[Item].",
                )
            self.chunk_size = chunk

    async def __aenter__(self) -> Self:
        """Set the processor up, if it is a class."""
        try:
            if inspect.isclass(self._fn):
                self._instance = self._fn()
                self._fn = self._instance
            await self._run_hook("setup")
        except (Exception, SystemExit) as error:
            raise UsageError(
                f"{self.name} could not be set up: {describe(error)}",
                hint="Its setup() runs once in every worker process, before the first item.",
            ) from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._run_hook("close")
        except (Exception, SystemExit) as closing:
            _log.error("%s could not be closed: %s", self.name, describe(closing))

    async def _run_hook(self, name: str) -> None:
        """Call a method of the processor's class, if it has it."""
        hook = getattr(self._instance, name, None)
        result = hook() if callable(hook) else None
        if inspect.isawaitable(result):
            await result

    def dispatcher(self) -> Dispatcher:
        limits, chunk = self._limits, self.chunk_size or 1
        if self.is_async:
            call = self._call_chunk if self.chunk_size else self._call_one
            return CoroutineDispatcher(
                call, limits.most_functions, self._retry, timeout_s=limits.attempt_timeout_s, chunk=chunk
            )
        return ThreadDispatcher(
            self._run_chunk if self.chunk_size else self._run_one,
            limits.most_functions,
            self._retry,
            timeout_s=limits.attempt_timeout_s,
            chunk=chunk,
            name=self.name,
        )

    async def _call_one(self, items: list[Item]) -> tuple[Verdict]:
        item, started = items[0], monotonic()
        self._name_strategies(items)
        try:
            value = await self._fn(item.body if self._takes_body else item)
        except Exception as error:
            return (self._judge_exception(item, error, _since_ms(started)),)
        return (self._judge(item, value, _since_ms(started)),)

    async def _call_chunk(self, items: list[Item]) -> list[Verdict]:
        started = monotonic()
        self._name_strategies(items)
        try:
            values = await self._fn(self._arguments(items))
        except Exception as error:
            return [self._judge_exception(item, error, _since_ms(started)) for item in items]
        return self._judge_chunk(items, values, _since_ms(started))

    def _run_one(self, items: list[Item]) -> tuple[Verdict]:
        item, started = items[0], monotonic()
        self._name_strategies(items)
        try:
            value = self._fn(item.body if self._takes_body else item)
        except BaseException as error:
            return (self._judge_exception(item, error, _since_ms(started)),)
        return (self._judge(item, value, _since_ms(started)),)

    def _run_chunk(self, items: list[Item]) -> list[Verdict]:
        started = monotonic()
        self._name_strategies(items)
        try:
            values = self._fn(self._arguments(items))
        except BaseException as error:
            return [self._judge_exception(item, error, _since_ms(started)) for item in items]
        return self._judge_chunk(items, values, _since_ms(started))

    def _arguments(self, items: list[Item]) -> list[Any]:
        return [item.body for item in items] if self._takes_body else list(items)

    def _name_strategies(self, items: list[Item]) -> None:
        if self._strategies:
            for item in items:
                item.strategy = strategy_of(self._strategies, item.attempt)

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
            body = value
        else:
            try:
                body = _encoder.encode(value)
            except Exception as error:
                _close(value)
                return _invalid(f"{self.name} returned {_describe_type(value)} that is not JSON: {error}", duration_ms)
            if b"null" in body and (number := find_no_number(msgspec.to_builtins(value))) is not None:
                message = f"{self.name} returned {number}, which is no JSON value: return None in its place"
                return _invalid(message, duration_ms)
        if not item.is_row:
            return Outcome(OutcomeState.COMPLETED, body, duration_ms=duration_ms)
        if not body.lstrip().startswith(b"{"):
            body = b'{"result":%b}' % body  # a row's result has columns
        return Outcome(OutcomeState.COMPLETED, body, duration_ms=duration_ms, discovered=tuple(item.added))

    def _judge_exception(self, item: Item, error: BaseException, duration_ms: int) -> Verdict:
        """The verdict on an exception: a signal says what it means, any other is worth another try."""
        if isinstance(error, Signal):
            return self._judge_signal(item, error, duration_ms)
        failure = Failure("processor_error", short(describe(error)), duration_ms)
        return judge_failure(failure, item.attempt, limits_for(self._retry, item), self._rng)

    def _judge_signal(self, item: Item, signal: Signal, duration_ms: int) -> Verdict:
        limits, message = limits_for(self._retry, item), short(signal.message)
        if isinstance(signal, Skip):
            return Outcome(OutcomeState.SKIPPED, None, None, None, "skipped", message, duration_ms)
        if isinstance(signal, Fail):
            return Outcome(OutcomeState.FAILED, None, None, None, signal.code, message, duration_ms)
        if isinstance(signal, NotFound):
            return judge_not_found(message, item.attempt, limits, self._rng, duration_ms=duration_ms)
        after_s = signal.after if isinstance(signal, Retry) else None
        return judge_retry(message, after_s, item.attempt, limits, self._rng, duration_ms=duration_ms)


def chunk_size_of(fn: Callable[..., Any]) -> int | None:
    """Items that a chunk function takes at most; None for a function of one item.

    A chunk function is marked by `@chunk(size)`, or its first parameter is annotated as `list[Item]`. Of a class and
    its instances, that is its `__call__`.
    """
    if not inspect.isroutine(fn) and not isinstance(fn, partial):
        call = (fn if inspect.isclass(fn) else type(fn)).__call__
        return _marked_chunk(fn) or _marked_chunk(call) or _annotated_chunk(call, skip=1)
    return _marked_chunk(fn) or _annotated_chunk(fn)


def _marked_chunk(fn: Any) -> int | None:
    size = getattr(fn, CHUNK_ATTRIBUTE, None)
    return size if isinstance(size, int) else None


def _takes_item(fn: Callable[..., Any]) -> bool:
    """Whether the function's first parameter is annotated as `Item`, or as a list of them."""
    found = [_annotation(fn)]
    if not inspect.isroutine(fn) and not isinstance(fn, partial):
        found = [_annotation((fn if inspect.isclass(fn) else type(fn)).__call__, skip=1)]
    return any(
        annotation in (Item, list[Item])
        or (isinstance(annotation, str) and _ITEMS.fullmatch(annotation.strip("'\" ")) is not None)
        for annotation in found
    )


def _annotation(fn: Callable[..., Any], skip: int = 0) -> Any:
    """The annotation of the first parameter, None if there is none."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())[skip:]
    except (TypeError, ValueError):
        return None
    return parameters[0].annotation if parameters else None


def _annotated_chunk(fn: Callable[..., Any], skip: int = 0) -> int | None:
    annotation = _annotation(fn, skip)
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

"""Traces by OpenTelemetry, if the extra `penstock[otel]` is installed and the standard variables name an endpoint.

Spans: a request to the API, a call to an upstream (which gets the `traceparent`), a flush of results. They hold names
and figures, never a body, a key or an error's text. Without an endpoint nothing is imported, and a span costs a
function call.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

_log = logging.getLogger("penstock.traces")

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")

Attribute = str | int | float | bool
Kind = Literal["SERVER", "CLIENT", "INTERNAL"]


class Span(Protocol):
    def set_attribute(self, key: str, value: Attribute, /) -> None: ...


class _NoSpan:
    def set_attribute(self, key: str, value: Attribute, /) -> None:
        pass


_OFF: AbstractContextManager[Span] = contextlib.nullcontext(_NoSpan())
_tracer: Tracer | None = None


def start_traces(service: str) -> None:
    """Trace this process, if an endpoint is named. OTEL_SERVICE_NAME wins over `service`."""
    if not any(os.environ.get(name) for name in _ENDPOINTS) or os.environ.get("OTEL_SDK_DISABLED", "") == "true":
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        _log.warning("traces have an endpoint, but no sender: install penstock[otel]")
        return
    os.environ.setdefault("OTEL_SERVICE_NAME", service)
    provider = TracerProvider(resource=Resource.create())
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace_by(provider)


def trace_by(provider: TracerProvider | None) -> None:
    """Give this process's spans to a provider; None stops tracing."""
    global _tracer
    _tracer = None if provider is None else provider.get_tracer("penstock")


def span(
    name: str, kind: Kind, *, caller: Mapping[str, str] | None = None, **attributes: Attribute
) -> AbstractContextManager[Span]:
    """A span for the length of the block, below the current one or the one that the `caller`'s headers name."""
    if _tracer is None:
        return _OFF
    return _recorded(_tracer, name, kind, caller, attributes)


@contextlib.contextmanager
def _recorded(
    tracer: Tracer, name: str, kind: Kind, caller: Mapping[str, str] | None, attributes: dict[str, Attribute]
) -> Iterator[Span]:
    from opentelemetry.trace import SpanKind, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = None if caller is None else TraceContextTextMapPropagator().extract(dict(caller))
    named = {f"penstock.{key}": value for key, value in attributes.items()}
    # An exception's text is left out: it may quote a request.
    with tracer.start_as_current_span(
        name, context, SpanKind[kind], named, record_exception=False, set_status_on_exception=False
    ) as begun:
        try:
            yield begun
        except Exception as error:
            begun.set_attribute("error.type", type(error).__name__)
            begun.set_status(StatusCode.ERROR)
            raise


def with_traceparent(headers: Mapping[str, str]) -> Mapping[str, str]:
    """The headers with the current span's `traceparent`, so that the upstream's spans are found below it."""
    if _tracer is None:
        return headers
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return {**headers, **carrier}

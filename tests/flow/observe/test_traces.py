"""Traces: spans of requests, calls and flushes, the upstream below its call, and nothing of users in them."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from penstock.observe import traces
from tests.support.server import served
from tests.support.session_api import asking
from tests.support.wait import wait_until

DEADLINE_S = 60.0
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLER = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    traces.trace_by(provider)
    try:
        yield exporter
    finally:
        traces.trace_by(None)
        provider.shutdown()


def test_spans_have_their_caller_and_no_text_of_errors(exporter: InMemorySpanExporter) -> None:
    sent: dict[str, str] = {}

    def fail() -> None:
        with (
            traces.span("GET /v1/files", "SERVER", caller=CALLER),
            traces.span("POST", "CLIENT", route="small", attempt=2) as call,
        ):
            call.set_attribute("http.response.status_code", 500)
            sent.update(traces.with_traceparent({"a": "b"}))
            raise ValueError("CANARY")

    with pytest.raises(ValueError, match="CANARY"):
        fail()
    inner, outer = exporter.get_finished_spans()
    assert outer.context is not None
    assert f"{outer.context.trace_id:032x}" == TRACE_ID
    assert inner.parent is not None
    assert inner.parent.span_id == outer.context.span_id
    assert inner.context is not None
    assert sent == {"a": "b", "traceparent": f"00-{TRACE_ID}-{inner.context.span_id:016x}-01"}
    assert dict(inner.attributes or {}) == {
        "penstock.route": "small",
        "penstock.attempt": 2,
        "http.response.status_code": 500,
        "error.type": "ValueError",
    }
    assert "CANARY" not in inner.to_json() + outer.to_json()


def test_without_an_endpoint_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    traces.start_traces("test")
    with traces.span("a", "CLIENT") as one, traces.span("b", "SERVER", caller=CALLER) as other:
        assert one is other
    headers = {"a": "b"}
    assert traces.with_traceparent(headers) is headers


class Listener:
    """An upstream that remembers the `traceparent` of every call, and a collector of spans."""

    def __init__(self) -> None:
        self.traceparents: list[str] = []
        self.spans: list[trace_pb2.Span] = []
        self.services: set[str] = set()
        self.raw = b""
        self.origin = ""

    def take(self, path: str, headers: Any, body: bytes) -> bytes:
        if path != "/v1/traces":
            self.traceparents.append(headers["traceparent"])
            return json.dumps({"id": "x", "choices": []}).encode()
        self.raw += body
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = {one.key: one.value.string_value for one in group.resource.attributes}
            self.services.add(names["service.name"])
            self.spans += [one for scope in group.scope_spans for one in scope.spans]
        return b""


@contextlib.contextmanager
def listening() -> Iterator[Listener]:
    listener = Listener()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            content = listener.take(self.path, self.headers, body)
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        listener.origin = f"http://127.0.0.1:{server.server_port}"
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield listener
        finally:
            server.shutdown()
            serving.join()


def test_a_server_sends_its_spans(tmp_path: Path, database_18: str) -> None:
    with listening() as listener:
        env = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": listener.origin,
            "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }
        told = ("--base-url", f"{listener.origin}/up/v1")
        with served(tmp_path, *told, database=database_18, env=env) as server:
            answer = server.ask("POST", "/v1/sessions/s/requests?wait=30", asking("CANARY"), headers=CALLER)
            assert answer.status == 200, answer.json
            names = {"POST /v1/sessions/{key}/requests", "POST", "settle"}
            wait_until(lambda: names <= {one.name for one in listener.spans}, DEADLINE_S)
    (request,) = [one for one in listener.spans if one.name.startswith("POST /v1/sessions")]
    assert request.trace_id.hex() == TRACE_ID
    (call,) = [one for one in listener.spans if one.name == "POST"]
    (sent,) = listener.traceparents
    assert sent.startswith(f"00-{call.trace_id.hex()}-{call.span_id.hex()}-")
    attributes = {one.key: one.value.int_value or one.value.string_value for one in call.attributes}
    assert attributes == {"penstock.route": "small", "penstock.attempt": 1, "http.response.status_code": 200}
    assert listener.services <= {"penstock serve", "penstock worker"}
    assert b"CANARY" not in listener.raw

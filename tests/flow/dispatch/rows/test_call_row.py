"""Rows rendered, sent over real sockets, and judged."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from penstock.config import DispatchLimits, RetryLimits
from penstock.dispatch.http.processor import HttpProcessor
from penstock.dispatch.rows.call import call_row
from penstock.dispatch.rows.definition import parse_definition
from penstock.mock.behaviour import Behaviour
from penstock.mock.server import MockUpstream
from penstock.model import Again, Item, Outcome, OutcomeState, Verdict
from tests.support.hostile import Exchange, Script, Upstream, message
from tests.support.items import make_row

KEY = "sk-secret-key"
TOWEL = {"sku": "a/b?c", "title": "Towel"}


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await coroutine

    asyncio.run(bounded())


def processor(base_url: str, headers: Mapping[str, str] | None = None) -> HttpProcessor:
    return HttpProcessor(base_url, KEY, DispatchLimits(), RetryLimits(), headers, rng=random.Random(1))


def answering(answer: Callable[[Exchange], tuple[int, Any]]) -> Script:
    async def script(exchange: Exchange) -> None:
        status, body = answer(exchange)
        await exchange.send(message(status, json.dumps(body).encode(), {"x-request-id": "req_7"}))

    return script


def columns(verdict: Verdict) -> Any:
    assert isinstance(verdict, Outcome), verdict
    assert verdict.state is OutcomeState.COMPLETED
    return json.loads(verdict.body or b"")


class TestChat:
    def test_against_the_mock(self) -> None:
        async def scenario() -> None:
            chat = parse_definition(
                {
                    "type": "chat",
                    "provider": "mock",
                    "model": "m",
                    "prompt": "What is {{ title }}?",
                    "system": "Be brief.",
                }
            )
            async with (
                MockUpstream(Behaviour(require_key=KEY)) as upstream,
                processor(f"http://127.0.0.1:{upstream.port}/v1") as http,
            ):
                verdict = await call_row(http, chat, make_row(TOWEL))
                assert "What is Towel?" in columns(verdict)["answer"]
                assert isinstance(verdict, Outcome)
                assert verdict.usage is not None
                assert verdict.usage.output_tokens > 0
                assert verdict.request_id is not None
                pictured = await call_row(http, chat, make_row({**TOWEL, "media_type": "image/png"}, image=b"\x89PNG"))
                assert list(columns(pictured)) == ["answer"]
            async with (
                MockUpstream(Behaviour(reject_rate=1)) as upstream,
                processor(f"http://127.0.0.1:{upstream.port}/v1") as http,
            ):
                rejected = await call_row(http, chat, make_row(TOWEL))
                assert isinstance(rejected, Outcome)
                assert (rejected.state, rejected.error_code, rejected.body) == (
                    OutcomeState.FAILED,
                    "mock_rejected",
                    None,
                )

        run(scenario())

    def test_a_schema_makes_columns_and_the_next_strategy_mends_what_does_not_fit(self) -> None:
        spec = {
            "type": "chat",
            "provider": "p",
            "model": "m",
            "prompt": "{{ title }}",
            "schema": {"type": "object", "properties": {"category": {"type": "string"}}, "required": ["category"]},
            "parameters": {"temperature": 0},
            "strategies": [{"name": "plain"}, {"name": "strict", "prompt": "JSON only: {{ title }}"}],
        }

        def model(exchange: Exchange) -> tuple[int, Any]:
            body = json.loads(exchange.request.body)
            fits = body["messages"][-1]["content"].startswith("JSON only")
            content = '```json\n{"category": "bath"}\n```' if fits else "bath"
            return 200, {"choices": [{"message": {"content": content}}], "usage": {"completion_tokens": 2}}

        async def scenario() -> None:
            chat = parse_definition(spec)
            async with (
                Upstream({"/v1/chat/completions": answering(model)}) as upstream,
                processor(upstream.base_url) as http,
            ):
                first = await call_row(http, chat, make_row(TOWEL))
                assert isinstance(first, Again)
                assert (first.error_code, first.counts) == ("invalid_answer", True)
                assert columns(await call_row(http, chat, make_row(TOWEL, attempt=2))) == {"category": "bath"}
                sent = json.loads(upstream.received[0].body)
                assert (sent["model"], sent["temperature"]) == ("m", 0)
                assert sent["response_format"]["json_schema"]["schema"] == spec["schema"]
                await call_row(http, chat, make_row(TOWEL, attempt=3))
                key = make_row(TOWEL).idempotency_key
                keys = [request.headers["idempotency-key"] for request in upstream.received]
                assert keys == [f"{key}-0", f"{key}-1", f"{key}-0"]

        run(scenario())


class TestHttp:
    def test_a_row_becomes_columns(self) -> None:
        spec = {
            "type": "http",
            "provider": "shop",
            "method": "POST",
            "path": "/items/{{ sku }}/price",
            "query": {"title": "{{ title }}"},
            "headers": {"X-Row": "{{ title }}", "X-Tenant": "forged"},
            "body": {"count": "{{ count }}", "text": "{{ title }}!"},
            "columns": {"price": "offer.price", "shops": "offers[*].shop"},
        }

        async def scenario() -> None:
            path = "/v1/items/a%2Fb%3Fc/price?title=Towel"
            body = {"offer": {"price": 9.5}, "offers": [{"shop": "a"}, {"shop": "b"}]}
            async with (
                Upstream({path: answering(lambda _: (200, body))}) as upstream,
                processor(upstream.base_url, {"X-Tenant": "acme"}) as http,
            ):
                verdict = await call_row(http, parse_definition(spec), make_row({**TOWEL, "count": 3}))
                assert columns(verdict) == {"price": 9.5, "shops": ["a", "b"]}
                assert isinstance(verdict, Outcome)
                assert (verdict.status_code, verdict.request_id) == (200, "req_7")
                (sent,) = upstream.received
                assert (sent.method, sent.path) == ("POST", path)
                assert json.loads(sent.body) == {"count": 3, "text": "Towel!"}
                assert sent.headers["x-row"] == "Towel"
                assert sent.headers["idempotency-key"] == make_row(TOWEL).idempotency_key
                assert sent.headers["authorization"] == f"Bearer {KEY}"
                assert (sent.headers["x-tenant"], sent.header_names.count("x-tenant")) == ("acme", 1)

        run(scenario())

    def test_what_is_not_found_is_looked_for_by_the_next_strategy(self) -> None:
        spec = {
            "type": "http",
            "provider": "shop",
            "method": "GET",
            "path": "/items/{{ sku }}",
            "columns": {"id": "id"},
            "strategies": [{"name": "sku"}, {"name": "title", "path": "/search/{{ title }}"}],
        }

        async def scenario() -> None:
            definition = parse_definition(spec)
            scripts = {
                "/v1/items/a%2Fb%3Fc": answering(lambda _: (404, {"error": "no such item"})),
                "/v1/search/Towel": answering(lambda _: (200, {"id": 42})),
                "/v1/search/Boot": answering(lambda _: (410, {})),
            }
            async with Upstream(scripts) as upstream, processor(upstream.base_url) as http:
                first = await call_row(http, definition, make_row(TOWEL))
                assert isinstance(first, Again)
                assert first.error_code == "not_found"
                assert columns(await call_row(http, definition, make_row(TOWEL, attempt=2))) == {"id": 42}
                last = await call_row(http, definition, make_row({**TOWEL, "title": "Boot"}, attempt=2))
                assert isinstance(last, Outcome)
                assert (last.state, last.body, last.status_code) == (OutcomeState.NOT_FOUND, None, 410)
                assert [request.method for request in upstream.received] == ["GET"] * 3
                assert all("content-length" not in request.headers for request in upstream.received)

        run(scenario())

    def test_an_image_is_sent_as_a_data_url(self) -> None:
        spec = {
            "type": "http",
            "provider": "ocr",
            "method": "POST",
            "path": "/scan",
            "body": {"image": "{{ image }}", "name": "{{ name }}"},
        }

        async def scenario() -> None:
            async with (
                Upstream({"/v1/scan": answering(lambda _: (200, "text"))}) as upstream,
                processor(upstream.base_url) as http,
            ):
                item = make_row({"name": "a.png", "media_type": "image/png"}, image=b"\x89PNG")
                assert columns(await call_row(http, parse_definition(spec), item)) == {"answer": "text"}
                assert json.loads(upstream.received[0].body) == {
                    "image": "data:image/png;base64,iVBORw==",
                    "name": "a.png",
                }

        run(scenario())

    def test_a_row_that_cannot_be_rendered_fails_for_good_and_nothing_is_sent(self) -> None:
        spec = {"type": "http", "provider": "shop", "method": "GET", "path": "/items/{{ ean }}"}

        async def scenario() -> None:
            async with Upstream() as upstream, processor(upstream.base_url) as http:
                verdict = await call_row(http, parse_definition(spec), make_row(TOWEL))
                assert isinstance(verdict, Outcome)
                assert (verdict.state, verdict.error_code) == (OutcomeState.FAILED, "template_error")
                assert verdict.error_message == "path: line 1: there is no column 'ean'; the columns are sku, title"
                assert not upstream.received

        run(scenario())

    def test_an_upstream_that_cannot_be_reached_charges_nothing(self) -> None:
        spec = {"type": "http", "provider": "shop", "method": "GET", "path": "/x"}

        async def call(item: Item) -> Verdict:
            async with processor("http://127.0.0.1:9/v1") as http:
                return await call_row(http, parse_definition(spec), item)

        verdict = asyncio.run(call(make_row(TOWEL)))
        assert isinstance(verdict, Again)
        assert (verdict.error_code, verdict.counts) == ("connect_failed", False)


def test_a_row_for_another_provider_is_not_sent() -> None:
    spec = {"type": "http", "provider": "shop", "method": "GET", "path": "/x"}

    async def scenario() -> None:
        async with (
            Upstream() as upstream,
            HttpProcessor(upstream.base_url, KEY, DispatchLimits(), RetryLimits(), name="other") as http,
        ):
            verdict = await call_row(http, parse_definition(spec), make_row(TOWEL))
            assert isinstance(verdict, Outcome)
            assert (verdict.state, verdict.error_code) == (OutcomeState.FAILED, "wrong_provider")
            assert verdict.error_message == "the row is for the provider 'shop', and this worker is that of 'other'"
            assert not upstream.received

    run(scenario())

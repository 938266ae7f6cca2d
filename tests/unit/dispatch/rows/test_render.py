"""Requests made of definitions and rows."""

from __future__ import annotations

import base64
import json
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dispatch.http.processor import join_url
from penstock.dispatch.rows.definition import parse_definition
from penstock.dispatch.rows.render import Image, RenderedRequest, render
from penstock.dispatch.rows.template import MAX_RENDERED_BYTES
from penstock.dispatch.rows.work import RenderError
from tests.unit.dispatch.rows.test_definition import CHAT, HTTP, SCHEMA

ROW: dict[str, Any] = {"title": "Boot", "sku": "a/b?c", "brand": None, "stock": 3, "tags": ["x"], "new": True}
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
PIXEL = Image("image/png", b"\x89PNG\x00")
PIXEL_URL = "data:image/png;base64," + base64.b64encode(PIXEL.data).decode()


def request(
    spec: dict[str, Any], row: dict[str, Any] = ROW, attempt: int = 1, image: Image | None = None
) -> RenderedRequest:
    return render(parse_definition(spec), row, attempt=attempt, image=image)


def body_of(rendered: RenderedRequest) -> Any:
    assert rendered.body is not None
    return json.loads(rendered.body)


class TestChat:
    def test_the_least(self) -> None:
        rendered = request(CHAT)
        assert (rendered.method, rendered.path, rendered.headers) == ("POST", "/v1/chat/completions", {})
        assert body_of(rendered) == {"model": "m", "messages": [{"role": "user", "content": "What is Boot?"}]}

    def test_a_schema_a_system_message_and_parameters(self) -> None:
        body = body_of(
            request({**CHAT, "system": "[{{ brand }}]", "schema": SCHEMA, "parameters": {"temperature": 0.5}})
        )
        assert body["messages"][0] == {"role": "system", "content": "[]"}
        assert body["temperature"] == 0.5
        assert body["response_format"] == {
            "type": "json_schema",
            "json_schema": {"name": "result", "strict": True, "schema": SCHEMA},
        }

    def test_an_image_follows_the_prompt(self) -> None:
        body = body_of(request(CHAT, image=PIXEL))
        assert body["messages"][0]["content"] == [
            {"type": "text", "text": "What is Boot?"},
            {"type": "image_url", "image_url": {"url": PIXEL_URL}},
        ]

    def test_each_attempt_has_its_strategy(self) -> None:
        spec = {
            **CHAT,
            "prompt": "{{ strategy }} {{ attempt }}",
            "strategies": [{"name": "a"}, {"name": "b", "prompt": "B {{ strategy }} {{ attempt }}"}],
        }
        said = [body_of(request(spec, attempt=attempt))["messages"][0]["content"] for attempt in (1, 2, 3)]
        assert said == ["a 1", "B b 2", "a 3"]

    def test_an_image_larger_than_the_limit_of_a_text_is_sent(self) -> None:
        image = Image("image/png", bytes(MAX_RENDERED_BYTES))
        rendered = request(CHAT, image=image)
        assert rendered.body is not None
        assert len(rendered.body) > MAX_RENDERED_BYTES


class TestHttp:
    def test_the_least(self) -> None:
        assert request(HTTP) == RenderedRequest("GET", "/items/a%2Fb%3Fc", {}, None)
        assert request({**HTTP, "method": "POST"}).body == b""

    def test_query_headers_and_body(self) -> None:
        rendered = request(
            {
                **HTTP,
                "method": "PUT",
                "query": {"q": "{{ sku }}&x", "none": "{{ brand }}"},
                "headers": {"X-Title": "<{{ title }}>"},
                "body": {
                    "stock": "{{ stock }}",
                    "text": "{{ stock }} left",
                    "brand": "{{ brand }}",
                    "tags": ["{{ tags }}", "{{ new }}", 7, None, "{{ row }}"],
                    "{{ key }}": "{{ title | upper }}",
                },
            }
        )
        assert rendered.path == "/items/a%2Fb%3Fc?q=a%2Fb%3Fc%26x&none="
        assert rendered.headers == {"X-Title": "<Boot>"}
        assert body_of(rendered) == {
            "stock": 3,
            "text": "3 left",
            "brand": None,
            "tags": [["x"], True, 7, None, ROW],
            "{{ key }}": "BOOT",
        }

    def test_the_image_is_a_data_url(self) -> None:
        spec = {**HTTP, "path": "/scan", "method": "POST", "body": {"image": "{{ image }}", "text": "[{{ image }}]"}}
        assert body_of(request(spec, image=PIXEL)) == {"image": PIXEL_URL, "text": f"[{PIXEL_URL}]"}
        with pytest.raises(
            RenderError, match=r"^body\.image: line 1: there is no column 'image'; the columns are title, sku"
        ):
            request(spec)
        assert body_of(request(spec, {"image": "of the table"})) == {"image": "of the table", "text": "[of the table]"}

    def test_each_attempt_has_its_strategy(self) -> None:
        spec = {**HTTP, "strategies": [{"name": "a"}, {"name": "b", "path": "/{{ strategy }}/{{ title }}"}]}
        assert [request(spec, attempt=attempt).path for attempt in (1, 2, 3)] == [
            "/items/a%2Fb%3Fc",
            "/b/Boot",
            "/items/a%2Fb%3Fc",
        ]

    @pytest.mark.parametrize(
        ("spec", "row", "message"),
        [
            ({}, {"title": "x"}, "path: line 1: there is no column 'sku'; the columns are title"),
            ({}, {"sku": ""}, "path: a value in the path is empty"),
            ({}, {"sku": None}, "path: a value in the path is empty"),
            ({}, {"sku": "."}, "path: '/items/.' has a segment '.' or '..'"),
            ({}, {"sku": ".."}, "path: '/items/..' has a segment '.' or '..'"),
            ({}, {"sku": "../files"}, "path: '/items/..%2Ffiles' has a segment '.' or '..'"),
            ({}, {"sku": "a/..\\files"}, "path: '/items/a%2F..%5Cfiles' has a segment '.' or '..'"),
            ({}, {"sku": "%2e%2e"}, "path: '/items/%252e%252e' has a segment '.' or '..'"),
            ({}, {"sku": "..;x"}, "path: '/items/..%3Bx' has a segment '.' or '..'"),
            ({"path": "/a/.{{ sku }}/b"}, {"sku": "."}, "path: '/a/../b' has a segment '.' or '..'"),
            ({"path": "/a{% raw %} {% endraw %}b"}, {}, "path: '/a b' is not a path"),
            ({"query": {"q": "{{ x }}"}}, {"sku": 1}, "query.q: line 1: there is no column 'x'; the columns are sku"),
            (
                {"headers": {"X-A": "{{ sku }}"}},
                {"sku": "a\r\nHost: b"},
                "headers.X-A: it contains a line break or another character that a header cannot hold",
            ),
            (
                {"method": "POST", "path": "/x", "body": {"a": ["{{ b }}"]}},
                {"sku": 1},
                "body.a[0]: line 1: there is no column 'b'; the columns are sku",
            ),
        ],
    )
    def test_rows_that_cannot_be_rendered(self, spec: dict[str, Any], row: dict[str, Any], message: str) -> None:
        with pytest.raises(RenderError) as caught:
            request({**HTTP, **spec}, row)
        assert str(caught.value) == message

    def test_a_body_that_is_too_large(self) -> None:
        spec = {**HTTP, "path": "/x", "method": "POST", "body": ["{{ t }}", "{{ t }}"]}
        with pytest.raises(RenderError, match="the body has 6,000,007 bytes, more than 4,194,304"):
            request(spec, {"t": "x" * 3_000_000})

    @given(TEXTS)
    def test_no_value_leaves_its_segment(self, value: str) -> None:
        try:
            path = request(
                {**HTTP, "path": "/v1/items/{{ sku }}/price", "query": {"q": "{{ sku }}"}}, {"sku": value}
            ).path
        except RenderError:
            assert value in ("", ".", "..")
            return
        url = join_url("https://shop.example/v1", path)
        assert url is not None
        parts = urlsplit(url)
        assert (parts.scheme, parts.netloc, parts.fragment) == ("https", "shop.example", "")
        assert [unquote(segment) for segment in parts.path.split("/")] == ["", "v1", "items", value, "price"]
        assert parse_qs(parts.query, keep_blank_values=True) == {"q": [value]}

    @given(TEXTS)
    def test_a_header_holds_its_value_or_is_refused(self, value: str) -> None:
        spec = {**HTTP, "path": "/x", "headers": {"X-A": "{{ v }}"}}
        if value.isascii() and value.isprintable():
            assert request(spec, {"v": value}).headers == {"X-A": value}
        else:
            with pytest.raises(RenderError, match=r"^headers\.X-A: it contains"):
                request(spec, {"v": value})

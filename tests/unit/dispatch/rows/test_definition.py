"""Definitions: what a job's spec may say, and an error text for everything that it may not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.dispatch.rows.definition import ChatDefinition, HttpDefinition, parse_definition
from penstock.dispatch.rows.render import render
from penstock.errors import UsageError

CHAT: dict[str, Any] = {"type": "chat", "provider": "local", "model": "m", "prompt": "What is {{ title }}?"}
HTTP: dict[str, Any] = {"type": "http", "provider": "shop", "method": "GET", "path": "/items/{{ sku }}"}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"category": {"type": "string"}}}

WHOLE_CHAT = {
    **CHAT,
    "system": "You know {{ brand }}.",
    "schema": SCHEMA,
    "column": "said",
    "parameters": {"temperature": 0},
    "strategies": [{"name": "short"}, {"name": "long", "prompt": "Explain {{ title }}", "parameters": {}}],
}
WHOLE_HTTP = {
    **HTTP,
    "method": "POST",
    "query": {"q": "{{ title }}"},
    "headers": {"X-Team": "{{ team }}"},
    "body": {"sku": "{{ sku }}", "list": [1, None, "{{ title | upper }}"]},
    "columns": {"price": "offer.price", "tags": "tags[*].name"},
    "rules": [
        {"status": [404, "5xx"], "outcome": "retry", "after": 3},
        {"path": "error.code", "equals": None, "outcome": "done"},
        {"path": "error.retry", "exists": True, "outcome": "retry", "after": "error.retry"},
        {"path": "offer", "missing": True, "outcome": "not_found", "message": "no offer: {{ answer.why }}"},
        {
            "status": 422,
            "path": "why",
            "contains": "gone",
            "outcome": "fail",
            "code": "sold_out",
            "message": "{{ status }}",
        },
        {"status": "2xx", "outcome": "skipped"},
    ],
    "strategies": [
        {"name": "by sku"},
        {"name": "by title", "path": "/search", "body": None, "columns": {"price": "p"}},
    ],
}


@pytest.mark.parametrize("spec", [CHAT, HTTP, WHOLE_CHAT, WHOLE_HTTP])
def test_what_is_parsed_can_be_told_and_parsed_again(spec: dict[str, Any]) -> None:
    definition = parse_definition(spec)
    told = msgspec.json.encode(definition)
    assert parse_definition(msgspec.json.decode(told)) == definition
    assert msgspec.json.decode(told).items() >= spec.items()


def test_attempts_rotate_through_the_strategies() -> None:
    chat = parse_definition(WHOLE_CHAT)
    assert [chat.strategy(attempt) for attempt in (1, 2, 3, 4)] == ["short", "long", "short", "long"]
    assert isinstance(chat, ChatDefinition)
    assert chat.for_attempt(1) == chat
    second = chat.for_attempt(2)
    assert (second.prompt, second.parameters, second.system) == ("Explain {{ title }}", {}, chat.system)
    http = parse_definition(WHOLE_HTTP)
    assert isinstance(http, HttpDefinition)
    assert (http.for_attempt(2).path, http.for_attempt(2).body, http.for_attempt(2).query) == (
        "/search",
        None,
        http.query,
    )
    assert parse_definition(CHAT).strategy(1) is None


def test_the_whole_answer_is_a_column_if_none_is_named() -> None:
    definition = parse_definition(HTTP)
    assert isinstance(definition, HttpDefinition)
    assert definition.columns == {"answer": ""}


def without(spec: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in spec.items() if key != name}


def ruled(**rule: Any) -> dict[str, Any]:
    return {**HTTP, "rules": [{"status": 200, "outcome": "done"}, {"outcome": "fail", **rule}]}


DEEP: Any = "x"
for _ in range(40):
    DEEP = [DEEP]
DEEP_100: Any = DEEP
for _ in range(60):
    DEEP_100 = {"a": DEEP_100}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (3, "processor: Expected `object`, got `int`"),
        ({}, "processor: Object missing required field `type`"),
        ({"type": "python"}, "processor.type: Invalid value 'python'"),
        (without(CHAT, "model"), "processor: Object missing required field `model`"),
        ({**CHAT, "modell": "m"}, "processor: Object contains unknown field `modell`"),
        ({**CHAT, "prompt": 3}, "processor.prompt: Expected `str`, got `int`"),
        ({**HTTP, "query": {"q": 3}}, "processor.query: Expected `str`, got `int`"),
        ({**HTTP, "query": {3: "q"}}, "processor.query: Expected `str`, got `int`"),
        ({**HTTP, "method": "DELETE"}, "processor.method: Invalid enum value 'DELETE'"),
        (ruled(outcome="never"), "processor.rules[1].outcome: Invalid enum value 'never'"),
        (
            {**HTTP, "query": {f"q{n}": f"{{{{ a }}}} {n}" for n in range(400)}},
            "processor: has 401 different texts with blocks",
        ),
        (
            {
                **HTTP,
                "method": "POST",
                "strategies": [
                    {"name": str(n), "body": [f"{{{{ a }}}} {n}.{m}" for m in range(30)]} for n in range(20)
                ],
            },
            "processor: has 601 different texts with blocks",
        ),
        ({**CHAT, "parameters": {"a": DEEP_100}}, "processor: is nested more than 100 deep"),
        ({**CHAT, "provider": " "}, "processor.provider: ' ' is not a name"),
        ({**CHAT, "model": ""}, "processor.model: '' is not a name"),
        ({**CHAT, "column": "a\nb"}, r"processor.column: 'a\nb' is not a name"),
        ({**CHAT, "prompt": " "}, "processor.prompt: is empty"),
        (
            {**CHAT, "prompt": "{{ a"},
            "processor.prompt: line 1: unexpected end of input, expected end of variable block",
        ),
        ({**CHAT, "system": "{% nope %}"}, "processor.system: line 1: unknown statement nope"),
        (
            {**CHAT, "schema": {}},
            "processor.schema: is not the schema of an object with properties, which become the columns",
        ),
        (
            {**CHAT, "schema": {"type": "object", "properties": {"a": {"type": "text"}}}},
            "processor.schema: properties.a.type: 'text' is no type",
        ),
        ({**CHAT, "parameters": {"model": "x"}}, "processor.parameters.model: cannot be set here"),
        ({**CHAT, "parameters": {"stream": True}}, "processor.parameters.stream: cannot be set here"),
        ({**CHAT, "parameters": {"n": 2}}, "processor.parameters.n: cannot be set here"),
        (
            {**CHAT, "strategies": [{"name": "a"}, {"name": "a"}]},
            "processor.strategies[1].name: 'a' is taken by strategies[0]",
        ),
        ({**CHAT, "strategies": [{"name": ""}]}, "processor.strategies[0].name: '' is not a name"),
        ({**CHAT, "strategies": [{}]}, "processor.strategies[0]: Object missing required field `name`"),
        (
            {**CHAT, "strategies": [{"name": "a", "model": "m2"}]},
            "processor.strategies[0]: Object contains unknown field `model`",
        ),
        ({**CHAT, "strategies": [{"name": str(n)} for n in range(21)]}, "processor.strategies: there are 21"),
        (
            {**CHAT, "strategies": [{"name": "a"}, {"name": "b", "prompt": "{{ a | no }}"}]},
            "processor.strategies[1].prompt: line 1: there is no filter 'no'",
        ),
        ({**HTTP, "strategies": [{"name": "b", "body": 1}]}, "processor.strategies[0].body: a GET has none"),
        ({**HTTP, "path": "items"}, "processor.path: 'items' does not begin with /"),
        ({**HTTP, "path": "https://evil.example/x"}, "processor.path: 'https://evil.example/x' does not begin with /"),
        ({**HTTP, "path": "{{ sku }}/x"}, "processor.path: '{{ sku }}/x' does not begin with /"),
        ({**HTTP, "path": "//evil.example/x"}, "processor.path: '//evil.example/x' is not a path"),
        ({**HTTP, "path": "/a?b={{ c }}"}, "processor.path: '/a?b=x' is not a path"),
        ({**HTTP, "path": "/a b"}, "processor.path: '/a b' is not a path"),
        ({**HTTP, "path": "/a/../b/{{ sku }}"}, "processor.path: '/a/../b/x' has a segment '.' or '..'"),
        ({**HTTP, "path": "/a/%2e%2E/b"}, "processor.path: '/a/%2e%2E/b' has a segment '.' or '..'"),
        ({**HTTP, "path": "/{{ a | b }}"}, "processor.path: line 1: there is no filter 'b'"),
        ({**HTTP, "query": {"q": "{{"}}, "processor.query.q: line 1: unexpected end of input, expected expression"),
        ({**HTTP, "headers": {"X-A": "{{ a | b }}"}}, "processor.headers.X-A: line 1: there is no filter 'b'"),
        ({**HTTP, "headers": {"a b": ""}}, "processor.headers.a b: 'a b' is not a header name"),
        ({**HTTP, "headers": {"Host": "x"}}, "processor.headers.Host: the header Host cannot be set"),
        ({**HTTP, "body": {}}, "processor.body: a GET has none"),
        (
            {**HTTP, "method": "PUT", "body": {"a": [1, "{{ x | y }}"]}},
            "processor.body.a[1]: line 1: there is no filter 'y'",
        ),
        ({**HTTP, "method": "PUT", "body": DEEP}, f"processor.body{'[0]' * 32}: is nested more than 32 deep"),
        ({**HTTP, "columns": {}}, "processor.columns: there are 0"),
        ({**HTTP, "columns": {"a": "b..c"}}, "processor.columns.a: 'b..c' is not a path"),
        ({**HTTP, "columns": {" ": "b"}}, "processor.columns. : ' ' is not a name"),
        ({**HTTP, "rules": [{"status": 200, "outcome": "done"}] * 51}, "processor.rules: there are 51"),
        (ruled(), "processor.rules[1]: has no condition"),
        (ruled(status=[]), "processor.rules[1].status: is empty"),
        (ruled(status=99), "processor.rules[1].status: 99 is not a status"),
        (ruled(status=[200, "6xx"]), "processor.rules[1].status: '6xx' is not a status"),
        (ruled(path="a"), "processor.rules[1].path: nothing is asked of it"),
        (ruled(path="a", equals=1, exists=True), "processor.rules[1].path: equals and exists is asked of it"),
        (ruled(status=200, equals=1), "processor.rules[1].path: equals is asked of it"),
        (ruled(path="a..b", exists=True), "processor.rules[1].path: 'a..b' is not a path"),
        (ruled(status=200, after=3), "processor.rules[1].after: the outcome is fail"),
        (ruled(status=200, outcome="retry", after=-1), "processor.rules[1].after: -1 is out of range"),
        (ruled(status=200, outcome="retry", after="a."), "processor.rules[1].after: 'a.' is not a path"),
        (ruled(status=200, code="sold out"), "processor.rules[1].code: 'sold out' cannot be used"),
        (ruled(status=200, outcome="skipped", code="x"), "processor.rules[1].code: 'x' cannot be used"),
        (ruled(status=200, outcome="done", message="x"), "processor.rules[1].message: a row that is done has none"),
        (ruled(status=200, message="{{ sku }}"), "processor.rules[1].message: there is no 'sku'"),
        (
            ruled(status=200, message="{{ a"),
            "processor.rules[1].message: line 1: unexpected end of input, expected end of variable block",
        ),
    ],
)
def test_what_is_refused(spec: object, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_definition(spec)
    assert caught.value.message == message
    assert caught.value.hint or "header" in message


def test_texts_without_blocks_may_be_many() -> None:
    labels = [f"label {n}" for n in range(2_000)]
    schema = {"type": "object", "properties": {"label": {"enum": labels}}}
    definition = parse_definition({**HTTP, "method": "POST", "body": {"input": "{{ sku }}", "schema": schema}})
    assert msgspec.json.decode(render(definition, {"sku": 1}, attempt=1).body or b"") == {"input": 1, "schema": schema}


@pytest.mark.parametrize(
    "name",
    [
        *(
            "Authorization",
            "proxy-authorization",
            "Cookie",
            "Set-Cookie",
            "X-API-Key",
            "apikey",
            "X-Auth-Token",
            "X-Secret",
        ),
        *("host", "Content-Length", "transfer-encoding", "Connection", "Upgrade", "TE", "Trailer", "Expect"),
        *("Keep-Alive", "Idempotency-Key", "x\r\ny", "x:y", ""),
    ],
)
def test_headers_that_carry_secrets_or_frame_the_message_are_refused(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_definition({**HTTP, "headers": {name: "x"}})
    assert caught.value.message.startswith(f"processor.headers.{name}: ")


def test_the_definitions_of_the_page_are_ones() -> None:
    page = (Path(__file__).parents[4] / "docs" / "jobs.md").read_text("utf-8")
    found = [
        msgspec.json.decode(block) for block in re.findall(r"^```json\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    ]
    assert [type(parse_definition(each)) for each in found] == [ChatDefinition, HttpDefinition]

from __future__ import annotations

import asyncio
import base64
import json
import math
import re
import signal
import socket
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http.client import HTTPConnection
from typing import Any

import aiohttp
import pytest

from penstock.dispatch.rows.schema import misfit
from penstock.mock.answers import digest_of
from penstock.mock.behaviour import Behaviour, Change, Latency, LimitHeaders, RateLimit, Tokens
from penstock.mock.server import MockUpstream
from penstock.mock.wire import WireLimits
from tests.support.mock_process import spawn_mock, start_mock_process

DEADLINE_S = 20.0
LONG = Latency(600.0, 600.0)
"""A latency that no test waits for: what it holds back is held until the test lets go."""


class Client:
    """Calls one mock; every answer is read to its end."""

    def __init__(self, upstream: MockUpstream, http: aiohttp.ClientSession) -> None:
        self.upstream = upstream
        self._http = http

    async def post(
        self, path: str, body: Any, key: str | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        sent = dict(headers or {}) | ({"Idempotency-Key": key} if key else {})
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self._http.post(self.upstream.origin + path, data=data, headers=sent) as answer:
            raw = await answer.read()
            content = json.loads(raw) if answer.content_type == "application/json" else raw
            return answer.status, content, {name.lower(): value for name, value in answer.headers.items()}

    async def chat(self, text: str, key: str | None = None, **extra: Any) -> tuple[int, Any, dict[str, str]]:
        return await self.post("/v1/chat/completions", ask(text, **extra), key)

    async def get(self, path: str) -> Any:
        async with self._http.get(self.upstream.origin + path) as answer:
            assert answer.status == 200
            return await answer.json()


def ask(text: str, **extra: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **extra}


@asynccontextmanager
async def serving(behaviour: Behaviour | None = None, **options: Any) -> AsyncIterator[Client]:
    connector = aiohttp.TCPConnector(limit=0)
    async with MockUpstream(behaviour, **options) as upstream, aiohttp.ClientSession(connector=connector) as http:
        yield Client(upstream, http)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await test()

    asyncio.run(bounded())


async def await_until(condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.002)


async def exchange(upstream: MockUpstream, *pieces: bytes) -> bytes:
    """Sends raw bytes and returns all that comes back until the mock hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", upstream.port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


# Answers.


@pytest.mark.parametrize("prefix", ["/v1", ""])
def test_every_endpoint_answers_in_its_shape(prefix: str) -> None:
    async def test() -> None:
        async with serving() as client:
            body = ask("hello")
            mark = f"echo: hello [{digest_of(json.dumps(body).encode())}]"
            status, chat, headers = await client.post(f"{prefix}/chat/completions", body)
            assert status == 200
            assert headers["x-request-id"]
            assert chat["choices"][0]["message"] == {"role": "assistant", "content": mark, "refusal": None}
            assert chat["usage"]["total_tokens"] == sum(
                chat["usage"][part] for part in ("prompt_tokens", "completion_tokens")
            )
            _, message, headers = await client.post(f"{prefix}/messages", body | {"max_tokens": 5})
            assert message["content"][0]["text"].startswith("echo: hello [")
            assert headers["request-id"]
            _, text, _ = await client.post(f"{prefix}/completions", {"model": "m", "prompt": "hello"})
            assert text["choices"][0]["text"].startswith("echo: hello [")
            _, response, _ = await client.post(f"{prefix}/responses", {"model": "m", "input": "hello"})
            assert response["output"][0]["content"][0]["text"].startswith("echo: hello [")
            _, moderation, _ = await client.post(f"{prefix}/moderations", {"input": ["a", "b"]})
            assert [result["flagged"] for result in moderation["results"]] == [False, False]
            assert (await client.get(f"{prefix}/models"))["data"][0]["object"] == "model"
            assert await client.get("/healthz") == {"status": "ok"}

    run(test)


def test_the_last_user_message_is_echoed_whatever_its_form() -> None:
    async def test() -> None:
        async with serving() as client:
            parts = [{"type": "image_url", "image_url": {"url": "data:,"}}, {"type": "text", "text": "what?"}]
            messages = [
                {"role": "user", "content": "first"},
                {"role": "assistant", "content": "no", "tool_calls": []},
                {"role": "user", "content": parts},
                {"role": "assistant", "content": None},
            ]
            for path, name in (("/v1/chat/completions", "messages"), ("/v1/responses", "input")):
                status, answer, _ = await client.post(path, {"model": "m", name: messages})
                assert status == 200
                assert "echo: what? [" in json.dumps(answer)

    run(test)


def test_an_image_is_told_by_its_type_and_size() -> None:
    async def test() -> None:
        async with serving() as client:
            for size in range(1, 5):
                url = f"data:image/png;base64,{base64.b64encode(bytes(size)).decode()}"
                parts = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": url}}]
                _, answer, _ = await client.post(
                    "/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": parts}]}
                )
                text = answer["choices"][0]["message"]["content"]
                assert text.startswith(f"echo: What is it? (image/png, {size} bytes) [")

    run(test)


def test_an_answer_fits_the_schema_that_is_asked_for() -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {
            "category": {"type": "string", "enum": ["chairs", "tables", "lamps"]},
            "reason": {"type": "string", "minLength": 100},
            "stars": {"type": "integer", "minimum": 1, "maximum": 5},
            "price": {"type": ["number", "null"], "minimum": 0.5, "maximum": 0.75},
            "new": {"type": "boolean"},
            "nothing": {"type": "null"},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 10}},
            "size": {"type": "object", "properties": {"width": {"type": "integer"}}, "required": ["width"]},
        },
    }
    schema["required"] = list(schema["properties"])
    shape = {"type": "json_schema", "json_schema": {"name": "result", "strict": True, "schema": schema}}

    async def test() -> None:
        async with serving() as client:
            found = []
            for text in ("chair", "table", "chair"):
                _, answer, _ = await client.post("/v1/chat/completions", ask(text) | {"response_format": shape})
                found.append(json.loads(answer["choices"][0]["message"]["content"]))
                assert misfit(found[-1], schema) is None
                assert f"echo: {text}" in found[-1]["reason"]
            assert found[0] == found[2] != found[1]
            _, answer, _ = await client.post(
                "/v1/chat/completions", ask("hello") | {"response_format": {"type": "json_object"}}
            )
            assert json.loads(answer["choices"][0]["message"]["content"])["answer"].startswith("echo: hello [")

    run(test)


def test_the_same_request_gets_the_same_bytes_and_another_gets_others() -> None:
    async def test() -> None:
        async with serving() as client:
            first, again, other = [(await client.chat(text))[1] for text in ("a", "a", "b")]
            assert first == again != other

    run(test)


def test_embeddings() -> None:
    async def test() -> None:
        async with serving() as client:

            async def embed(**body: Any) -> list[Any]:
                status, answer, _ = await client.post("/v1/embeddings", {"model": "m", **body})
                assert status == 200
                return [entry["embedding"] for entry in answer["data"]]

            one, two = await embed(input=["a", "b"], dimensions=5)
            assert (len(one), len(two)) == (5, 5)
            assert one != two
            assert await embed(input="a", dimensions=5) == [one]
            (packed,) = await embed(input="a", dimensions=5, encoding_format="base64")
            assert struct.unpack("<5f", base64.b64decode(packed)) == pytest.approx(one)
            assert len(await embed(input=[1, 2, 3])) == 1
            assert len(await embed(input=[[1, 2], [3]])) == 2
            wrongs: list[dict[str, Any]] = [{"input": "a", "dimensions": size} for size in (0, 5_000)]
            for wrong in [*wrongs, {"input": []}]:
                status, answer, _ = await client.post("/v1/embeddings", {"model": "m", **wrong})
                assert (status, answer["error"]["type"]) == (400, "invalid_request_error")

    run(test)


def test_answers_are_padded() -> None:
    async def test() -> None:
        async with serving(Behaviour(response_bytes=300_000)) as client:
            _, answer, _ = await client.chat("x")
            assert len(answer["choices"][0]["message"]["content"]) == 300_000

    run(test)


@pytest.mark.parametrize("latency", [Latency(), Latency(0.02, 0.02)])
def test_streams(latency: Latency) -> None:
    async def test() -> None:
        async with serving(Behaviour(latency=latency)) as client:
            _, whole, _ = await client.chat("stream me")
            body = ask("stream me", stream=True, stream_options={"include_usage": True})
            status, raw, headers = await client.post("/v1/chat/completions", body)
            assert (status, headers["content-type"]) == (200, "text/event-stream")
            *events, done, end = raw.decode().split("\n\n")
            assert (done, end) == ("data: [DONE]", "")
            chunks = [json.loads(event.removeprefix("data: ")) for event in events]
            deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]]
            digest = digest_of(json.dumps(body).encode())
            assert "".join(deltas) == f"echo: stream me [{digest}]"
            assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
            assert chunks[-1]["usage"] == whole["usage"]
            assert client.upstream.stats().in_flight == 0

    run(test)


@pytest.mark.parametrize(
    ("path", "last", "delta"),
    [
        ("/v1/messages", "message_stop", lambda event: event.get("delta", {}).get("text", "")),
        ("/v1/responses", "response.completed", lambda event: event.get("delta", "")),
    ],
)
def test_streams_of_named_events(path: str, last: str, delta: Callable[[Any], str]) -> None:
    async def test() -> None:
        async with serving() as client:
            _, raw, _ = await client.post(path, ask("named", stream=True, input="named"))
            events = [json.loads(event.partition("data: ")[2]) for event in raw.decode().split("\n\n")[:-1]]
            assert events[-1]["type"] == last
            assert "".join(map(delta, events)).startswith("echo: named [")

    run(test)


# Misbehaviour.


def test_faults_repeat_with_the_seed_whatever_the_order() -> None:
    async def outcomes(seed: int, keys: list[str]) -> dict[str, list[int]]:
        async with serving(Behaviour(error_rate=0.3, reject_rate=0.2, seed=seed)) as client:
            seen: dict[str, list[int]] = {key: [] for key in keys}
            for _ in range(3):
                answers = await asyncio.gather(*(client.chat("x", key) for key in keys))
                for key, (status, _, _) in zip(keys, answers, strict=True):
                    seen[key].append(status)
            return seen

    async def test() -> None:
        keys = [f"key-{number}" for number in range(60)]
        first = await outcomes(1, keys)
        assert await outcomes(1, keys[::-1]) == first
        assert await outcomes(2, keys) != first
        assert {tuple(set(statuses)) for statuses in first.values() if 400 in statuses} == {(400,)}

    run(test)


def test_the_error_rate_is_met() -> None:
    async def test() -> None:
        async with serving(Behaviour(error_rate=0.2, seed=3)) as client:
            answers = await asyncio.gather(*(client.chat(f"input {number}") for number in range(1_000)))
            errors = [answer for status, answer, _ in answers if status == 500]
            assert abs(len(errors) - 200) < 5 * math.sqrt(1_000 * 0.2 * 0.8)
            assert set(errors[0]["error"]) == {"message", "type", "param", "code"}

    run(test)


def test_the_rate_limit_says_when_to_come_back() -> None:
    async def test() -> None:
        async with serving(Behaviour(rate_limit=RateLimit(3, 3_600))) as client:
            answers = [await client.chat("x", "key") for _ in range(5)]
            assert [status for status, _, _ in answers] == [200, 200, 200, 429, 429]
            assert answers[0][2]["x-ratelimit-remaining-requests"] == "2"
            _, answer, headers = answers[-1]
            assert answer["error"]["code"] == "rate_limit_exceeded"
            assert 1_180_000 < int(headers["retry-after-ms"]) <= 1_200_000
            assert headers["retry-after"] == str(math.ceil(int(headers["retry-after-ms"]) / 1_000))
            assert headers["x-ratelimit-limit-requests"] == "3"
            assert headers["x-ratelimit-reset-requests"].startswith(("59m", "60m"))
            status, answer, headers = await client.post("/v1/messages", ask("x"))
            assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
            assert headers["anthropic-ratelimit-requests-remaining"] == "0"
            client.upstream.reset()
            assert (await client.chat("x"))[0] == 200

    run(test)


def test_tokens_are_those_of_the_usage_and_take_their_time() -> None:
    async def test() -> None:
        async with serving(Behaviour(tokens=Tokens(10, 99), token_time_s=0.002)) as client:
            _, chat, _ = await client.chat("x", "key")
            tokens = chat["usage"]["completion_tokens"]
            assert chat["usage"]["total_tokens"] == tokens + chat["usage"]["prompt_tokens"]
            seen = [(await client.post(path, ask("x", prompt="x", input="x"), "key"))[1]["usage"] for path in PATHS]
            assert [usage.get("completion_tokens") or usage["output_tokens"] for usage in seen] == [tokens] * 3
            body = ask("x", stream=True, stream_options={"include_usage": True})
            _, raw, _ = await client.post("/v1/chat/completions", body, "key")
            assert b'"completion_tokens":%d,' % tokens in raw
            await client.post("/v1/embeddings", {"model": "m", "input": "x"}, "key")
            stats = await client.get("/mock/stats")
            assert stats["completion_tokens"] == 5 * tokens
            assert 0.97 * 2 * tokens < stats["latency_p50_ms"] <= stats["latency_p95_ms"]

    run(test)


PATHS = ("/v1/completions", "/v1/responses", "/v1/messages")


def test_the_load_stands_on_the_page_of_vllm() -> None:
    async def test() -> None:
        async with serving(Behaviour(latency=LONG, capacity=4, vllm_metrics=True)) as client:
            tasks = [asyncio.create_task(client.chat(f"{number}")) for number in range(7)]
            await await_until(lambda: client.upstream.stats().waiting == 3)
            head = b"GET %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            page = (await exchange(client.upstream, head % b"/metrics")).decode()
            assert "\r\ncontent-type: text/plain" in page
            values = dict(re.findall(r'^vllm:(\w+)\{.*model_name="mock-chat".*\} (\S+)$', page, re.MULTILINE))
            assert values == {
                "num_requests_running": "4.0",
                "num_requests_waiting": "3.0",
                "kv_cache_usage_perc": "1.0",
            }
            assert b" 404 " in await exchange(client.upstream, head % b"/v1/metrics")
            await client.upstream.stop()
            await asyncio.gather(*tasks)
        async with serving() as client:
            assert b" 404 " in await exchange(client.upstream, head % b"/metrics")

    run(test)


def test_the_token_limit_charges_what_the_answer_has() -> None:
    async def test() -> None:
        limits: dict[str, Any] = {"rate_limit": RateLimit(100, 3_600), "token_limit": RateLimit(250, 3_600)}
        async with serving(Behaviour(tokens=Tokens(99, 99), **limits)) as client:
            answers = [await client.chat("x", "key") for _ in range(3)]
            assert [status for status, _, _ in answers] == [200, 200, 429]
            assert answers[0][1]["usage"]["total_tokens"] == 100
            assert [headers["x-ratelimit-remaining-tokens"] for _, _, headers in answers] == ["150", "50", "50"]
            _, answer, headers = answers[-1]
            assert (answer["error"]["type"], answer["error"]["code"]) == ("tokens", "rate_limit_exceeded")
            assert headers["x-ratelimit-limit-tokens"] == "250"
            assert headers["x-ratelimit-remaining-requests"] == "98"
            assert 700 <= int(headers["retry-after"]) <= 720
            status, _, headers = await client.post("/v1/messages", ask("x"))
            assert (status, headers["anthropic-ratelimit-tokens-remaining"]) == (429, "50")
            status, _, headers = await client.post("/v1/embeddings", {"model": "m", "input": "x"})
            assert (status, headers["x-ratelimit-remaining-tokens"]) == (200, "49")

    run(test)


@pytest.mark.parametrize(("chosen", "told"), [(LimitHeaders.RETRY_AFTER, {"retry-after"}), (LimitHeaders.NONE, set())])
def test_a_limit_may_tell_less_of_itself(chosen: LimitHeaders, told: set[str]) -> None:
    async def test() -> None:
        limits: dict[str, Any] = {"rate_limit": RateLimit(3, 3_600), "token_limit": RateLimit(1e6, 1)}
        async with serving(Behaviour(burst_s=1_200, limit_headers=chosen, **limits)) as client:
            answers = [await client.chat("x") for _ in range(2)]
            assert [status for status, _, _ in answers] == [200, 429]
            found = [{name for name in headers if "retry" in name or "ratelimit" in name} for _, _, headers in answers]
            assert found == [set(), told]
            assert 1_180 <= int(answers[1][2].get("retry-after", "1200")) <= 1_200

    run(test)


def test_waits_can_be_forced_and_who_ignores_them_is_counted() -> None:
    async def test() -> None:
        async with serving(Behaviour(rate_limit=RateLimit(1, 3_600), retry_after_s=600)) as client:
            answers = [await client.chat("x") for _ in range(4)]
            assert [status for status, _, _ in answers] == [200, 429, 429, 429]
            assert answers[1][2]["retry-after"] == "600"
            assert int(answers[-1][2]["retry-after-ms"]) <= 600_000
            assert (await client.get("/mock/stats"))["ignored_waits"] == 2
            rate = await client.get("/mock/rate")
            assert [sum(each[name] for each in rate) for name in ("calls", "refused")] == [4, 3]
            assert all(each["at_ms"] % 100 == 0 for each in rate)
            client.upstream.reset()
            assert ((await client.chat("x"))[0], client.upstream.stats().ignored_waits) == (200, 0)

    run(test)


# Changes.


def test_options_change_on_a_schedule() -> None:
    async def test() -> None:
        changes = Change.parse_all("20ms:quota=0,0s:error-rate=100%,10m:quota=none")
        async with serving(Behaviour(changes=changes)) as client:
            while (await client.chat("x"))[0] != 429:
                pass
            behaviour = client.upstream.service.behaviour
            assert (behaviour.quota, behaviour.error_rate) == (0, 1)

    run(test)


def test_capacity_and_quota_change_at_runtime() -> None:
    async def test() -> None:
        async with serving(Behaviour(latency=LONG, capacity=1, quota=4)) as client:
            tasks = [asyncio.create_task(client.chat(f"{number}")) for number in range(4)]
            await await_until(lambda: client.upstream.stats().waiting == 3)
            status, answer, _ = await client.post("/mock/set", {"capacity": 3})
            assert (status, answer) == (200, {"set": {"capacity": 3}})
            assert (client.upstream.stats().in_flight, client.upstream.stats().waiting) == (3, 1)
            assert (await client.chat("x"))[1]["error"]["code"] == "insufficient_quota"
            client.upstream.set({"quota": None, "capacity": None, "latency": 0})
            assert (await client.chat("x"))[0] == 200
            await client.upstream.stop()
            assert [(await task)[0] for task in tasks] == [200] * 4

    run(test)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"capacity": 0}, "capacity 0 is out of range"),
        ({"quota": 7, "error-rate": "x"}, "error-rate: 'x' is not a fraction"),
        ({"seed": 1}, "Known are capacity, latency"),
        ({"token-time": "1ms"}, "no effect without tokens"),
        ([], "Send a JSON object"),
        (b"", "Send a JSON object"),
        ({"capacity": True}, "Send a JSON object"),
    ],
)
def test_what_cannot_be_set_changes_nothing(body: Any, said: str) -> None:
    async def test() -> None:
        behaviour = Behaviour(quota=0)
        async with serving(behaviour) as client:
            status, answer, _ = await client.post("/mock/set", body)
            assert status == 400
            assert said in answer["error"]["message"]
            assert client.upstream.service.behaviour is behaviour

    run(test)


# Quota, capacity and faults.


def test_quota_and_key() -> None:
    async def test() -> None:
        async with serving(Behaviour(quota=2, require_key="secret")) as client:
            status, answer, _ = await client.chat("x")
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
            statuses = []
            for headers in ({"Authorization": "Bearer secret"}, {"x-api-key": "secret"}, {"api-key": "secret"}):
                status, answer, _ = await client.post("/v1/chat/completions", ask("x"), headers=headers)
                statuses.append(status)
            assert statuses == [200, 200, 429]
            assert answer["error"]["code"] == "insufficient_quota"
            status, answer, _ = await client.post("/v1/messages", ask("x"), headers={"x-api-key": "secret"})
            assert (status, answer["error"]["type"]) == (402, "billing_error")

    run(test)


def test_over_capacity_calls_wait_and_latency_rises() -> None:
    async def test() -> None:
        async with serving(Behaviour(latency=Latency(0.02, 0.02), capacity=2)) as client:
            begun = time.monotonic()
            answers = await asyncio.gather(*(client.chat(f"{number}") for number in range(10)))
            assert Counter(status for status, _, _ in answers) == {200: 10}
            assert time.monotonic() - begun >= 5 * 0.02
            stats = client.upstream.stats()
            assert stats.max_in_flight == 2
            assert 1 <= stats.max_waiting <= 8

    run(test)


def test_a_full_queue_answers_503() -> None:
    async def test() -> None:
        async with serving(Behaviour(latency=LONG, capacity=1, queue_limit=1)) as client:
            stats = client.upstream.stats
            working = asyncio.create_task(client.chat("working"))
            await await_until(lambda: stats().in_flight == 1)
            waiting = asyncio.create_task(client.chat("waiting"))
            await await_until(lambda: stats().waiting == 1)
            status, answer, _ = await client.chat("refused")
            assert (status, answer["error"]["code"]) == (503, "overloaded")
            await client.upstream.stop()
            assert [(await task)[0] for task in (working, waiting)] == [200, 200]

    run(test)


def test_a_client_that_leaves_frees_its_place() -> None:
    async def test() -> None:
        async with serving(Behaviour(hang_rate=1.0, capacity=1)) as client:
            stats = client.upstream.stats
            first, second, third = (asyncio.create_task(client.chat(name)) for name in "abc")
            await await_until(lambda: (stats().in_flight, stats().waiting) == (1, 2))
            for task in (second, first):
                task.cancel()
            await await_until(lambda: (stats().in_flight, stats().waiting) == (1, 0))
            third.cancel()
            await await_until(lambda: stats().in_flight == 0)
            await asyncio.gather(first, second, third, return_exceptions=True)
            assert stats().max_in_flight == 1

    run(test)


def test_dropped_calls_get_no_answer() -> None:
    async def test() -> None:
        async with serving(Behaviour(drop_rate=1.0)) as client:
            with pytest.raises(aiohttp.ClientError):
                await client.chat("x", "key")
            assert client.upstream.stats().by_status["dropped"] >= 1
            assert set(client.upstream.calls()["key"].statuses) == {"dropped"}

    run(test)


def test_slow_calls_take_the_slow_latency() -> None:
    async def test() -> None:
        async with serving(Behaviour(slow_rate=1.0, slow_latency=Latency(0.05, 0.05))) as client:
            begun = time.monotonic()
            await client.chat("x")
            assert time.monotonic() - begun >= 0.05

    run(test)


# Counts.


def test_calls_are_counted_by_key() -> None:
    async def test() -> None:
        async with serving() as client:
            await client.chat("x", "key")
            await client.chat("y", "key")
            await client.post("/v1/chat/completions", ask("x"), headers={"X-Custom-Id": "custom"})
            await client.chat("x", metadata={"custom_id": "meta"})
            await client.chat("x", user="user")
            await client.chat("x")
            await client.post("/v1/chat/completions", b"{", "broken")
            calls = client.upstream.calls()
            body = f"body:{digest_of(json.dumps(ask('x')).encode())}"
            assert list(calls) == ["key", "custom", "meta", "user", body, "broken"]
            assert (calls["key"].calls, calls["key"].statuses) == (2, {"200": 2})
            assert calls["broken"].statuses == {"400": 1}
            stats = await client.get("/mock/stats")
            assert (stats["keys"], stats["max_calls_per_key"], stats["calls"]) == (6, 2, 7)
            assert stats["by_status"] == {"200": 6, "400": 1}
            assert stats["by_path"] == {"/v1/chat/completions": 7}
            assert stats["by_model"] == {"m": 6, "(other)": 1}
            page = await client.get("/mock/calls?limit=4")
            assert ([record["key"] for record in page["data"]], page["has_more"]) == (list(calls)[:4], True)
            page = await client.get(f"/mock/calls?after={page['last']}&limit=4")
            assert ([record["key"] for record in page["data"]], page["has_more"]) == (list(calls)[4:], False)
            assert (await client.post("/mock/calls?limit=0", b""))[0] == 405
            assert (await client.post("/mock/reset", b""))[0] == 200
            assert (await client.get("/mock/stats"))["calls"] == 0

    run(test)


def test_counting_by_key_can_be_switched_off() -> None:
    async def test() -> None:
        async with serving(Behaviour(track=False, error_rate=0.5)) as client:
            answers = [await client.chat("x", "key") for _ in range(40)]
            assert {status for status, _, _ in answers} == {200, 500}
            stats = client.upstream.stats()
            assert (stats.keys, stats.untracked_calls, stats.calls) == (0, 40, 40)

    run(test)


# The wire.


def test_one_connection_serves_many_requests() -> None:
    async def test() -> None:
        async with serving() as client:
            for number in range(20):
                await client.chat(f"{number}")
            assert client.upstream.stats().connections == 1

    run(test)


def test_pipelined_requests_are_answered_in_order() -> None:
    async def test() -> None:
        async with MockUpstream(Behaviour(latency=Latency(0, 0.01))) as upstream:
            bodies = [json.dumps(ask(f"<{number}>")).encode() for number in range(50)]
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s"
            last = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            answer = await exchange(upstream, b"".join(head % (len(body), body) for body in bodies) + last)
            places = [answer.index(b"echo: <%d> " % number) for number in range(50)]
            assert places == sorted(places)
            assert answer.endswith(b'{"status":"ok"}')
            assert answer.count(b"HTTP/1.1 200 OK\r\n") == 51

    run(test)


def test_a_chunked_body_is_the_body() -> None:
    async def test() -> None:
        async with MockUpstream() as upstream:
            body = json.dumps(ask("in pieces")).encode()
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            chunks = [b"%x\r\n%s\r\n" % (len(body[at : at + 7]), body[at : at + 7]) for at in range(0, len(body), 7)]
            answer = await exchange(upstream, head + b"Transfer-Encoding: chunked\r\n\r\n", *chunks, b"0\r\n\r\n")
            assert b"echo: in pieces [%s]" % digest_of(body).encode() in answer

    run(test)


def test_a_client_that_asks_first_is_told_to_continue() -> None:
    async def test() -> None:
        async with MockUpstream() as upstream:
            body = json.dumps(ask("after you")).encode()
            reader, writer = await asyncio.open_connection("127.0.0.1", upstream.port)
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nExpect: 100-continue\r\n"
            writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body))
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(body)
            assert b"echo: after you" in await reader.read()
            writer.close()

    run(test)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000, 431),
        (b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: 2000\r\n\r\n" + b"a" * 2_000_000, 413),
        (b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 411),
        (b"GET /v1/embeddings HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 405),
        (b"POST /v1/models HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", 405),
        (b"GET /nowhere HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404),
        (b"GET /mock/calls?after=x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 400),
        (b"GET /mock/calls?limit=0 HTTP/1.0\r\n\r\n", 400),
        (b"GET /mock/set HTTP/1.0\r\n\r\n", 405),
    ],
)
def test_what_cannot_be_served_is_answered_and_hurts_nobody(sent: bytes, status: int) -> None:
    async def test() -> None:
        async with serving(limits=WireLimits(body_max_bytes=1_000)) as client:
            head, _, body = (await exchange(client.upstream, sent)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 %d " % status)
            assert json.loads(body)["error"]["message"]
            assert (b"\r\nallow: " in head) == (status == 405)
            assert (await client.chat("still well"))[0] == 200

    run(test)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"model":"m"}', b'{"messages":[]}'])
def test_bodies_that_are_no_request_get_400(body: bytes) -> None:
    async def test() -> None:
        async with serving() as client:
            status, answer, _ = await client.post("/v1/chat/completions", body)
            assert (status, answer["error"]["type"]) == (400, "invalid_request_error")

    run(test)


def test_head_has_no_body_and_http_1_0_streams_end_with_the_connection() -> None:
    async def test() -> None:
        async with MockUpstream() as upstream:
            answer = await exchange(upstream, b"HEAD /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert answer.endswith(b"\r\n\r\n")
            assert b"content-length: 15\r\n" in answer
            body = json.dumps(ask("old", stream=True)).encode()
            head = b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body)
            answer = await exchange(upstream, head + body)
            assert b"chunked" not in answer
            assert answer.endswith(b"data: [DONE]\n\n")

    run(test)


def test_a_client_that_does_not_read_is_not_served_further() -> None:
    async def test() -> None:
        async with MockUpstream(Behaviour(response_bytes=1_000_000)) as upstream:
            body = json.dumps(ask("x")).encode()
            request = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s"
            deaf = socket.socket()
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            deaf.setblocking(False)
            await asyncio.get_running_loop().sock_connect(deaf, ("127.0.0.1", upstream.port))
            with deaf:
                await asyncio.get_running_loop().sock_sendall(deaf, request % (len(body), body) * 100)
                await await_until(lambda: upstream.stats().calls >= 1)
                async with aiohttp.ClientSession() as http, http.get(f"{upstream.origin}/healthz") as answer:
                    assert answer.status == 200
                assert upstream.stats().calls < 20

    run(test)


# The process.


def test_the_process_announces_serves_and_stops_on_a_signal() -> None:
    with start_mock_process("--latency", "10m", "--capacity", "1") as mock:
        connection = HTTPConnection("127.0.0.1", mock.port, timeout=DEADLINE_S)
        connection.request("POST", "/v1/chat/completions", json.dumps(ask("in flight")))
        end = time.monotonic() + DEADLINE_S
        while mock.stats()["in_flight"] != 1:
            assert time.monotonic() < end
        mock.process.send_signal(signal.SIGINT)
        answer = connection.getresponse()
        assert answer.status == 200
        assert b"echo: in flight" in answer.read()
        connection.close()
        assert mock.process.wait(DEADLINE_S) == 0


def test_the_process_prints_one_line_and_stops_in_time() -> None:
    with spawn_mock("--max-seconds", "0.01") as process:
        out, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert errors == b""
    (line,) = out.decode().splitlines()
    assert line.startswith("http://127.0.0.1:")
    assert line.endswith("/v1")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--latency", "5x"], "'5x' is not a duration"),
        (["--latency", "2s..1s"], "Put the smaller bound first"),
        (["--error-rate", "1.5"], "from 0 to 1"),
        (["--rate-limit", "5/d"], "100/s, 600/m"),
        (["--queue-limit", "5"], "without a capacity"),
        (["--tokens", "9..8"], "Put the smaller bound first"),
        (["--token-time", "2ms"], "no effect without tokens"),
        (["--change", "30s:seed=1"], "'seed' cannot be changed"),
        (["--error-rate", "60%", "--drop-rate", "50%"], "add up to more than 1"),
    ],
)
def test_bad_options_say_what_is_wrong(args: list[str], said: str) -> None:
    with spawn_mock(*args) as process:
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 2
    assert said in " ".join(errors.decode().split())


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with spawn_mock("--port", port) as process:
            _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert f"cannot listen on 127.0.0.1 port {port}".encode() in errors

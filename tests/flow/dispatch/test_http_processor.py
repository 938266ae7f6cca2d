"""The HTTP processor against real sockets, most of them in bad hands."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import psutil
import pytest

from penstock import __version__
from penstock.config import KIB, MIB, DispatchLimits, RetryLimits
from penstock.dispatch.http.client import HttpClient
from penstock.dispatch.http.connect import ConnectOptions
from penstock.dispatch.http.processor import HttpProcessor
from penstock.errors import PenstockError, UsageError
from penstock.model import Again, Halt, Item, Outcome, OutcomeState, Verdict
from tests.support import hostile
from tests.support.certificates import authority, local_tls
from tests.support.hostile import GOOD_BODY, Exchange, Script, Upstream, answer
from tests.support.items import make_item
from tests.support.tcp_server import bind

LIMITS = DispatchLimits(
    connect_timeout_s=2,
    first_byte_timeout_s=0.4,
    idle_timeout_s=0.4,
    attempt_timeout_s=0.8,
    max_response_bytes=1024 * 1024,
)
PATIENT = replace(LIMITS, connect_timeout_s=20, first_byte_timeout_s=20, idle_timeout_s=20, attempt_timeout_s=20)
TIMES = {
    "first_byte_timeout": "first_byte_timeout_s",
    "idle_timeout": "idle_timeout_s",
    "request_timeout": "attempt_timeout_s",
}
BAD = "/v1/bad"

CLIENT: type[HttpClient] = HttpClient
if os.environ.get("PENSTOCK_TEST_CLIENT") == "aiohttp":
    # The client that was not chosen, to see which faults it survives.
    from bench.aiohttp_client import AiohttpClient

    CLIENT = AiohttpClient

_scheme = ContextVar("scheme", default="http")


class OnEachScheme:
    """Tests that make calls."""

    @pytest.fixture(autouse=True, params=["http", "https"])
    def scheme(self, request: pytest.FixtureRequest) -> Iterator[str]:
        token = _scheme.set(request.param)
        yield request.param
        _scheme.reset(token)


def serving(scripts: Mapping[str, Script] | None = None) -> Upstream:
    return Upstream(scripts or {}, tls=local_tls() if _scheme.get() == "https" else None)


def processor(
    base_url: str,
    limits: DispatchLimits = PATIENT,
    *,
    key: str | None = None,
    headers: Mapping[str, str] | None = None,
    current_key: Callable[[], str | None] | None = None,
) -> HttpProcessor:
    return HttpProcessor(
        base_url,
        key,
        limits,
        RetryLimits(),
        headers,
        options=ConnectOptions(ca_file=str(authority().file)),
        current_key=current_key,
        client=CLIENT,
        rng=random.Random(1),
    )


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await coroutine

    asyncio.run(bounded())


async def ask(script: Script, limits: DispatchLimits = PATIENT, attempt: int = 1) -> Verdict:
    """The verdict on one call to a script, and the proof that neighbours were served meanwhile."""
    async with (
        serving({BAD: script}) as upstream,
        processor(upstream.base_url, limits) as http,
        processor(upstream.base_url, PATIENT) as neighbour,
    ):
        bad = asyncio.create_task(http.call(make_item(url=BAD, attempt=attempt)))
        for _ in range(20):
            began = time.monotonic()
            assert_completed(await neighbour.call(make_item()))
            assert time.monotonic() - began < 5
        return await bad


def assert_completed(verdict: Verdict, body: bytes = GOOD_BODY) -> None:
    assert isinstance(verdict, Outcome), verdict
    assert (verdict.state, verdict.body, verdict.status_code) == (OutcomeState.COMPLETED, body, 200)


class TestTheRequest(OnEachScheme):
    def test_carries_the_bytes_and_the_headers(self) -> None:
        async def scenario() -> None:
            raw = b'{"model":  "m", "n": 1.0, "text": "\\u00e9"}'
            async with (
                serving() as upstream,
                processor(upstream.base_url, key="sk-secret-key", headers={"X-Team": "blue"}) as http,
            ):
                verdict = await http.call(make_item(raw))
                await http.call(make_item(raw, attempt=2))
                await http.call(make_item(raw, line=2))
                assert_completed(verdict)
                assert isinstance(verdict, Outcome)
                assert verdict.request_id == "req_1"
                first, second, other = upstream.received
                assert (first.method, first.path) == ("POST", "/v1/chat/completions")
                assert first.body == raw
                assert first.headers["content-type"] == "application/json"
                assert first.headers["authorization"] == "Bearer sk-secret-key"
                assert first.headers["user-agent"] == f"penstock/{__version__}"
                assert first.headers["x-team"] == "blue"
                assert first.headers["content-length"] == str(len(raw))
                assert "cookie" not in first.headers
                assert len(first.header_names) == len(first.headers)
                keys = [request.headers["idempotency-key"] for request in (first, second, other)]
                assert keys[0] == keys[1] != keys[2]

        run(scenario())

    def test_without_a_key_sends_no_authorization(self) -> None:
        async def scenario() -> None:
            async with serving() as upstream, processor(upstream.base_url) as http:
                await http.call(make_item())
                assert "authorization" not in upstream.received[0].headers

        run(scenario())

    def test_a_changed_key_is_sent_instead_of_the_first(self) -> None:
        async def scenario() -> None:
            keys = iter(["sk-first-key", "sk-second-key"])
            async with (
                serving() as upstream,
                processor(upstream.base_url, key="sk-first-key", current_key=lambda: next(keys)) as http,
            ):
                for bearer in ("Bearer sk-first-key", "Bearer sk-second-key"):
                    await http.call(make_item())
                    received = upstream.received[-1]
                    assert received.headers["authorization"] == bearer
                    assert received.header_names.count("authorization") == 1

        run(scenario())

    def test_reuses_its_connection(self) -> None:
        async def scenario() -> None:
            async with serving() as upstream, processor(upstream.base_url) as http:
                for _ in range(20):
                    assert_completed(await http.call(make_item()))
                assert upstream.connections == 1

        run(scenario())

    def test_has_no_limit_of_its_own_on_connections(self) -> None:
        async def scenario() -> None:
            arrived = asyncio.Barrier(300)

            async def meet(exchange: Exchange) -> None:
                await arrived.wait()
                await hostile.good(exchange)

            async with serving({BAD: meet}) as upstream, processor(upstream.base_url, PATIENT) as http:
                calls = (http.call(make_item(url=BAD, line=line)) for line in range(300))
                for verdict in await asyncio.gather(*calls):
                    assert_completed(verdict)

        run(scenario())

    def test_keeps_no_cookie(self) -> None:
        async def scenario() -> None:
            baked = answer(200, headers={"Set-Cookie": "session=1; Path=/"})
            async with serving({BAD: baked}) as upstream, processor(upstream.base_url) as http:
                await http.call(make_item(url=BAD))
                await http.call(make_item(url=BAD))
                assert "cookie" not in upstream.received[1].headers

        run(scenario())

    @pytest.mark.parametrize("url", ["https://evil.example/v1/x", "//evil/x", "v1/x", "/v1/../admin", "/v1/a b", ""])
    def test_a_url_that_leaves_the_base_is_never_sent(self, url: str) -> None:
        async def scenario() -> None:
            async with serving() as upstream, processor(upstream.base_url) as http:
                verdict = await http.call(make_item(url=url))
                assert isinstance(verdict, Outcome)
                assert (verdict.state, verdict.error_code) == (OutcomeState.FAILED, "invalid_request")
                assert upstream.received == []

        run(scenario())


class TestAnswers(OnEachScheme):
    def test_the_upstreams_error_is_kept(self) -> None:
        body = b'{"error": {"message": "no such\\nmodel", "code": "model_not_found"}}'
        verdict = asyncio.run(ask(answer(404, body)))
        assert isinstance(verdict, Outcome)
        assert verdict.state is OutcomeState.FAILED
        assert (verdict.status_code, verdict.body) == (404, body)
        assert (verdict.error_code, verdict.error_message) == ("model_not_found", "HTTP 404: no such model")

    def test_too_many_requests_gates_the_route(self) -> None:
        verdict = asyncio.run(ask(answer(429, b"", {"Retry-After": "7"})))
        assert isinstance(verdict, Again)
        assert (verdict.counts, verdict.gate_s, verdict.status_code) == (False, 7.0, 429)
        assert verdict.delay_s > 7.0

    def test_a_refused_key_halts_and_is_not_repeated_in_the_message(self) -> None:
        async def scenario() -> None:
            body = b'{"error": {"message": "Incorrect API key: sk-secret-key", "code": "invalid_api_key"}}'
            async with (
                serving({BAD: answer(401, body)}) as upstream,
                processor(upstream.base_url, key="sk-secret-key") as http,
            ):
                verdict = await http.call(make_item(url=BAD))
                assert verdict == Halt(
                    "invalid_api_key", "HTTP 401: Incorrect API key: [redacted]", 401, verdict.duration_ms
                )

        run(scenario())

    @pytest.mark.parametrize("status", [400, 200])
    def test_a_repeated_key_is_not_kept(self, status: int) -> None:
        """What is kept is shown to whoever sent the request, which need not be whose key it is."""

        async def scenario() -> None:
            async with (
                serving({BAD: answer(status, b"not JSON, but sk-secret-key")}) as upstream,
                processor(upstream.base_url, key="sk-secret-key") as http,
            ):
                verdict = await http.call(make_item(url=BAD, attempt=RetryLimits().max_attempts))
                assert isinstance(verdict, Outcome)
                assert verdict.body == b'"not JSON, but [redacted]"'

        run(scenario())

    @pytest.mark.parametrize("body", [b"", b"<html>hello</html>", b'{"a": "\xff"}', b'{"a": 1', b"NaN"])
    def test_a_success_that_is_not_json_is_tried_again_then_kept_as_text(self, body: bytes) -> None:
        first = asyncio.run(ask(answer(200, body)))
        assert isinstance(first, Again)
        assert (first.error_code, first.counts) == ("invalid_response", True)
        last = asyncio.run(ask(answer(200, body), attempt=RetryLimits().max_attempts))
        assert isinstance(last, Outcome)
        assert (last.state, last.error_code) == (OutcomeState.FAILED, "invalid_response")
        assert last.body is None if not body else last.body is not None and last.body.startswith(b'"')

    def test_half_a_surrogate_pair_is_json(self) -> None:
        body = b'{"text": "cut off: \\ud83d"}'
        assert_completed(asyncio.run(ask(answer(200, body))), body)

    def test_a_header_that_is_not_text_does_no_harm(self) -> None:
        assert_completed(asyncio.run(ask(hostile.header_not_text)), b"{}")

    def test_more_than_was_promised_is_not_part_of_the_answer(self) -> None:
        assert_completed(asyncio.run(ask(hostile.longer_than_promised)), b"{}")


class TestBadUpstreams(OnEachScheme):
    @pytest.mark.parametrize(
        ("script", "codes"),
        [
            (hostile.silence, {"first_byte_timeout"}),
            (hostile.drip_head(0.02), {"first_byte_timeout", "request_timeout"}),
            (hostile.drip_body(0.02), {"request_timeout"}),
            (hostile.silence_mid_body, {"idle_timeout"}),
            (hostile.reset_mid_body, {"connection_reset"}),
            (hostile.reset_before_answer, {"connection_reset"}),
            (hostile.close_before_answer, {"connection_reset"}),
            (hostile.shorter_than_promised, {"connection_reset"}),
            (hostile.bad_chunk_size, {"protocol_error"}),
            (hostile.false_gzip, {"protocol_error"}),
            (hostile.garbage_status_line, {"protocol_error"}),
            (hostile.huge_head, {"protocol_error"}),
            (hostile.switch_protocols, {"protocol_error", "connection_reset"}),
            (hostile.flood_of_1xx, {"first_byte_timeout", "request_timeout", "protocol_error"}),
        ],
        ids=lambda value: getattr(value, "__name__", None),
    )
    def test_ends_in_time_with_its_own_code(self, script: Script, codes: set[str]) -> None:
        began = time.monotonic()
        # Only the time that is to be up is short: a busy machine must not make another one end the call.
        short = {field: getattr(LIMITS, field) for code, field in TIMES.items() if code in codes}
        verdict = asyncio.run(ask(script, replace(PATIENT, **short)))
        assert isinstance(verdict, Again), verdict
        assert verdict.error_code in codes
        assert verdict.counts
        assert verdict.gate_s == 0
        assert "\n" not in verdict.error_message
        assert time.monotonic() - began < PATIENT.attempt_timeout_s

    def test_the_last_attempt_fails_for_good(self) -> None:
        verdict = asyncio.run(ask(hostile.reset_mid_body, attempt=RetryLimits().max_attempts))
        assert isinstance(verdict, Outcome)
        assert (verdict.state, verdict.error_code) == (OutcomeState.FAILED, "connection_reset")

    @pytest.mark.parametrize(
        ("script", "cap"),
        [(hostile.endless_chunks, 4 * MIB), (hostile.gzip_bomb(256), 4 * MIB), (hostile.dust, 16 * KIB)],
        ids=["endless chunks", "gzip bomb", "dust"],
    )
    def test_an_answer_without_end_takes_bounded_memory(self, script: Script, cap: int) -> None:
        async def scenario() -> None:
            limits = replace(PATIENT, max_response_bytes=cap)
            async with serving({BAD: script}) as upstream, processor(upstream.base_url, limits) as http:
                await http.call(make_item())
                with most_memory() as grown_mib:
                    verdict = await http.call(make_item(url=BAD))
                assert isinstance(verdict, Outcome), verdict
                assert (verdict.state, verdict.error_code) == (OutcomeState.FAILED, "response_too_large")
                assert verdict.status_code == 200
                assert grown_mib() < 40
                # The rest is not read: the other side sees us leave.
                await upstream.until(lambda: upstream.open_connections <= 1)

        run(scenario())

    def test_a_call_that_ran_out_of_time_frees_its_connection(self) -> None:
        async def scenario() -> None:
            async with serving({BAD: hostile.silence}) as upstream, processor(upstream.base_url, LIMITS) as http:
                await http.call(make_item(url=BAD))
                await upstream.until(lambda: upstream.open_connections == 0)

        run(scenario())

    def test_a_cancelled_call_frees_its_connection_at_once(self) -> None:
        async def scenario() -> None:
            async with serving({BAD: hostile.silence}) as upstream, processor(upstream.base_url, PATIENT) as http:
                call = asyncio.create_task(http.call(make_item(url=BAD)))
                await upstream.until(lambda: len(upstream.received) == 1)
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
                await upstream.until(lambda: upstream.open_connections == 0)

        run(scenario())

    def test_a_connection_gone_stale_is_an_ordinary_failure(self) -> None:
        async def scenario() -> None:
            async def once(exchange: Exchange) -> None:
                served = [r for r in upstream.received if r.connection == exchange.request.connection]
                if len(served) > 1:
                    exchange.reset()
                else:
                    await hostile.good(exchange)

            async with serving({BAD: once}) as upstream, processor(upstream.base_url) as http:
                assert_completed(await http.call(make_item(url=BAD)))
                stale = await http.call(make_item(url=BAD))
                assert isinstance(stale, Again)
                assert stale.error_code == "connection_reset"
                assert_completed(await http.call(make_item(url=BAD)))

        run(scenario())


class TestElsewhere(OnEachScheme):
    @pytest.mark.parametrize("status", [301, 302, 307, 308])
    def test_a_redirect_is_stored_and_no_secret_travels(self, status: int) -> None:
        async def scenario() -> None:
            async with serving() as other:
                away = answer(status, b"", {"Location": f"{other.base_url}/x"})
                headers = {"X-Api-Key": "very-secret-key"}
                async with (
                    serving({BAD: away}) as upstream,
                    processor(upstream.base_url, key="sk-secret", headers=headers) as http,
                ):
                    verdict = await http.call(make_item(url=BAD))
                    assert isinstance(verdict, Outcome)
                    assert verdict.state is OutcomeState.FAILED
                    assert (verdict.status_code, verdict.error_code) == (status, f"http_{status}")
                    assert f"{other.port}" in (verdict.error_message or "")
                    assert (len(upstream.received), other.connections) == (1, 0)

        run(scenario())

    def test_the_environments_proxy_is_ignored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def scenario() -> None:
            async with serving() as proxy, serving() as upstream:
                for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
                    monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
                async with processor(upstream.base_url) as http:
                    assert_completed(await http.call(make_item()))
                assert proxy.connections == 0

        run(scenario())


class TestUnreachable(OnEachScheme):
    def test_a_refused_connection_charges_no_attempt(self) -> None:
        async def scenario() -> None:
            async with processor(f"{_scheme.get()}://127.0.0.1:{port}/v1") as http:
                verdict = await http.call(make_item(attempt=RetryLimits().max_attempts))
                assert isinstance(verdict, Again)
                assert (verdict.error_code, verdict.counts) == ("connect_failed", False)
                with pytest.raises(PenstockError, match=r"nothing answers at https?://127.0.0.1") as caught:
                    await http.probe()
                assert caught.value.hint

        with bind() as closed:  # bound and not listening: connections are refused, and nobody else gets it
            port = closed.getsockname()[1]
            run(scenario())

    def test_a_name_that_does_not_resolve(self) -> None:
        async def scenario() -> None:
            async with processor(f"{_scheme.get()}://no-such-host.invalid/v1", PATIENT) as http:
                verdict = await http.call(make_item())
                assert isinstance(verdict, Again)
                assert verdict.error_code == "connect_failed"
                with pytest.raises(PenstockError, match=r"no-such-host\.invalid"):
                    await http.probe()

        run(scenario())

    def test_a_connection_that_is_never_accepted(self) -> None:
        async def scenario() -> None:
            limits = replace(PATIENT, connect_timeout_s=0.3)
            with hostile.full_backlog() as port:
                async with processor(f"{_scheme.get()}://127.0.0.1:{port}/v1", limits) as http:
                    verdict = await http.call(make_item())
                    assert isinstance(verdict, Again)
                    assert (verdict.error_code, verdict.counts) == ("connect_timeout", False)

        run(scenario())

    @pytest.mark.parametrize("script", [answer(404), answer(500), hostile.silence])
    def test_any_answer_and_even_silence_is_reachable(self, script: Script) -> None:
        async def scenario() -> None:
            async with serving({"/v1/models": script}) as upstream, processor(upstream.base_url, LIMITS) as http:
                await http.probe()

        run(scenario())

    def test_what_is_not_http_is_reported(self) -> None:
        async def scenario() -> None:
            scripts = {"/v1/models": hostile.garbage_status_line}
            async with serving(scripts) as upstream, processor(upstream.base_url) as http:
                with pytest.raises(PenstockError, match="does not speak HTTP"):
                    await http.probe()

        run(scenario())


class TestSettings:
    @pytest.mark.parametrize(
        "url", ["localhost:8000", "ftp://h/v1", "http://", "http://h:x/v1", "http://u:p@h/v1", "http://h/v1?a=1"]
    )
    def test_a_bad_base_url_is_refused(self, url: str) -> None:
        with pytest.raises(UsageError):
            processor(url)

    @pytest.mark.parametrize(
        "headers",
        [
            {"X-A": "a\r\nX-B: b"},
            {"X-A": "a\0"},
            {"X A": "a"},
            {"X-A\r\nX-B": "a"},
            {"Host": "evil"},
            {"Content-Length": "1"},
            {"transfer-encoding": "chunked"},
            {"Connection": "close"},
        ],
    )
    def test_a_bad_header_is_refused(self, headers: dict[str, str]) -> None:
        with pytest.raises(UsageError):
            processor("http://h/v1", headers=headers)

    def test_a_key_with_a_line_break_is_refused_and_not_shown(self) -> None:
        with pytest.raises(UsageError) as caught:
            processor("http://h/v1", key="sk-secret\r\nX: y")
        assert "sk-secret" not in str(caught.value)


class TestThroughTheDispatcher(OnEachScheme):
    def test_aborted_calls_give_their_items_back(self) -> None:
        async def scenario() -> None:
            results: list[Item] = []
            async with serving({BAD: hostile.silence}) as upstream, processor(upstream.base_url, PATIENT) as http:
                dispatcher = http.dispatcher()
                await dispatcher.start(lambda item, _: results.append(item))
                stuck = [make_item(url=BAD, line=line) for line in range(5)]
                dispatcher.offer(stuck)
                await upstream.until(lambda: len(upstream.received) == 5)
                assert sorted(item.line for item in dispatcher.abort()) == [0, 1, 2, 3, 4]
                dispatcher.offer([make_item(line=9)])
                await dispatcher.wait_idle()
                assert [item.line for item in results] == [9]
                await dispatcher.stop()

        run(scenario())


@contextmanager
def most_memory() -> Iterator[Callable[[], float]]:
    """Watch this process's memory; the result says by how many MiB it grew at most."""
    process = psutil.Process()
    before = peak = process.memory_info().rss
    over = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.002):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield lambda: (peak - before) / 1024 / 1024
    finally:
        over.set()
        watcher.join()

"""The official client, unmodified: passed on at once, or in a session's order."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

import openai
import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.support.pooler import pooled
from tests.support.recorder import Recorder, recording
from tests.support.server import ServerProcess, served
from tests.support.session_api import (
    CHAT,
    PROVIDER_KEY,
    Place,
    client,
    new_database,
    open_place,
    write_config,
)
from tests.support.thorough import thorough
from tests.support.wait import wait_until

THREADS = 50
PER_THREAD = 4


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, server_18: str) -> Iterator[Place]:
    with open_place(tmp_path_factory.mktemp("passthrough"), server_18, max_attempts=2, retry_base_s=0.01) as opened:
        yield opened


@pytest.fixture
def key() -> str:
    return f"p-{uuid4().hex[:12]}"


def ask(caller: openai.OpenAI, text: str) -> str | None:
    answer = caller.chat.completions.create(model="small", messages=[{"role": "user", "content": text}])
    return answer.choices[0].message.content


def ask_stream(caller: openai.OpenAI, text: str) -> str:
    stream = caller.chat.completions.create(model="small", messages=[{"role": "user", "content": text}], stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream)


# -- at once


def test_passed_on_by_model(place: Place, key: str) -> None:
    assert ask(place.client(), f"plain {key}") == f"echo plain {key}"
    call = place.upstream.calls[-1]
    assert call.path == CHAT
    assert call.headers["authorization"] == f"Bearer {PROVIDER_KEY}"
    assert "the-callers-key" not in json.dumps(call.headers)
    assert not [name for name in call.headers if name.startswith("x-stainless")]


def test_a_stream_is_passed_on_as_it_comes(place: Place, key: str) -> None:
    stream = place.client().chat.completions.create(
        model="small", messages=[{"role": "user", "content": f"hold {key}"}], stream=True
    )
    first = next(stream)
    assert first.choices[0].delta.content == "echo"  # the upstream holds back the rest
    place.upstream.release(key)
    rest = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert rest == f" hold {key} ¡sí!"


@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_passed_on_with_their_status(place: Place, stream: bool) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        (ask_stream if stream else ask)(place.client(), "fail 422")
    assert caught.value.code == "oops"
    assert "it fails" in caught.value.message


def test_nothing_is_stored_without_a_session(place: Place) -> None:
    ask(place.client(), "plain")
    assert ask(place.client(), "plain") == "echo plain"
    with psycopg.connect(place.database) as connection:
        row = connection.execute("SELECT count(*) FROM penstock.templates WHERE body LIKE '%plain%'").fetchone()
    assert row == (0,)


@pytest.mark.parametrize("session", [None, "s"])
def test_a_model_nobody_serves(place: Place, session: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        place.client(session).chat.completions.create(model="unheard-of", messages=[])
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_an_upstream_that_is_not_there(tmp_path: Path, database_18: str) -> None:
    with (
        served(tmp_path, "--base-url", "http://127.0.0.1:9/v1", database=database_18) as server,
        pytest.raises(openai.InternalServerError) as caught,
    ):
        ask(client(server), "x")
    assert (caught.value.status_code, caught.value.code) == (502, "connect_failed")


# -- in a session


def test_the_answer_is_the_upstreams(place: Place, key: str) -> None:
    raw = place.client(key).with_raw_response.chat.completions.create(
        model="small", messages=[{"role": "user", "content": f"one {key}"}]
    )
    assert raw.headers["x-session-sequence"] == "1"
    assert raw.parse().choices[0].message.content == f"echo one {key}"
    [request] = place.get(f"/{key}/requests")["data"]
    assert request["id"] == raw.headers["x-session-request-id"]
    assert place.upstream.calls[-1].headers["authorization"] == f"Bearer {PROVIDER_KEY}"


@pytest.mark.parametrize("endpoint", ["completions", "embeddings", "responses"])
def test_other_endpoints_take_their_turn_too(place: Place, key: str, endpoint: str) -> None:
    body = {"model": "small", "prompt" if endpoint == "completions" else "input": f"{endpoint} {key}"}
    answer = place.server.ask("POST", f"/v1/{endpoint}", body, headers={"X-Session-Id": key})
    assert answer.status == 200
    assert (place.upstream.calls[-1].path, place.upstream.calls[-1].text) == (f"/v1/{endpoint}", f"{endpoint} {key}")


def test_errors_are_final(place: Place, key: str) -> None:
    """The session has tried as often as it may: the client does not add tries of its own."""
    with pytest.raises(openai.InternalServerError) as caught:
        ask(place.client(key, max_retries=2), "fail 500")
    assert caught.value.code == "oops"
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert len(place.get(f"/{key}/requests")["data"]) == 1
    assert place.get(f"/{key}/requests")["data"][0]["attempts"] == 2


def test_a_stream_in_a_session_comes_as_it_is_made(place: Place, key: str) -> None:
    stream = place.client(key).chat.completions.create(
        model="small", messages=[{"role": "user", "content": f"hold {key}"}], stream=True
    )
    assert next(stream).choices[0].delta.content == "echo"
    place.upstream.release(key)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == f" hold {key} ¡sí!"
    [request] = place.get(f"/{key}/requests")["data"]
    stored = request["response"]["body"]
    assert (stored["object"], stored["content_type"]) == ("stream", "text/event-stream; charset=utf-8")
    assert stored["text"].endswith("data: [DONE]\n\n")


def test_a_repeated_stream_is_the_stored_one(place: Place, key: str) -> None:
    caller = place.client(key)
    caller = caller.with_options(default_headers={"Idempotency-Key": "again"})
    first = ask_stream(caller, f"once {key}")
    assert ask_stream(caller, f"once {key}") == first == f"echo once {key} ¡sí!"
    assert place.upstream.texts.count(f"once {key}") == 1


def test_a_stream_that_breaks_off_is_not_continued_by_another(place: Place, key: str) -> None:
    """The call is tried again, but its new answer is not glued to the old one."""
    text = f"hold {key} broken"
    stream = place.client(key).chat.completions.create(
        model="small", messages=[{"role": "user", "content": text}], stream=True
    )
    assert next(stream).choices[0].delta.content == "echo"
    place.upstream.release(key)
    rest: list[str] = []
    with pytest.raises(openai.APIError) as caught:
        rest.extend(chunk.choices[0].delta.content or "" for chunk in stream)
    assert f"echo {text} ¡sí!".startswith("echo" + "".join(rest)), "nothing comes twice"
    # By its code: the second attempt has begun, or has failed too, in the words of whatever noticed it.
    assert caught.value.code in ("stream_broken_off", "connection_reset")
    place.upstream.wait_called(text, 2)
    [request] = place.get(f"/{key}/requests")["data"]
    assert place.ended(key, request["id"])["status"] == "failed"


def test_a_failed_stream_is_an_error_like_any_other(place: Place, key: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask_stream(place.client(key), "fail 400")
    assert caught.value.code == "oops"


@pytest.mark.parametrize("odd", ["a/b", "x" * 257, "\x80"])
def test_odd_session_ids_are_refused(place: Place, odd: str) -> None:
    headers = {"X-Session-Id": odd}
    answer = place.server.ask("POST", CHAT, {"model": "small", "messages": []}, headers=headers)
    assert (answer.status, answer.json["error"]["param"]) == (400, "X-Session-Id")


def test_a_stopping_server_lets_calls_in_flight_end(tmp_path: Path, server_18: str) -> None:
    with open_place(tmp_path, server_18) as place, ThreadPoolExecutor(2) as threads:
        asked = threads.submit(ask, place.client("a"), "hold a")
        queued = threads.submit(ask, place.client("b"), "hold b")
        for text in ("hold a", "hold b"):
            place.upstream.wait_called(text)
        place.server.process.terminate()
        wait_until(lambda: "stopping" in place.server.log, 30)
        place.upstream.release("a")
        assert asked.result() == "echo hold a"
        with pytest.raises(openai.InternalServerError) as caught:
            queued.result()
        assert (caught.value.status_code, caught.value.code) == (503, "wait_timeout")
        place.upstream.release("b")
        assert place.server.process.wait(30) == 0


# -- many callers, many servers


def converse(servers: list[ServerProcess], upstream: Recorder, *, threads: int = THREADS) -> None:
    """Threads with a session each and one that all share, over the servers in turn; every second call a stream."""
    shared = f"shared {uuid4().hex[:6]}"
    faults: list[str] = []
    order: list[tuple[int, str]] = []
    lock = threading.Lock()
    # Making a client from nothing takes longer than a call.
    callers = [client(server, timeout=60) for server in servers]

    def talk(number: int) -> None:
        own = f"own-{uuid4().hex[:8]}"
        for turn in range(PER_THREAD):
            anybody = callers[(number + turn) % len(callers)]
            for session, text in ((own, f"{own} {turn}"), (shared.replace(" ", "-"), f"{shared} {number} {turn}")):
                caller = anybody.with_options(default_headers={"X-Session-Id": session})
                if (number + turn) % 2:
                    answer, wanted = ask_stream(caller, text), f"echo {text} ¡sí!"
                else:
                    raw = caller.with_raw_response.chat.completions.create(
                        model="small", messages=[{"role": "user", "content": text}]
                    )
                    answer, wanted = raw.parse().choices[0].message.content or "", f"echo {text}"
                    if session != own:
                        with lock:
                            order.append((int(raw.headers["x-session-sequence"]), text))
                if answer != wanted:
                    faults.append(f"{text}: {answer}")
        mine = [call for call in upstream.calls if call.text.startswith(own)]
        if [call.text for call in mine] != [f"{own} {turn}" for turn in range(PER_THREAD)] or upstream.overlaps(mine):
            faults.append(f"{own} was not in order")

    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(talk, number) for number in range(threads)]:
            future.result()
    assert faults == []
    common = [call for call in upstream.calls if call.text.startswith(shared)]
    assert len(common) == threads * PER_THREAD
    assert upstream.overlaps(common) == []
    seen = [call.text for call in common]
    assert [seen[sequence - 1] for sequence, _ in order] == [text for _, text in order]


def test_fifty_threads_are_answered_in_order(place: Place) -> None:
    converse([place.server], place.upstream)


def test_any_server_will_do(tmp_path: Path, server_18: str) -> None:
    with ExitStack() as stack:
        upstream = stack.enter_context(recording())
        database = stack.enter_context(new_database(server_18))
        config = write_config(tmp_path, upstream)
        servers = [
            stack.enter_context(served(tmp_path, "--config", config, database=database, name=f"serve{number}"))
            for number in range(2)
        ]
        converse(servers, upstream, threads=50 if thorough() else 20)


def test_without_notices_it_works_all_the_same(tmp_path: Path, server_18: str) -> None:
    """Behind a pooler nobody can listen: answers and pieces are found by asking."""
    with ExitStack() as stack:
        upstream = stack.enter_context(recording())
        direct = stack.enter_context(new_database(server_18))
        way = stack.enter_context(pooled(server_18))
        database = make_conninfo(way, dbname=str(conninfo_to_dict(direct)["dbname"]))
        config = write_config(tmp_path, upstream)
        server = stack.enter_context(served(tmp_path, "--config", config, database=database))
        converse([server], upstream, threads=10)

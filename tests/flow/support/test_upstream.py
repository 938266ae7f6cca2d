"""The upstream with a notebook: every call and every answer is in its history, whatever becomes of the connection."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from penstock.mock.behaviour import Behaviour
from tests.support.checker import check
from tests.support.history import Event, digest_of, read_history
from tests.support.processes import Processes
from tests.support.proxy import TcpProxy
from tests.support.proxy_link import Way
from tests.support.tcp_server import bind
from tests.support.upstream import line_of, start_upstream, upstream_serving
from tests.support.wait import wait_until

DEADLINE_S = 20.0


def ask(port: int, key: str | None, *, line: str = "line", **body: object) -> bytes:
    sent = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "user": line, **body}
    headers = {"content-type": "application/json"} | ({"Idempotency-Key": key} if key else {})
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    with urlopen(Request(url, json.dumps(sent).encode(), headers), timeout=DEADLINE_S) as answer:
        data: bytes = answer.read()
    return data


def set_latency(port: int, latency: str) -> None:
    """Of the calls that come from now on."""
    body = json.dumps({"latency": latency}).encode()
    with urlopen(f"http://127.0.0.1:{port}/mock/set", body, timeout=DEADLINE_S) as answer:
        assert answer.status == 200


def noted(directory: Path, kind: str) -> list[Event]:
    return [event for event in read_history(directory) if event.f == "dispatch" and event.type == kind]


def test_calls_and_answers_are_noted(tmp_path: Path) -> None:
    with upstream_serving(tmp_path) as upstream:
        first = ask(upstream.port, "k-1", line="a")
        second = ask(upstream.port, "k-1", line="a")
        ask(upstream.port, None)
    assert first != second, "the same request is never answered the same"
    assert json.loads(first)["choices"] == json.loads(second)["choices"]
    begun, ended = noted(tmp_path, "invoke"), noted(tmp_path, "ok")
    assert [(event.key, event.value) for event in begun] == [
        ("k-1", {"n": 1, "line": "a"}),
        ("k-1", {"n": 2, "line": "a"}),
    ]
    assert [event.value for event in ended] == [
        {"n": 1, "digest": digest_of(first), "status": 200},
        {"n": 2, "digest": digest_of(second), "status": 200},
    ]
    assert begun[0].t <= ended[0].t <= begun[1].t
    assert check(read_history(tmp_path)).seen["dispatch"] == 2


def test_errors_are_answers_too(tmp_path: Path) -> None:
    with (
        upstream_serving(tmp_path, Behaviour(error_rate=1.0)) as upstream,
        pytest.raises(HTTPError) as caught,
    ):
        ask(upstream.port, "k-1")
    with caught.value as error:
        assert noted(tmp_path, "ok")[0].value == {"n": 1, "digest": digest_of(error.read()), "status": 500}


def test_a_refusal_at_the_door_is_an_answer_too(tmp_path: Path) -> None:
    with (
        upstream_serving(tmp_path, Behaviour(reject_rate=1.0)) as upstream,
        pytest.raises(HTTPError) as caught,
    ):
        ask(upstream.port, "k-1")
    caught.value.close()
    value = noted(tmp_path, "ok")[0].value
    assert value is not None
    assert value["status"] == 400


def test_a_call_that_is_never_answered_has_no_end(tmp_path: Path) -> None:
    with upstream_serving(tmp_path, Behaviour(drop_rate=1.0)) as upstream, pytest.raises(OSError, match=r".*"):
        ask(upstream.port, "k-1")
    assert len(noted(tmp_path, "invoke")) == 1
    assert not noted(tmp_path, "ok")


def test_cut_by_a_proxy_it_serves_on(tmp_path: Path) -> None:
    with upstream_serving(tmp_path) as upstream, TcpProxy(("127.0.0.1", upstream.port)) as proxy:
        proxy.cut_after(0, Way.DOWN)
        with pytest.raises(OSError, match=r".*"):
            ask(proxy.port, "answered, and the answer lost")
        errors: list[Exception] = []

        def leave() -> None:
            try:
                ask(proxy.port, "cut while it works")
            except OSError as error:
                errors.append(error)

        set_latency(upstream.port, "3600s")
        thread = threading.Thread(target=leave)
        thread.start()
        wait_until(lambda: len(noted(tmp_path, "invoke")) == 2, DEADLINE_S)
        proxy.cut()
        thread.join()
        set_latency(upstream.port, "0")
        ask(proxy.port, "served")
        assert upstream.stats()["abandoned"] == 1
    assert errors
    assert [event.key for event in noted(tmp_path, "ok")] == ["answered, and the answer lost", "served"]


def test_killed_it_comes_back_at_the_same_port(tmp_path: Path) -> None:
    # Bound and never listening: nobody else is given the port while no upstream has it.
    with bind() as reserved, Processes(tmp_path) as processes:
        port = reserved.getsockname()[1]
        upstream = start_upstream(processes, tmp_path, port=port)
        ask(upstream.port, "before")
        upstream.process.kill()
        upstream = start_upstream(processes, tmp_path, port=port)
        ask(upstream.port, "after")
    ends = noted(tmp_path, "ok")
    assert [(event.process, event.key) for event in ends] == [("upstream", "before"), ("upstream.2", "after")]
    assert len({str(event.value) for event in ends}) == 2
    assert check(read_history(tmp_path)).seen["answer"] == 2


def test_chance_is_by_seed_and_key(tmp_path: Path) -> None:
    def fates(directory: Path) -> list[bool]:
        with upstream_serving(directory, Behaviour(error_rate=0.5, seed=3)) as upstream:
            return [_fails(upstream.port, f"k-{number}") for number in range(30)]

    first = fates(tmp_path / "1")
    assert first == fates(tmp_path / "2")
    assert 0 < sum(first) < 30


def _fails(port: int, key: str) -> bool:
    try:
        ask(port, key)
    except HTTPError as error:
        error.close()
        return True
    return False


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (b'{"user": "u", "metadata": {"custom_id": "c"}}', "c"),
        (b'{"user": "u", "metadata": {"custom_id": 1}}', "u"),
        (b'{"user": "u"}', "u"),
        (b"{}", None),
        (b"no json", None),
    ],
)
def test_a_body_may_name_its_line(body: bytes, line: str | None) -> None:
    assert line_of(body) == line

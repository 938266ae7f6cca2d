"""The client commands against servers that are not there, not ours, or not well: a scripted one on a real socket."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.support.certificates import authority, local_tls
from tests.support.cli import Finished, read_lines, run_cli, write_requests

Json = dict[str, Any]

ID = "batch_" + "019a8c0e5d7a7c41b0d3b5f2f7a1c9e4"


def batch_object(batch_id: str = ID, **other: Any) -> Json:
    return {
        "id": batch_id,
        "object": "batch",
        "endpoint": "/v1/chat/completions",
        "model": "small",
        "errors": None,
        "input_file_id": "file-1",
        "completion_window": "24h",
        "status": "completed",
        "output_file_id": "file-2",
        "error_file_id": None,
        "created_at": 1_700_000_000,
        "in_progress_at": 1_700_000_001,
        "expires_at": 1_700_086_400,
        "finalizing_at": None,
        "completed_at": 1_700_000_200,
        "failed_at": None,
        "expired_at": None,
        "cancelling_at": None,
        "cancelled_at": None,
        "request_counts": {"total": 2, "completed": 2, "failed": 0},
        "usage": None,
        "metadata": None,
        "paused_at": None,
        "priority": 0,
        "eta_seconds": None,
        **other,
    }


class Call(BaseHTTPRequestHandler):
    """One request to the script."""

    protocol_version = "HTTP/1.1"
    server: Script

    def do_GET(self) -> None:
        self._play()

    def do_POST(self) -> None:
        self._play()

    def do_PUT(self) -> None:
        self._play()

    def _play(self) -> None:
        self.content = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.seen.append((self.command, self.path, headers))
        self.server.play(self)

    def answer(
        self, status: int, body: bytes | Json, media: str = "application/json", *, length: int = 0, **headers: str
    ) -> None:
        """Send a whole answer; with `length` a longer one is promised than is sent."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", media)
        self.send_header("content-length", str(length or len(content)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)
        if length:
            self.close_connection = True

    def refuse(self, status: int, message: str, **headers: str) -> None:
        # Of what it does not have, Penstock says by which parameter it was named.
        self.refuse_as(status, {"message": message, "type": "x", "param": "id", "code": None}, **headers)

    def refuse_as(self, status: int, error: Json, **headers: str) -> None:
        self.answer(status, {"error": error}, length=0, **headers)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- the base class's name
        pass


class Script(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Call)
        self.play: Callable[[Call], None] = lambda call: call.answer(200, batch_object())
        self.seen: list[tuple[str, str, dict[str, str]]] = []

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def calls(self, method: str, path: str) -> int:
        return sum(1 for was, at, _ in self.seen if (was, at.partition("?")[0]) == (method, path))


@pytest.fixture
def script() -> Iterator[Script]:
    with Script() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(script: Script, cwd: Path, *args: str | Path, key: str | None = None) -> Finished:
    return run_cli(*args, "--server", script.origin, cwd=cwd, env={"PENSTOCK_API_KEY": key} if key else None)


# -- not there, not ours


def test_nobody_listens(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused, and nobody else gets it
        port = closed.getsockname()[1]
        ended = run_cli("ls", "--server", f"http://127.0.0.1:{port}", cwd=tmp_path)
    ended.refuses(1, f"cannot reach the server at http://127.0.0.1:{port}: Connection refused", "penstock serve")


def test_a_servers_own_authority_is_named_in_the_environment(tmp_path: Path, script: Script) -> None:
    script.play = lambda call: call.answer(200, {"object": "list", "data": [], "has_more": False})
    script.socket = local_tls().wrap_socket(script.socket, server_side=True)
    origin = f"https://127.0.0.1:{script.server_port}"
    run_cli("ls", "--server", origin, cwd=tmp_path).refuses(1, "certificate refused", "SSL_CERT_FILE=")
    assert script.seen == []
    trusting = {"SSL_CERT_FILE": str(authority().file)}
    assert run_cli("ls", "--server", origin, "--json", cwd=tmp_path, env=trusting).expect(0).summary["data"] == []


def test_the_environments_proxy_is_used_except_for_this_machine(tmp_path: Path, script: Script) -> None:
    script.play = lambda call: call.answer(200, {"object": "list", "data": [], "has_more": False})
    proxy = {"http_proxy": script.origin.removeprefix("http://"), "no_proxy": ""}
    run_cli("ls", "--server", "http://penstock.invalid/", "--json", cwd=tmp_path, env=proxy).expect(0)
    assert script.seen[0][1].startswith("http://penstock.invalid/v1/batches?")
    ask_directly = {**proxy, "no_proxy": "penstock.invalid"}
    ended = run_cli("ls", "--server", "http://penstock.invalid", cwd=tmp_path, env=ask_directly)
    ended.refuses(1, "cannot reach the server at http://penstock.invalid")
    nowhere = {**proxy, "http_proxy": "http://127.0.0.1:9"}
    run_cli("ls", "--server", script.origin, cwd=tmp_path, env=nowhere).expect(0)
    socks = {**proxy, "http_proxy": "socks5://u:secret@h"}
    ended = run_cli("ls", "--server", "http://penstock.invalid", cwd=tmp_path, env=socks)
    ended.refuses(2, "HTTP_PROXY or ALL_PROXY: the proxy's URL is not http://host:port", "NO_PROXY=penstock.invalid")
    assert "secret" not in ended.stderr


@pytest.mark.parametrize("server", ["127.0.0.1:8000", "ftp://host", "http://", "http://h:x"])
def test_what_is_no_address_is_refused(tmp_path: Path, server: str) -> None:
    run_cli("ls", "--server", server, cwd=tmp_path).refuses(2, f"--server {server}: not an http(s) URL")


def test_an_address_with_a_password_is_refused_and_not_shown(tmp_path: Path) -> None:
    ended = run_cli("ls", "--server", "http://me:secret@127.0.0.1:1", cwd=tmp_path)
    ended.refuses(2, "must not carry credentials", "PENSTOCK_API_KEY")
    assert "secret" not in ended.stderr


def test_a_server_and_a_database_at_once(tmp_path: Path) -> None:
    run_cli("ls", "--server", "http://h", "--data-dir", "d", cwd=tmp_path).refuses(2, "--server and a database at once")


def test_no_server_and_no_data(tmp_path: Path) -> None:
    run_cli("ls", cwd=tmp_path).refuses(1, ".penstock holds no data yet", "penstock run", "--server URL")
    assert not (tmp_path / ".penstock").exists()


def test_something_else_answers(tmp_path: Path, script: Script) -> None:
    script.play = lambda call: call.answer(200, b"<html>", "text/html")
    ask(script, tmp_path, "ls").refuses(1, "does not answer like Penstock: HTTP 200, text/html", "--server")


@pytest.mark.parametrize("status", [404, 405])
@pytest.mark.parametrize("command", [("ls",), ("submit", "requests.jsonl")])
def test_an_endpoint_of_models_is_no_server_of_penstock(
    tmp_path: Path, script: Script, status: int, command: tuple[str, ...]
) -> None:
    write_requests(tmp_path / "requests.jsonl", 1)
    unknown = {"message": "Nothing is served at /v1/batches.", "type": "x", "param": None, "code": None}
    script.play = lambda call: call.refuse_as(status, unknown)
    ask(script, tmp_path, *command).refuses(1, f"does not answer like Penstock: HTTP {status}", "Check --server")


def test_a_server_of_another_release(tmp_path: Path, script: Script) -> None:
    unknown = {"message": "Invalid URL (GET /v1/batches)", "type": "x", "param": None, "code": "unknown_url"}
    script.play = lambda call: call.refuse_as(404, unknown)
    ask(script, tmp_path, "ls").refuses(1, "Invalid URL (GET /v1/batches)", "another release")


def test_a_redirect_is_told_not_followed(tmp_path: Path, script: Script) -> None:
    script.play = lambda call: call.answer(308, b"", location="https://elsewhere.example/v1")
    ask(script, tmp_path, "ls", key="sk-1").refuses(1, "sends on to https://elsewhere.example/v1")
    assert len(script.seen) == 1


# -- refused


def test_the_key_is_sent_and_a_refusal_says_where_it_comes_from(tmp_path: Path, script: Script) -> None:
    script.play = lambda call: call.refuse(401, "Incorrect API key provided.")
    ended = ask(script, tmp_path, "ls", "--json", key="sk-penstock-1")
    ended.refuses(1, "Incorrect API key provided.", "PENSTOCK_API_KEY")
    assert ended.summary["error"]["message"] == "Incorrect API key provided."
    assert ended.summary["exit_code"] == 1
    sent = {name.lower(): value for name, value in script.seen[0][2].items()}
    assert sent["authorization"] == "Bearer sk-penstock-1"
    assert "sk-penstock-1" not in ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("status", "code", "hint"),
    [(403, 1, "admin"), (404, 1, "penstock ls"), (409, 1, "penstock show"), (422, 2, "--help"), (500, 1, "log")],
)
def test_the_servers_words_are_shown(tmp_path: Path, script: Script, status: int, code: int, hint: str) -> None:
    script.play = lambda call: call.refuse(status, "This is why.")
    ask(script, tmp_path, "show", ID).refuses(code, "This is why.", hint)
    # What is no batch may be a job.
    assert len(script.seen) == (2 if status == 404 else 1)


# -- repeated, or not


def test_a_read_is_repeated(tmp_path: Path, script: Script) -> None:
    def play(call: Call) -> None:
        if len(script.seen) < 3:
            call.refuse(503, "In a moment.", retry_after="0")
        else:
            call.answer(200, {"object": "list", "data": [], "has_more": False})

    script.play = play
    assert ask(script, tmp_path, "ls", "--json").expect(0).summary["data"] == []
    assert script.calls("GET", "/v1/batches") == 3


def test_an_order_is_not_repeated(tmp_path: Path, script: Script) -> None:
    def play(call: Call) -> None:
        if call.command == "POST":
            call.refuse(503, "In a moment.", retry_after="0")
        else:
            call.answer(200, batch_object(status="in_progress"))

    script.play = play
    ask(script, tmp_path, "pause", ID).refuses(1, "In a moment.")
    assert script.calls("POST", f"/v1/batches/{ID}/pause") == 1


def test_an_upload_and_a_new_batch_are_repeated_under_one_key_each(tmp_path: Path, script: Script) -> None:
    contents = []

    def play(call: Call) -> None:
        if call.command == "GET":
            call.answer(200, {"object": "list", "data": [], "has_more": False})
        elif call.command == "PUT":
            contents.append(call.content)
            if len(contents) == 1:
                call.answer(200, b"{", length=100)  # broken off
            else:
                call.answer(200, {"id": "file-1"})
        elif script.calls("POST", "/v1/batches") == 1:
            call.refuse(502, "Bad gateway.")
        else:
            call.answer(200, batch_object(status="validating"))

    script.play = play
    source = write_requests(tmp_path / "requests.jsonl", 3_000)
    assert ask(script, tmp_path, "submit", source).expect(0).stdout == f"{ID}\n"
    assert contents == [source.read_bytes()] * 2
    for path, count in (("/v1/files", 2), ("/v1/batches", 2)):
        keys = [
            headers["idempotency-key"]
            for method, at, headers in script.seen
            if method != "GET" and at.partition("?")[0] == path
        ]
        assert len(keys) == count
        assert len(set(keys)) == 1


def test_a_download_that_was_cut_starts_over(tmp_path: Path, script: Script) -> None:
    content = b'{"custom_id":"r-1"}\n{"custom_id":"r-2"}\n'

    def play(call: Call) -> None:
        if not call.path.endswith("/content"):
            call.answer(200, batch_object())
        elif script.calls("GET", "/v1/files/file-2/content") == 1:
            call.answer(200, content[:25], "application/octet-stream", length=len(content))
        elif script.calls("GET", "/v1/files/file-2/content") == 2:
            call.refuse(503, "In a moment.")
        else:
            call.answer(200, content, "application/octet-stream", x_incomplete="false")

    script.play = play
    ended = ask(script, tmp_path, "export", ID, "-o", "out.jsonl").expect(0)
    assert "starting over" in ended.stderr
    assert (tmp_path / "out.jsonl").read_bytes() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl"]


def test_results_that_are_gone_leave_the_old_output(tmp_path: Path, script: Script) -> None:
    def play(call: Call) -> None:
        if call.path.endswith("/content"):
            call.refuse(404, "No such File object: file-2")
        else:
            call.answer(200, batch_object())

    script.play = play
    (tmp_path / "out.jsonl").write_text("before\n")
    ask(script, tmp_path, "export", ID, "-o", "out.jsonl").refuses(1, "no longer kept", "30 days")
    assert (tmp_path / "out.jsonl").read_text() == "before\n"


# -- following


def test_watching_goes_on_by_asking_where_no_events_come(tmp_path: Path, script: Script) -> None:
    def play(call: Call) -> None:
        if call.path.endswith("/events"):
            call.refuse(404, "Invalid URL")
        elif script.calls("GET", f"/v1/batches/{ID}") < 3:
            call.answer(200, batch_object(status="in_progress", completed_at=None))
        else:
            call.answer(200, batch_object(request_counts={"total": 2, "completed": 1, "failed": 1}))

    script.play = play
    ended = ask(script, tmp_path, "watch", ID).expect(3)
    assert "completed after 3m20s: 2 requests, 1 completed, 1 failed" in ended.stdout
    assert script.calls("GET", f"/v1/batches/{ID}/events") == 1


def test_events_that_break_off_are_taken_up_again(tmp_path: Path, script: Script) -> None:
    running = batch_object(status="in_progress", completed_at=None)

    def play(call: Call) -> None:
        if not call.path.endswith("/events"):
            call.answer(200, running)
            return
        event = f": hello\nevent: progress\r\ndata: {json.dumps(running)}\n\nid: 1\nevent: result\ndata: {{}}\n\n"
        if script.calls("GET", f"/v1/batches/{ID}/events") > 1:
            event += f"event: done\ndata: {json.dumps(batch_object())}\n\n"
        call.answer(200, event.encode(), "text/event-stream", length=9_999)

    script.play = play
    ended = ask(script, tmp_path, "watch", ID, "--json").expect(0)
    told = [json.loads(line) for line in ended.stdout.splitlines()]
    assert told == [running, {**batch_object(), "exit_code": 0}]


@pytest.mark.parametrize(
    ("batch", "code", "words"),
    [
        (batch_object(), 0, "completed after 3m20s: 2 requests, 2 completed"),
        (batch_object(status="expired", completed_at=None, expired_at=1_700_000_100), 3, "expired after 1m40s"),
        (batch_object(status="in_progress", completed_at=None, paused_at=1_700_000_100), 4, "paused: 2 requests"),
        (
            batch_object(
                status="failed",
                completed_at=None,
                failed_at=1_700_000_003,
                errors={
                    "object": "list",
                    "data": [{"code": "url_mismatch", "line": 7, "message": "Wrong\x1b[2J url.", "param": "url"}],
                },
            ),
            2,
            "line 7: Wrong [2J url. (url_mismatch)",
        ),
    ],
)
def test_watch_ends_with_the_batchs_exit_code(
    tmp_path: Path, script: Script, batch: Json, code: int, words: str
) -> None:
    script.play = lambda call: call.answer(200, batch)
    assert words in ask(script, tmp_path, "watch", ID).expect(code).stdout


# -- ids


def listing(*ids: str) -> Callable[[Call], None]:
    """Batches newest first, from a cursor on; and no jobs."""

    def play(call: Call) -> None:
        if call.path.startswith("/api/jobs"):
            call.answer(200, {"jobs": [], "next": None})
            return
        query = dict(pair.split("=") for pair in call.path.partition("?")[2].split("&"))
        found = [name for name in sorted(ids, reverse=True) if name < query.get("after", "z")]
        page = found[: int(query["limit"])]
        data = [batch_object(name) for name in page]
        call.answer(200, {"object": "list", "data": data, "has_more": len(found) > len(page)})

    return play


def named(start: str, end: str) -> str:
    return "batch_" + start + "0" * (32 - len(start) - len(end)) + end


FIRST, SECOND, THIRD = named("01a0", "beef"), named("01a1", "cafe"), named("02ff", "cafe")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("01a0", FIRST), ("batch_01a1", SECOND), ("02", THIRD), ("BATCH_02".lower(), THIRD), ("beef", FIRST)],
)
def test_a_few_digits_are_enough(tmp_path: Path, script: Script, text: str, expected: str) -> None:
    script.play = listing(FIRST, SECOND, THIRD)
    assert ask(script, tmp_path, "watch", text, "--json").expect(0).summary["id"] == expected


@pytest.mark.parametrize(
    ("text", "candidates"), [("01a", (FIRST, SECOND)), ("cafe", (SECOND, THIRD)), ("batch_0", (FIRST, SECOND, THIRD))]
)
def test_too_few_digits_list_the_candidates(
    tmp_path: Path, script: Script, text: str, candidates: tuple[str, ...]
) -> None:
    script.play = listing(FIRST, SECOND, THIRD)
    ask(script, tmp_path, "cancel", text).refuses(2, f"'{text}' may mean any of these", *candidates, "Give more digits")
    assert all(method == "GET" for method, _, _ in script.seen)


@pytest.mark.parametrize("text", ["03", "dead", "xyz", "batch_", "0" * 33])
def test_no_such_id(tmp_path: Path, script: Script, text: str) -> None:
    script.play = listing(FIRST)
    ask(script, tmp_path, "show", text).refuses(2, f"'{text}'", "penstock ls")


# -- the file


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no request"),
        (b"\n\n", "holds no request"),
        (b"\n{nope}\n", "line 2: not valid JSON"),
        (b'{"custom_id": "a"}\n', "line 1: has no url"),
        (b"[]\n", "line 1: has no url"),
    ],
)
def test_a_file_without_an_endpoint(tmp_path: Path, script: Script, content: bytes, words: str) -> None:
    (tmp_path / "in.jsonl").write_bytes(content)
    ask(script, tmp_path, "submit", "in.jsonl").refuses(2, words)
    assert not script.seen


def test_a_missing_file_and_a_pipe(tmp_path: Path, script: Script) -> None:
    ask(script, tmp_path, "submit", "none.jsonl").refuses(2, "none.jsonl: cannot be read")
    ask(script, tmp_path, "submit", "-").refuses(2, "standard input")
    ask(script, tmp_path, "submit", ".").refuses(2, "is a directory")
    write_requests(tmp_path / "in.jsonl", 1)
    ask(script, tmp_path, "submit", "in.jsonl", "-o", "in.jsonl").refuses(2, "overwrite the input")
    ask(script, tmp_path, "submit", "in.jsonl", "-o", "no/where.jsonl").refuses(2, "cannot write")
    assert not script.seen
    assert len(read_lines(tmp_path / "in.jsonl")) == 1

"""Following a batch: partial results, server-sent events and long polls, with many readers and slow ones."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from tests.support.batch_api import Event, Ground, custom_ids, events, jsonl, open_ground, submit, until
from tests.support.wait import wait_until

CONNECTIONS = (
    "SELECT count(*) FROM pg_stat_activity"
    " WHERE datname = current_database() AND application_name = 'penstock serve' AND state <> 'idle'"
)


@pytest.fixture(scope="module")
def ground(server_18: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """An upstream that takes its time, so that there is something to follow."""
    directory = tmp_path_factory.mktemp("follow")
    with open_ground(directory, server_18, "--latency", "20ms", settings=("concurrency=8",)) as opened:
        yield opened


@pytest.fixture(scope="module")
def idle(server_18: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """No workers: nothing ever happens."""
    with open_ground(tmp_path_factory.mktemp("idle"), server_18, workers=0) as opened:
        yield opened


@pytest.fixture
def client(ground: Ground) -> Iterator[openai.OpenAI]:
    with ground.client() as made:
        yield made


def results(told: list[Event]) -> list[str]:
    return [event.data["custom_id"] for event in told if event.name == "result"]


def test_the_output_of_a_running_batch_can_be_read_on(ground: Ground, client: openai.OpenAI) -> None:
    batch = until(client, submit(client, jsonl(400)).id, "in_progress")
    assert batch.output_file_id is not None
    seen: list[str] = []
    offset = pages = 0
    while True:
        answer = ground.server.ask("GET", f"/v1/files/{batch.output_file_id}/content?offset={offset}")
        assert answer.status == 200
        found = custom_ids(answer.content)
        seen += found
        assert int(answer.headers["x-last-line"]) == offset + len(found) == len(seen)
        offset, pages = len(seen), pages + bool(found)
        if answer.headers["x-incomplete"] == "false":
            break
    assert pages > 2
    assert sorted(seen) == sorted(f"r{number}" for number in range(400))
    # Of the ended batch: everything in input order, or in the order it was recorded from any place on.
    whole = ground.server.ask("GET", f"/v1/files/{batch.output_file_id}/content")
    assert (whole.headers["x-incomplete"], whole.headers["x-last-line"]) == ("false", "400")
    assert custom_ids(whole.content) == [f"r{number}" for number in range(400)]
    rest = ground.server.ask("GET", f"/v1/files/{batch.output_file_id}/content?offset=390")
    assert custom_ids(rest.content) == seen[390:]
    beyond = ground.server.ask("GET", f"/v1/files/{batch.output_file_id}/content?offset=1000")
    assert (beyond.content, beyond.headers["x-last-line"]) == (b"", "1000")


def test_a_running_output_is_a_file_that_cannot_be_deleted(ground: Ground, client: openai.OpenAI) -> None:
    batch = until(client, submit(client, jsonl(10_000)).id, "in_progress")
    assert batch.output_file_id is not None
    answer = ground.server.ask("GET", f"/v1/files/{batch.output_file_id}/content")
    assert answer.headers["x-incomplete"] == "true"
    file = client.files.retrieve(batch.output_file_id)
    assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    with pytest.raises(openai.ConflictError) as error:
        client.files.delete(batch.output_file_id)
    assert error.value.response.headers["x-should-retry"] == "false"
    wait_until(lambda: ground.server.ask("GET", f"/v1/files/{batch.output_file_id}/content").content, 30)
    with ground.server.frozen_workers():
        assert client.batches.cancel(batch.id).status == "cancelling"
    until(client, batch.id, "cancelled")
    client.files.delete(batch.output_file_id)
    with pytest.raises(openai.NotFoundError):
        client.files.content(batch.output_file_id)


def test_events_tell_progress_and_the_end(ground: Ground, client: openai.OpenAI) -> None:
    batch = submit(client, jsonl(600))
    with events(ground, batch.id) as reader:
        assert reader.response.headers["content-type"].startswith("text/event-stream")
        told = list(reader)
    names = [event.name for event in told]
    assert names[0] == "progress"
    assert names[-1] == "done"
    assert set(names[:-1]) == {"progress"}
    assert told[-1].data == ground.server.ask("GET", f"/v1/batches/{batch.id}").json
    counts = [event.data["request_counts"]["completed"] for event in told]
    assert counts == sorted(counts)


def test_events_tell_every_result_once_and_can_be_taken_up_again(ground: Ground, client: openai.OpenAI) -> None:
    batch = submit(client, jsonl(400))
    first: list[Event] = []
    with events(ground, batch.id, "?results=true") as reader:
        for event in reader:
            first.append(event)
            if len(results(first)) >= 150:
                break
    last = next(event.id for event in reversed(first) if event.name == "result")
    assert last is not None
    with events(ground, batch.id, "?results=true", last_event_id=last) as reader:
        second = list(reader)
    assert second[-1].name == "done"
    assert sorted(results(first) + results(second)) == sorted(f"r{number}" for number in range(400))
    ids = [int(event.id) for event in first + second if event.id is not None]
    assert ids == list(range(1, 401))
    # A batch that has ended tells all of it at once; `after` is for clients without that header.
    with events(ground, batch.id, f"?results=true&after={last}") as reader:
        assert results(list(reader)) == results(second)
    for query in ("?results=true&after=x", "?results=true&after=-1", "?results=perhaps"):
        assert ground.server.ask("GET", f"/v1/batches/{batch.id}/events{query}").status == 400


def test_many_readers_are_told_the_same(ground: Ground, client: openai.OpenAI) -> None:
    batch = submit(client, jsonl(300))

    def follow(number: int) -> list[str]:
        with events(ground, batch.id, "?results=true") as reader:
            told = list(reader)
        assert told[-1].name == "done", number
        return results(told)

    with ThreadPoolExecutor(40) as readers:
        heard = list(readers.map(follow, range(40)))
    assert len(heard[0]) == 300
    assert all(entry == heard[0] for entry in heard)


def test_a_reader_who_does_not_read_holds_nothing(ground: Ground, client: openai.OpenAI) -> None:
    batch = submit(client, jsonl(500))
    with socket.create_connection(("127.0.0.1", ground.server.port)) as idle:
        idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        request = (
            f"GET /v1/batches/{batch.id}/events?results=true HTTP/1.1\r\nHost: 127.0.0.1:{ground.server.port}\r\n\r\n"
        )
        idle.sendall(request.encode())
        with events(ground, batch.id, "?results=true") as reader:
            assert len(results(list(reader))) == 500
        wait_until(lambda: ground.count(CONNECTIONS) == 0, 20)
        idle.settimeout(20)
        content = b""
        while b"event: done" not in content:
            content += idle.recv(65_536)
    assert content.count(b"event: result") == 500


def test_a_long_poll_answers_when_the_batch_ends_or_the_time_is_up(ground: Ground, client: openai.OpenAI) -> None:
    batch = submit(client, jsonl(300))
    early = ground.server.ask("GET", f"/v1/batches/{batch.id}?wait=0.05").json
    assert early["status"] in ("validating", "in_progress")
    with ThreadPoolExecutor(30) as waiting:
        answers = list(waiting.map(lambda _: ground.server.ask("GET", f"/v1/batches/{batch.id}?wait=60"), range(30)))
    assert {answer.json["status"] for answer in answers} == {"completed"}
    assert ground.server.ask("GET", f"/v1/batches/{batch.id}?wait=60").json["status"] == "completed"
    for wait in ("61", "-1", "soon"):
        assert ground.server.ask("GET", f"/v1/batches/{batch.id}?wait={wait}").status == 400


def test_followers_learn_that_the_batch_was_deleted(ground: Ground, client: openai.OpenAI) -> None:
    batch = until(client, submit(client, jsonl(2_000)).id, "in_progress")
    with (
        ground.server.waiting(f"/v1/batches/{batch.id}?wait=60") as waiting,
        events(ground, batch.id, "?results=true") as reader,
    ):
        stream = iter(reader)
        next(stream)
        assert ground.server.ask("DELETE", f"/v1/batches/{batch.id}").status == 200
        last = list(stream)[-1]
        assert (last.name, last.data) == ("done", {"id": batch.id, "object": "batch", "deleted": True})
        assert waiting.answer().status == 404


@pytest.mark.parametrize("path", ["/events?results=true", "/events", "?wait=60"])
def test_readers_who_leave_are_noticed(idle: Ground, path: str) -> None:
    with idle.client() as client:
        batch = until(client, submit(client, jsonl(1)).id, "in_progress")
        connection = http.client.HTTPConnection("127.0.0.1", idle.server.port, timeout=30)
        connection.request("GET", f"/v1/batches/{batch.id}{path}")
        if path != "?wait=60":
            assert connection.getresponse().read(8) == b"retry: 2"
        told = f"GET /v1/batches/{batch.id}{path.partition('?')[0]} "
        before = idle.server.log.count(told)
        connection.close()
        # The access log is told of a request when it is over: long before its time, here.
        wait_until(lambda: idle.server.log.count(told) > before, 20)


def test_streams_and_long_polls_end_when_the_server_stops(server_18: str, tmp_path: Path) -> None:
    with open_ground(tmp_path, server_18, workers=0) as ground, ground.client() as client:
        batch = until(client, submit(client, jsonl(1)).id, "in_progress")
        with (
            events(ground, batch.id) as reader,
            ground.server.waiting(f"/v1/batches/{batch.id}?wait=60") as waiting,
        ):
            stream = iter(reader)
            assert next(stream).name == "progress"
            assert ground.server.stop(30) == 0
            assert "done" not in [event.name for event in stream]
            answer = waiting.answer()
            assert (answer.status, answer.json["status"]) == (200, "in_progress")

"""Batches through the official client: their life, what is refused, and what can be done to them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.batch_api import ENDPOINT, Ground, custom_ids, jsonl, open_ground, submit, until
from tests.support.wait import wait_until

MISSING = "batch_" + "0" * 32
LIFE = ("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at")


@pytest.fixture(scope="module")
def ground(server_18: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """An upstream that answers at once."""
    with open_ground(tmp_path_factory.mktemp("batches"), server_18) as opened:
        yield opened


@pytest.fixture(scope="module")
def stuck(server_18: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """No workers: batches stay as they are."""
    with open_ground(tmp_path_factory.mktemp("stuck"), server_18, workers=0) as opened:
        yield opened


@pytest.fixture
def client(ground: Ground) -> Iterator[openai.OpenAI]:
    with ground.client() as made:
        yield made


@pytest.fixture
def still(stuck: Ground) -> Iterator[openai.OpenAI]:
    with stuck.client() as made:
        yield made


def test_a_batch_from_creation_to_results(ground: Ground, client: openai.OpenAI) -> None:
    batch = submit(client, jsonl(25), metadata={"team": "search"}, extra_body={"priority": 7})
    assert (batch.object, batch.endpoint, batch.completion_window) == ("batch", ENDPOINT, "24h")
    assert batch.expires_at == batch.created_at + 86_400
    assert batch.metadata == {"team": "search"}
    assert batch.request_counts is not None
    assert batch.usage is not None
    assert batch.usage.total_tokens == 0
    raw = ground.server.ask("GET", f"/v1/batches/{batch.id}").json
    # Every field is there from the beginning: clients look into them unasked.
    assert {"errors", "output_file_id", "error_file_id", "model", "usage", "metadata", *LIFE} <= set(raw)
    assert raw["priority"] == 7

    done = until(client, batch.id, "completed")
    assert done.request_counts is not None
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (25, 25, 0)
    assert done.usage is not None
    assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens > 0
    assert done.model == "small"
    assert done.in_progress_at is not None
    assert done.completed_at is not None
    assert done.created_at <= done.in_progress_at <= done.completed_at == done.finalizing_at
    assert (done.failed_at, done.expired_at, done.cancelled_at, done.errors) == (None, None, None, None)
    assert done.error_file_id is None
    assert done.output_file_id is not None
    content = client.files.content(done.output_file_id).content
    assert custom_ids(content) == [f"r{number}" for number in range(25)]
    for line in content.splitlines():
        entry = json.loads(line)
        assert entry["error"] is None
        assert entry["response"]["status_code"] == 200
        assert entry["id"].startswith("batch_req_")
    file = client.files.retrieve(done.output_file_id)
    assert (file.purpose, file.bytes, file.filename) == ("batch_output", len(content), f"{batch.id}_output.jsonl")
    assert file.expires_at == file.created_at + 30 * 86_400
    assert done.output_file_id in [listed.id for listed in client.files.list(purpose="batch_output")]


def test_a_batch_whose_every_request_fails_is_completed_without_output(server_18: str, tmp_path: Path) -> None:
    with open_ground(tmp_path, server_18, "--reject-rate", "1") as ground, ground.client() as client:
        done = until(client, submit(client, jsonl(3)).id, "completed")
        assert done.request_counts is not None
        assert (done.request_counts.completed, done.request_counts.failed) == (0, 3)
        assert done.output_file_id is None
        assert done.error_file_id is not None
        lines = [json.loads(line) for line in client.files.content(done.error_file_id).content.splitlines()]
        assert [line["response"]["status_code"] for line in lines] == [400] * 3
        assert [line["error"] for line in lines] == [None] * 3

        # Once more: what failed runs again, and the batch ends again.
        with pytest.raises(openai.BadRequestError, match=r"custom_ids.*'nobody'") as refused:
            client.post(f"/batches/{done.id}/retry", cast_to=object, body={"custom_ids": ["nobody"]})
        assert refused.value.param == "custom_ids"
        unknown = f"batch_req_{done.id.removeprefix('batch_')}_99"
        other = ground.server.ask("POST", f"/v1/batches/{done.id}/retry", {"request_ids": [unknown]})
        assert (other.status, unknown in other.json["error"]["message"]) == (400, True)
        first = client.get(f"/batches/{done.id}/results", cast_to=dict[str, Any])["data"][0]
        again = ground.server.ask("POST", f"/v1/batches/{done.id}/retry", {"request_ids": [first["id"]]})
        assert again.status == 200
        assert again.json["completed_at"] is None
        assert until(client, done.id, "completed").request_counts == done.request_counts
        assert ground.mock.stats()["calls"] == 4


@pytest.mark.parametrize(
    ("content", "code", "line"),
    [
        (b"not json\n", "invalid_json_line", 1),
        (jsonl(2) + jsonl(1), "duplicate_custom_id", 3),
        (b"", "empty_file", None),
        (jsonl(1).replace(b"/v1/chat/completions", b"/v1/embeddings"), "url_mismatch", 1),
    ],
)
def test_a_file_that_cannot_run_fails_its_batch(
    client: openai.OpenAI, content: bytes, code: str, line: int | None
) -> None:
    failed = until(client, submit(client, content).id, "failed")
    assert failed.failed_at is not None
    assert failed.errors is not None
    assert failed.errors.data
    assert (failed.errors.data[0].code, failed.errors.data[0].line) == (code, line)
    assert failed.errors.data[0].message
    assert (failed.output_file_id, failed.error_file_id) == (None, None)
    assert failed.request_counts is not None
    assert failed.request_counts.total == 0


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"input_file_id": "file-" + "0" * 32}, 404, "input_file_id"),
        ({"input_file_id": "nonsense"}, 404, "input_file_id"),
        ({"input_file_id": 3}, 400, "input_file_id"),
        ({"endpoint": "/v1/images"}, 400, "endpoint"),
        ({"completion_window": "24"}, 400, "completion_window"),
        ({"completion_window": "0h"}, 400, "completion_window"),
        ({"completion_window": "9999999d"}, 400, "completion_window"),
        ({"metadata": {str(number): "x" for number in range(17)}}, 400, "metadata"),
        ({"metadata": {"k" * 65: "x"}}, 400, "metadata"),
        ({"metadata": {"k": "x" * 513}}, 400, "metadata"),
        ({"metadata": {"k": "\x00"}}, 400, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 10}}, 400, "output_expires_after.seconds"),
        ({"priority": 101}, 400, "priority"),
        ({"priority": -101}, 400, "priority"),
        ({"owner": "root"}, 422, "owner"),
        ({"state": "completed"}, 422, "state"),
    ],
)
def test_a_wish_that_cannot_be_met_is_refused(stuck: Ground, change: dict[str, Any], status: int, param: str) -> None:
    with stuck.client() as client:
        file = client.files.create(file=jsonl(1), purpose="batch")
    body = {"input_file_id": file.id, "endpoint": ENDPOINT, "completion_window": "24h"}
    answer = stuck.server.ask("POST", "/v1/batches", body | change)
    assert answer.status == status, answer.content
    assert answer.json["error"]["param"] == param
    if status == 404:
        assert answer.json["error"]["message"].startswith("No such File object: ")


def test_a_file_of_another_purpose_does_not_run(still: openai.OpenAI) -> None:
    file = still.files.create(file=jsonl(1), purpose="user_data")
    with pytest.raises(openai.BadRequestError) as error:
        still.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
    assert (error.value.param, error.value.code) == ("input_file_id", "invalid_purpose")


@pytest.mark.parametrize(("window", "seconds"), [("24h", 86_400), ("1h", 3_600), ("30m", 1_800), ("7d", 604_800)])
def test_windows_other_than_a_day(still: openai.OpenAI, window: str, seconds: int) -> None:
    batch = submit(still, jsonl(1), completion_window=window)
    assert (batch.completion_window, batch.expires_at) == (window, batch.created_at + seconds)


def test_an_idempotency_key_makes_one_batch(still: openai.OpenAI) -> None:
    file = still.files.create(file=jsonl(1), purpose="batch")
    headers = {"Idempotency-Key": "only once"}

    def create(**change: Any) -> Any:
        wish: dict[str, Any] = {"input_file_id": file.id, "endpoint": ENDPOINT, "completion_window": "24h"}
        return still.batches.create(**(wish | change), extra_headers=headers)

    first = create()
    assert create().id == first.id
    with pytest.raises(openai.ConflictError) as error:
        create(completion_window="1h")
    assert error.value.response.headers["x-should-retry"] == "false"


def test_cancelling_says_so_and_keeps_what_was_done(still: openai.OpenAI) -> None:
    batch = until(still, submit(still, jsonl(4)).id, "in_progress")
    assert batch.output_file_id is not None
    assert batch.error_file_id is None
    cancelled = still.batches.cancel(batch.id)
    assert cancelled.cancelling_at
    ended = until(still, batch.id, "cancelled")
    assert ended.cancelled_at is not None
    assert ended.request_counts is not None
    assert (ended.request_counts.total, ended.request_counts.completed, ended.request_counts.failed) == (4, 0, 4)
    assert ended.output_file_id is None
    assert ended.error_file_id is not None
    lines = [json.loads(line) for line in still.files.content(ended.error_file_id).content.splitlines()]
    assert [line["error"]["code"] for line in lines] == ["batch_cancelled"] * 4
    assert [line["response"] for line in lines] == [None] * 4
    with pytest.raises(openai.ConflictError) as error:
        still.batches.cancel(batch.id)
    assert error.value.body == {
        "message": "Cannot cancel a batch with status 'cancelled'.",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }
    assert error.value.response.headers["x-should-retry"] == "false"


def test_a_batch_that_is_too_late_expires(still: openai.OpenAI) -> None:
    batch = submit(still, jsonl(2), completion_window="1s")
    ended = until(still, batch.id, "expired")
    assert ended.expired_at is not None
    assert ended.error_file_id is not None
    lines = [json.loads(line) for line in still.files.content(ended.error_file_id).content.splitlines()]
    assert [line["error"]["code"] for line in lines] == ["batch_expired"] * 2


def test_pausing_and_resuming(stuck: Ground, still: openai.OpenAI) -> None:
    batch = until(still, submit(still, jsonl(2)).id, "in_progress")

    def steer(verb: str) -> dict[str, Any]:
        answer = stuck.server.ask("POST", f"/v1/batches/{batch.id}/{verb}")
        assert answer.status == 200, answer.content
        found: dict[str, Any] = answer.json
        return found

    for _ in range(2):
        paused = steer("pause")
        # Clients that have never heard of pausing go on waiting.
        assert paused["status"] == "in_progress"
        assert paused["paused_at"]
    listed = stuck.server.ask("GET", "/v1/batches?status=paused").json["data"]
    assert [entry["id"] for entry in listed] == [batch.id]
    assert batch.id in [entry["id"] for entry in stuck.server.ask("GET", "/v1/batches?status=in_progress").json["data"]]
    for _ in range(2):
        assert steer("resume")["paused_at"] is None
    still.batches.cancel(batch.id)
    for verb in ("pause", "resume"):
        answer = stuck.server.ask("POST", f"/v1/batches/{batch.id}/{verb}")
        assert answer.status == 409
        assert answer.json["error"]["message"] == f"Cannot {verb} a batch with status 'cancelled'."
    assert stuck.server.ask("POST", f"/v1/batches/{batch.id}/pause", {"owner": "root"}).status == 422


def test_a_cancelled_batch_can_be_taken_up_again(stuck: Ground, still: openai.OpenAI) -> None:
    batch = until(still, submit(still, jsonl(2)).id, "in_progress")
    still.batches.cancel(batch.id)
    until(still, batch.id, "cancelled")
    again = stuck.server.ask("POST", f"/v1/batches/{batch.id}/retry")
    assert again.status == 200, again.content
    assert (again.json["status"], again.json["cancelled_at"], again.json["cancelling_at"]) == (
        "in_progress",
        None,
        None,
    )
    bad: list[dict[str, Any]] = [
        {"request_ids": ["batch_req_x_1"]},
        {"request_ids": []},
        {"custom_ids": ["a"], "request_ids": ["b"]},
    ]
    for body in bad:
        assert stuck.server.ask("POST", f"/v1/batches/{batch.id}/retry", body).status == 400
    assert stuck.server.ask("POST", f"/v1/batches/{batch.id}/retry", {"all": True}).status == 422


def test_lists_are_walked_to_the_end_while_batches_come_and_go(stuck: Ground, still: openai.OpenAI) -> None:
    file = still.files.create(file=jsonl(1), purpose="batch")

    def create() -> str:
        made = still.batches.create(
            input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h", metadata={"walk": "yes"}
        )
        return made.id

    made = [create() for _ in range(7)]
    seen = []
    for batch in still.batches.list(limit=2, extra_query={"metadata[walk]": "yes"}):
        seen.append(batch.id)
        assert stuck.server.ask("DELETE", f"/v1/batches/{batch.id}").json["deleted"] is True
        create()
    assert seen == made[::-1]
    page = stuck.server.ask("GET", "/v1/batches?limit=2").json
    assert (page["object"], page["has_more"], len(page["data"])) == ("list", True, 2)
    for query in ("limit=0", "limit=101", "after=x", "status=lost", "created_after=then"):
        answer = stuck.server.ask("GET", f"/v1/batches?{query}")
        assert (answer.status, answer.json["error"]["param"]) == (400, query.split("=")[0])


def test_lists_can_be_narrowed(stuck: Ground, still: openai.OpenAI) -> None:
    team = {"team": "näh'; DROP TABLE--"}
    mine = submit(still, jsonl(1), metadata={**team, "more": "1"})

    def ids(query: dict[str, str]) -> list[str]:
        return [batch.id for batch in still.batches.list(extra_query=query)]

    assert ids({"metadata[team]": team["team"]}) == [mine.id]
    assert ids({"metadata[team]": team["team"], "metadata[more]": "2"}) == []
    assert mine.id in ids({"created_after": str(mine.created_at - 1)})
    assert mine.id not in ids({"created_before": str(mine.created_at - 1)})
    until(still, mine.id, "in_progress")
    assert ids({"metadata[team]": team["team"], "status": "in_progress,completed"}) == [mine.id]
    assert ids({"metadata[team]": team["team"], "status": "completed"}) == []
    assert ids({"status": "finalizing"}) == []
    assert stuck.server.ask("GET", "/v1/batches?metadata[a]=%00").status == 400


def test_a_deleted_batch_is_gone_with_its_results(ground: Ground, client: openai.OpenAI) -> None:
    done = until(client, submit(client, jsonl(3)).id, "completed")
    assert done.output_file_id is not None
    answer = ground.server.ask("DELETE", f"/v1/batches/{done.id}")
    assert answer.json == {"id": done.id, "object": "batch", "deleted": True}
    calls: tuple[Callable[[], object], ...] = (
        lambda: client.batches.retrieve(done.id),
        lambda: client.batches.cancel(done.id),
        lambda: client.files.retrieve(str(done.output_file_id)),
        lambda: client.files.content(str(done.output_file_id)),
        lambda: client.delete(f"/batches/{done.id}", cast_to=object),
        lambda: client.get(f"/batches/{done.id}/results", cast_to=object),
        lambda: client.get(f"/batches/{done.id}/attempts", cast_to=object),
        lambda: client.get(f"/batches/{done.id}/events", cast_to=object),
    )
    for call in calls:
        with pytest.raises(openai.NotFoundError) as error:
            call()
        assert error.value.param == "id"


def test_deleting_the_file_of_a_batch_cancels_it(still: openai.OpenAI) -> None:
    batch = until(still, submit(still, jsonl(3)).id, "in_progress")
    assert batch.input_file_id is not None
    still.files.delete(batch.input_file_id)
    after = still.batches.retrieve(batch.id)
    assert after.status == "cancelled"
    assert [after.input_file_id, after.error_file_id] == [None, None]
    assert after.cancelling_at is not None
    with pytest.raises(openai.NotFoundError):
        still.files.retrieve(batch.input_file_id)


def test_somebody_elses_objects_are_like_none_at_all(server_18: str, tmp_path: Path) -> None:
    with open_ground(tmp_path, server_18, settings=("key_cache_s=0",)) as ground:
        ask = ground.server.ask
        admin = ask("POST", "/v1/keys", {"owner": "root", "name": "", "role": "admin"}).json["key"]
        keys = {
            name: ask("POST", "/v1/keys", {"owner": name, "name": "", "role": "user"}, key=admin).json["key"]
            for name in ("ada", "eve")
        }
        with ground.client(keys["ada"]) as ada:
            done = until(ada, submit(ada, jsonl(2)).id, "completed")
        unknown = {"batch": MISSING, "file": "file-" + "0" * 32}
        for method, path, mine in (
            ("GET", "/v1/batches/{}", done.id),
            ("DELETE", "/v1/batches/{}", done.id),
            ("POST", "/v1/batches/{}/cancel", done.id),
            ("POST", "/v1/batches/{}/pause", done.id),
            ("POST", "/v1/batches/{}/resume", done.id),
            ("POST", "/v1/batches/{}/retry", done.id),
            ("GET", "/v1/batches/{}/results", done.id),
            ("GET", "/v1/batches/{}/attempts", done.id),
            ("GET", "/v1/batches/{}/events", done.id),
            ("GET", "/v1/files/{}", done.input_file_id),
            ("GET", "/v1/files/{}/content", done.input_file_id),
            ("DELETE", "/v1/files/{}", done.input_file_id),
            ("GET", "/v1/files/{}", done.output_file_id),
            ("GET", "/v1/files/{}/content", done.output_file_id),
            ("GET", "/v1/files/{}/content?offset=0", done.output_file_id),
        ):
            assert mine is not None
            nobodys = unknown["batch" if mine.startswith("batch") else "file"]
            theirs = ask(method, path.format(mine), key=keys["eve"])
            none = ask(method, path.format(nobodys), key=keys["eve"])
            assert theirs.status == none.status == 404
            assert theirs.content.replace(mine.encode(), b"?") == none.content.replace(nobodys.encode(), b"?")
        assert ask("GET", "/v1/batches", key=keys["eve"]).json["data"] == []
        assert ask("GET", "/v1/files", key=keys["eve"]).json["data"] == []
        body = {"input_file_id": done.input_file_id, "endpoint": ENDPOINT, "completion_window": "24h"}
        assert ask("POST", "/v1/batches", body, key=keys["eve"]).status == 404
        assert ask("GET", f"/v1/batches/{done.id}", key=admin).json["id"] == done.id


def test_erasures_are_reported(ground: Ground, client: openai.OpenAI) -> None:
    done = until(client, submit(client, jsonl(4, prefix="erased")).id, "completed")
    assert done.input_file_id is not None
    client.files.delete(done.input_file_id)

    def report() -> dict[str, Any]:
        listed = ground.server.ask("GET", "/v1/erasures?limit=100").json["data"]
        found: dict[str, Any] = next(entry for entry in listed if entry["object_id"] == done.input_file_id)
        return found

    wait_until(lambda: report()["status"] == "finished", 30)
    erased = report()
    assert (erased["object"], erased["kind"], erased["erased"]["inputs"]) == ("erasure", "file", 4)
    assert erased["finished_at"] >= erased["requested_at"]
    assert ground.server.ask("GET", f"/v1/erasures/{erased['id']}").json == erased
    missing = ground.server.ask("GET", "/v1/erasures/erase_x")
    assert missing.status == 404
    assert missing.json["error"]["message"] == "No such Erasure object: erase_x"
    assert ground.count("SELECT count(*) FROM penstock.templates WHERE custom_id LIKE 'erased%'") == 0
    # What was answered stays.
    assert done.output_file_id is not None
    assert len(custom_ids(client.files.content(done.output_file_id).content)) == 4
    assert ground.server.ask("GET", f"/v1/batches/{done.id}/results").json["data"] == []

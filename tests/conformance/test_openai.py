"""The official OpenAI client, unmodified, sync and async: every method of files, uploads, batches and models."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.conformance.conftest import Driver, Place
from tests.support.thorough import some

ENDPOINT = "/v1/chat/completions"
DEADLINE_S = 60.0


def line(custom_id: str, model: str = "small", url: str = ENDPOINT) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": f"question {custom_id}"}]}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def jsonl(*lines: dict[str, Any]) -> bytes:
    return "".join(json.dumps(entry) + "\n" for entry in lines).encode()


def requests(count: int) -> bytes:
    return jsonl(*(line(f"r{number}") for number in range(count)))


@pytest.fixture(params=some(["sync", "async"], 1))
def openai_driver(request: pytest.FixtureRequest, place: Place) -> Iterator[Driver]:
    make: Callable[..., Any] = openai.OpenAI if request.param == "sync" else openai.AsyncOpenAI
    driver = Driver(make(base_url=f"{place.url}/v1", api_key=place.key, max_retries=0))
    yield driver
    driver.close()


@pytest.fixture
def stranger(place: Place) -> Iterator[Driver]:
    driver = Driver(openai.OpenAI(base_url=f"{place.url}/v1", api_key=place.other_key, max_retries=0))
    yield driver
    driver.close()


def submit(driver: Driver, content: bytes, **options: Any) -> Any:
    file = driver.do("files.create", file=("requests.jsonl", content), purpose="batch")
    options.setdefault("endpoint", ENDPOINT)
    return driver.do("batches.create", input_file_id=file.id, completion_window="24h", **options)


def ended(driver: Driver, batch: Any) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < deadline, batch
        batch = driver.do("batches.retrieve", batch.id)
    return batch


class TestFiles:
    def test_bytes_come_back_as_they_went(self, openai_driver: Driver, tmp_path: Path) -> None:
        content = b"\xef\xbb\xbf" + requests(3).replace(b"\n", b"\r\n") + b"\r\n"
        path = tmp_path / "my requests.jsonl"
        path.write_bytes(content)
        for given, name in (
            (content, "upload"),
            (io.BytesIO(content), "upload"),
            (("named.jsonl", content), "named.jsonl"),
            (path, path.name),
        ):
            file = openai_driver.do("files.create", file=given, purpose="batch")
            assert (file.object, file.bytes, file.purpose, file.filename) == ("file", len(content), "batch", name)
            assert file.id.startswith("file-")
            assert file.status == "processed"
            assert isinstance(file.created_at, int)
            assert file.expires_at - file.created_at == 30 * 86_400
            assert openai_driver.do("files.content", file.id).content == content
            assert openai_driver.do("files.retrieve", file.id) == file

    def test_any_purpose_and_any_bytes(self, openai_driver: Driver) -> None:
        content = bytes(range(256)) * 10
        for purpose in ("assistants", "fine-tune", "vision", "user_data", "evals"):
            file = openai_driver.do("files.create", file=("odd \u00fc.bin", content), purpose=purpose)
            assert (file.purpose, file.bytes) == (purpose, len(content))
            assert openai_driver.do("files.content", file.id).content == content

    def test_expiry(self, openai_driver: Driver) -> None:
        life = {"anchor": "created_at", "seconds": 7200}
        file = openai_driver.do("files.create", file=requests(1), purpose="batch", expires_after=life)
        assert file.expires_at - file.created_at == 7200
        too_short = {"anchor": "created_at", "seconds": 10}
        with pytest.raises(openai.BadRequestError) as refused:
            openai_driver.do("files.create", file=requests(1), purpose="batch", expires_after=too_short)
        assert refused.value.param

    def test_wait_for_processing(self, openai_driver: Driver) -> None:
        file = openai_driver.do("files.create", file=requests(1), purpose="batch")
        assert openai_driver.do("files.wait_for_processing", file.id, poll_interval=0.01).status == "processed"

    def test_lists_to_the_end(self, openai_driver: Driver) -> None:
        made = [openai_driver.do("files.create", file=b"x", purpose="evals").id for _ in range(5)]
        everything = [file.id for file in openai_driver.walk("files.list", limit=2)]
        assert len(set(everything)) == len(everything)
        assert everything[:5] == made[::-1]
        oldest_first = [file.id for file in openai_driver.walk("files.list", limit=3, order="asc", purpose="evals")]
        assert oldest_first[-5:] == made
        page = openai_driver.do("files.list", limit=1, purpose="evals")
        assert (len(page.data), page.has_more, page.object) == (1, True, "list")
        assert (page.first_id, page.last_id) == (page.data[0].id, page.data[0].id)

    def test_delete(self, openai_driver: Driver) -> None:
        file = openai_driver.do("files.create", file=requests(1), purpose="batch")
        gone = openai_driver.do("files.delete", file.id)
        assert (gone.id, gone.object, gone.deleted) == (file.id, "file", True)
        for name in ("files.retrieve", "files.content", "files.delete"):
            with pytest.raises(openai.NotFoundError, match=f"No such File object: {file.id}") as missing:
                openai_driver.do(name, file.id)
            error = missing.value
            assert (error.type, error.param, error.code) == ("invalid_request_error", "id", None)
            assert error.request_id

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_the_old_name_of_content(self, openai_driver: Driver) -> None:
        content = requests(1)
        file = openai_driver.do("files.create", file=content, purpose="batch")
        assert openai_driver.do("files.retrieve_content", file.id) == content.decode()

    def test_refusals(self, openai_driver: Driver) -> None:
        with pytest.raises(openai.BadRequestError) as wrong:
            openai_driver.do("files.create", file=b"x", purpose="nonsense")
        assert (wrong.value.param, wrong.value.type) == ("purpose", "invalid_request_error")
        for query in ({"limit": 0}, {"limit": 10_001}, {"order": "sideways"}, {"after": "nonsense"}):
            with pytest.raises(openai.BadRequestError) as bad:
                openai_driver.walk("files.list", **query)
            assert bad.value.param == next(iter(query))


class TestUploads:
    def test_parts_in_any_order(self, openai_driver: Driver) -> None:
        first, second = requests(3)[:40], requests(3)[40:]
        upload = openai_driver.do(
            "uploads.create",
            bytes=len(first) + len(second),
            filename="parts.jsonl",
            mime_type="application/jsonl",
            purpose="batch",
        )
        assert (upload.status, upload.object, upload.file) == ("pending", "upload", None)
        later = openai_driver.do("uploads.parts.create", upload.id, data=second)
        earlier = openai_driver.do("uploads.parts.create", upload.id, data=first)
        assert (later.object, later.upload_id) == ("upload.part", upload.id)
        done = openai_driver.do("uploads.complete", upload.id, part_ids=[earlier.id, later.id])
        assert (done.status, done.file.filename, done.file.bytes) == ("completed", "parts.jsonl", upload.bytes)
        assert openai_driver.do("files.content", done.file.id).content == first + second
        batch = openai_driver.do(
            "batches.create", input_file_id=done.file.id, endpoint=ENDPOINT, completion_window="24h"
        )
        assert ended(openai_driver, batch).request_counts.completed == 3

    def test_chunked_from_a_file(self, openai_driver: Driver, tmp_path: Path) -> None:
        path = tmp_path / "large.jsonl"
        path.write_bytes(requests(200))
        upload = openai_driver.do(
            "uploads.upload_file_chunked", file=path, mime_type="application/jsonl", purpose="batch", part_size=5_000
        )
        assert upload.status == "completed"
        assert openai_driver.do("files.content", upload.file.id).content == path.read_bytes()

    def test_cancel(self, openai_driver: Driver) -> None:
        upload = openai_driver.do("uploads.create", bytes=5, filename="x", mime_type="text/plain", purpose="user_data")
        assert openai_driver.do("uploads.cancel", upload.id).status == "cancelled"
        with pytest.raises(openai.APIStatusError) as late:
            openai_driver.do("uploads.parts.create", upload.id, data=b"12345")
        assert 400 <= late.value.status_code < 500

    def test_refusals(self, openai_driver: Driver) -> None:
        upload = openai_driver.do("uploads.create", bytes=5, filename="x", mime_type="text/plain", purpose="user_data")
        part = openai_driver.do("uploads.parts.create", upload.id, data=b"123")
        for parts, digest in (([part.id], None), ([], None), (["part_nonsense"], None), ([part.id], "0" * 32)):
            options = {} if digest is None else {"md5": digest}
            with pytest.raises((openai.BadRequestError, openai.NotFoundError)):
                openai_driver.do("uploads.complete", upload.id, part_ids=parts, **options)
        with pytest.raises(openai.NotFoundError, match="No such Upload object"):
            openai_driver.do("uploads.cancel", "upload_nonsense")


class TestBatches:
    def test_from_file_to_answers(self, openai_driver: Driver) -> None:
        batch = submit(openai_driver, requests(20), metadata={"team": "blue"})
        assert batch.id.startswith("batch_")
        assert (batch.object, batch.status, batch.endpoint) == ("batch", "validating", ENDPOINT)
        assert batch.metadata == {"team": "blue"}
        assert batch.expires_at - batch.created_at == 86_400
        assert (batch.request_counts.total, batch.errors, batch.output_file_id) == (0, None, None)
        # Clients older than `usage` keep it as it came.
        assert batch.to_dict()["usage"]["total_tokens"] == 0
        done = ended(openai_driver, batch)
        assert done.status == "completed"
        counts = done.request_counts
        assert (counts.total, counts.completed, counts.failed) == (20, 20, 0)
        assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
        assert (done.error_file_id, done.failed_at, done.expired_at, done.cancelled_at) == (None, None, None, None)
        usage = done.to_dict()["usage"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 0

        lines = openai_driver.streamed_lines("files.content", done.output_file_id)
        answers = [json.loads(text) for text in lines]
        assert [answer["custom_id"] for answer in answers] == [f"r{number}" for number in range(20)]
        for answer in answers:
            assert answer["error"] is None
            assert answer["response"]["status_code"] == 200
            assert answer["response"]["body"]["object"] == "chat.completion"
        file = openai_driver.do("files.retrieve", done.output_file_id)
        whole = openai_driver.do("files.content", done.output_file_id).content
        assert (file.purpose, file.bytes) == ("batch_output", len(whole))

    def test_bad_lines_fail_the_batch_with_their_numbers(self, openai_driver: Driver) -> None:
        content = requests(2) + b"not json\n" + jsonl(line("r0"), {"custom_id": "x", "url": ENDPOINT, "body": {}})
        failed = ended(openai_driver, submit(openai_driver, content))
        assert failed.status == "failed"
        assert failed.failed_at
        found = {(error.code, error.line) for error in failed.errors.data}
        assert found == {
            ("invalid_json_line", 3),
            ("duplicate_custom_id", 4),
            ("missing_required_parameter", 5),
        }
        assert all(error.message for error in failed.errors.data)
        assert failed.request_counts.total == 0

    def test_a_url_that_is_not_the_endpoint(self, openai_driver: Driver) -> None:
        content = requests(1) + jsonl(line("other", url="/v1/embeddings"))
        failed = ended(openai_driver, submit(openai_driver, content))
        assert [(error.code, error.line) for error in failed.errors.data] == [("url_mismatch", 2)]

    def test_an_empty_file(self, openai_driver: Driver) -> None:
        failed = ended(openai_driver, submit(openai_driver, b"\n"))
        assert [error.code for error in failed.errors.data] == ["empty_file"]

    def test_everything_failed_is_completed_with_errors_alone(self, openai_driver: Driver) -> None:
        lines = [line(f"r{number}") for number in range(3)]
        for entry in lines:
            entry["body"]["messages"] = "not a list"
        done = ended(openai_driver, submit(openai_driver, jsonl(*lines)))
        assert (done.status, done.output_file_id) == ("completed", None)
        assert (done.request_counts.completed, done.request_counts.failed) == (0, 3)
        answers = [json.loads(text) for text in openai_driver.streamed_lines("files.content", done.error_file_id)]
        assert {answer["response"]["status_code"] for answer in answers} == {400}
        for answer in answers:
            assert answer["error"] is None
            assert set(answer["response"]["body"]["error"]) == {"message", "type", "param", "code"}

    def test_cancel(self, openai_driver: Driver) -> None:
        batch = submit(openai_driver, requests(20_000))
        cancelled = openai_driver.do("batches.cancel", batch.id)
        assert cancelled.status in ("cancelling", "cancelled")
        assert cancelled.cancelling_at
        done = ended(openai_driver, cancelled)
        assert done.status == "cancelled"
        counts = done.request_counts
        assert counts.completed + counts.failed == counts.total
        errors = openai_driver.do("files.content", done.error_file_id).content.splitlines()
        assert len(errors) == counts.failed
        assert json.loads(errors[-1])["error"]["code"] == "batch_cancelled"
        with pytest.raises(openai.ConflictError, match=r"Cannot cancel a batch with status 'cancelled'\.") as late:
            openai_driver.do("batches.cancel", batch.id)
        assert late.value.response.headers["x-should-retry"] == "false"
        assert (late.value.type, late.value.param, late.value.code) == ("invalid_request_error", None, None)

    def test_lists_to_the_end(self, openai_driver: Driver) -> None:
        file = openai_driver.do("files.create", file=requests(1), purpose="batch")
        made = [
            openai_driver.do("batches.create", input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h").id
            for _ in range(5)
        ]
        seen = [batch.id for batch in openai_driver.walk("batches.list", limit=2)]
        assert seen[:5] == made[::-1]
        assert len(set(seen)) == len(seen)
        page = openai_driver.do("batches.list", limit=1)
        assert (page.object, page.has_more, page.first_id, page.last_id) == ("list", True, made[-1], made[-1])

    def test_an_idempotency_key_makes_one(self, openai_driver: Driver) -> None:
        file = openai_driver.do("files.create", file=requests(1), purpose="batch")
        options: dict[str, Any] = {
            "input_file_id": file.id,
            "endpoint": ENDPOINT,
            "completion_window": "24h",
            "extra_headers": {"Idempotency-Key": f"once-{file.id}"},
        }
        first = openai_driver.do("batches.create", **options)
        assert openai_driver.do("batches.create", **options).id == first.id
        with pytest.raises(openai.ConflictError) as other:
            openai_driver.do("batches.create", **{**options, "metadata": {"another": "request"}})
        assert other.value.response.headers["x-should-retry"] == "false"

    def test_windows(self, openai_driver: Driver) -> None:
        file = openai_driver.do("files.create", file=requests(1), purpose="batch")
        for window, seconds in (("1h", 3_600), ("30m", 1_800), ("7d", 604_800)):
            batch = openai_driver.do(
                "batches.create", input_file_id=file.id, endpoint=ENDPOINT, completion_window=window
            )
            assert (batch.expires_at - batch.created_at, batch.completion_window) == (seconds, window)

    @pytest.mark.parametrize(
        ("change", "param"),
        [
            ({"endpoint": "/v1/nonsense"}, "endpoint"),
            ({"completion_window": "soon"}, "completion_window"),
            ({"completion_window": "0h"}, "completion_window"),
            ({"metadata": {"k" * 65: "v"}}, "metadata"),
            ({"metadata": {"k": "v" * 513}}, "metadata"),
            ({"metadata": {str(n): "v" for n in range(17)}}, "metadata"),
        ],
    )
    def test_refusals(self, openai_driver: Driver, change: dict[str, Any], param: str) -> None:
        file = openai_driver.do("files.create", file=requests(1), purpose="batch")
        wanted = {"input_file_id": file.id, "endpoint": ENDPOINT, "completion_window": "24h", **change}
        with pytest.raises(openai.BadRequestError) as refused:
            openai_driver.do("batches.create", **wanted)
        assert (refused.value.param or "").startswith(param)
        assert refused.value.type == "invalid_request_error"

    def test_unknown_and_wrong_files(self, openai_driver: Driver) -> None:
        wrong = openai_driver.do("files.create", file=b"x", purpose="user_data")
        for file_id in ("file-nonsense", wrong.id):
            with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as refused:
                openai_driver.do("batches.create", input_file_id=file_id, endpoint=ENDPOINT, completion_window="24h")
            assert refused.value.param == "input_file_id"
        with pytest.raises(openai.NotFoundError, match="No such Batch object"):
            openai_driver.do("batches.retrieve", "batch_nonsense")

    @pytest.mark.parametrize(
        ("endpoint", "body"),
        [
            ("/v1/completions", {"model": "small", "prompt": "Once"}),
            ("/v1/embeddings", {"model": "small", "input": "words"}),
            ("/v1/responses", {"model": "small", "input": "Hello"}),
            ("/v1/moderations", {"model": "small", "input": "Hello"}),
        ],
    )
    def test_every_endpoint(self, openai_driver: Driver, endpoint: str, body: dict[str, Any]) -> None:
        entry = {"custom_id": "one", "method": "POST", "url": endpoint, "body": body}
        done = ended(openai_driver, submit(openai_driver, jsonl(entry), endpoint=endpoint))
        assert (done.status, done.request_counts.completed) == ("completed", 1)


class TestStrangers:
    def test_another_owner_sees_nothing(self, openai_driver: Driver, stranger: Driver) -> None:
        batch = ended(openai_driver, submit(openai_driver, requests(1)))
        attempts = (
            ("files.retrieve", batch.input_file_id),
            ("files.content", batch.output_file_id),
            ("files.delete", batch.input_file_id),
            ("batches.retrieve", batch.id),
            ("batches.cancel", batch.id),
        )
        for name, wanted in attempts:
            with pytest.raises(openai.NotFoundError):
                stranger.do(name, wanted)
        assert batch.id not in {entry.id for entry in stranger.walk("batches.list")}
        assert batch.input_file_id not in {entry.id for entry in stranger.walk("files.list")}

    def test_a_wrong_key(self, place: Place) -> None:
        driver = Driver(openai.OpenAI(base_url=f"{place.url}/v1", api_key="sk-wrong", max_retries=0))
        with pytest.raises(openai.AuthenticationError) as refused:
            driver.do("batches.list")
        assert refused.value.request_id
        driver.close()

    def test_a_refused_upload_is_told_so(self, place: Place) -> None:
        """The client reads no answer before it has sent its whole body."""
        driver = Driver(openai.OpenAI(base_url=f"{place.url}/v1", api_key="sk-wrong", max_retries=0))
        with pytest.raises(openai.AuthenticationError):
            driver.do("files.create", file=bytes(20_000_000), purpose="user_data")
        driver.close()


class TestModels:
    def test_list_and_retrieve(self, openai_driver: Driver) -> None:
        assert isinstance(openai_driver.walk("models.list"), list)
        assert openai_driver.do("models.retrieve", "small").id == "small"

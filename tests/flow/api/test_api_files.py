"""Files and uploads in parts, through the official client and through clients that write their forms otherwise."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import openai
import pytest

from tests.support.batch_api import ENDPOINT, Ground, jsonl, open_ground, until
from tests.support.server import Answered
from tests.support.wait import wait_until

MISSING = "file-" + "0" * 32
FORM = {"content-type": "multipart/form-data; boundary=frontier"}
DAY_S = 86_400


@pytest.fixture(scope="module")
def ground(server_18: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    with open_ground(tmp_path_factory.mktemp("files"), server_18, settings=("max_upload_bytes=8000000",)) as opened:
        yield opened


@pytest.fixture
def client(ground: Ground) -> Iterator[openai.OpenAI]:
    with ground.client() as made:
        yield made


def form(*parts: tuple[str, bytes], whole: bool = True) -> bytes:
    body = b"".join(
        b"--frontier\r\nContent-Disposition: form-data; " + head.encode() + b"\r\n\r\n" + value + b"\r\n"
        for head, value in parts
    )
    return body + (b"--frontier--\r\n" if whole else b"")


def refused(answer: Answered, status: int) -> dict[str, Any]:
    assert answer.status == status, answer.content
    error: dict[str, Any] = answer.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_a_file_from_upload_to_deletion(client: openai.OpenAI) -> None:
    content = jsonl(10)
    file = client.files.create(file=("requests.jsonl", content), purpose="batch")
    assert (file.object, file.bytes, file.filename, file.purpose) == ("file", len(content), "requests.jsonl", "batch")
    assert file.status == "processed"
    assert file.expires_at == file.created_at + 30 * DAY_S
    assert client.files.retrieve(file.id) == file
    assert file.id in [listed.id for listed in client.files.list(purpose="batch")]
    assert client.files.content(file.id).content == content
    assert client.files.wait_for_processing(file.id).status == "processed"
    deleted = client.files.delete(file.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (file.id, True, "file")
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError) as error:
            call(file.id)
        assert error.value.body == {
            "message": f"No such File object: {file.id}",
            "type": "invalid_request_error",
            "param": "id",
            "code": None,
        }
        assert error.value.request_id
    assert file.id not in [listed.id for listed in client.files.list()]


def test_every_way_of_giving_the_client_a_file(client: openai.OpenAI, tmp_path: Path) -> None:
    content = jsonl(2)
    path = tmp_path / "from disk.jsonl"
    path.write_bytes(content)
    for given, name in (
        (content, "upload"),
        (io.BytesIO(content), "upload"),
        (path, "from disk.jsonl"),
        (("named.jsonl", content, "application/jsonl"), "named.jsonl"),
    ):
        file = client.files.create(file=given, purpose="batch")
        assert file.filename == name
        assert client.files.content(file.id).content == content


def test_a_client_that_reads_line_by_line_gets_every_line(client: openai.OpenAI) -> None:
    content = jsonl(300)
    file = client.files.create(file=content, purpose="batch")
    with client.files.with_streaming_response.content(file.id) as response:
        assert [json.loads(line)["custom_id"] for line in response.iter_lines()] == [f"r{n}" for n in range(300)]
        assert response.headers["content-length"] == str(len(content))


async def _asynchronous(ground: Ground) -> None:
    async with openai.AsyncOpenAI(base_url=ground.server.base_url, api_key="none", max_retries=0) as client:
        file = await client.files.create(file=jsonl(3), purpose="batch")
        assert (await client.files.content(file.id)).content == jsonl(3)
        assert file.id in [listed.id async for listed in client.files.list(limit=2)]
        await client.files.delete(file.id)


def test_the_asynchronous_client_does_the_same(ground: Ground) -> None:
    asyncio.run(_asynchronous(ground))


def test_a_form_may_have_its_fields_after_the_file(ground: Ground) -> None:
    content = jsonl(5)
    body = form(
        ('name="file"; filename="later.jsonl"', content),
        ('name="expires_after[anchor]"', b"created_at"),
        ('name="expires_after[seconds]"', b"3600"),
        ('name="purpose"', b"batch"),
    )
    file = ground.server.ask("POST", "/v1/files", body, headers=FORM).json
    assert (file["filename"], file["bytes"]) == ("later.jsonl", len(content))
    assert file["expires_at"] == file["created_at"] + 3600
    # What was read before its purpose was known can be run like any other.
    with ground.client() as client:
        batch = client.batches.create(input_file_id=file["id"], endpoint=ENDPOINT, completion_window="24h")
        assert until(client, batch.id, "completed").request_counts.completed == 5  # type: ignore[union-attr]


def test_other_purposes_keep_the_bytes_and_do_not_expire(client: openai.OpenAI) -> None:
    content = bytes(range(256)) * 9
    file = client.files.create(file=("cat.png", content), purpose="vision")
    assert file.expires_at is None
    assert client.files.content(file.id).content == content
    short = client.files.create(
        file=("note.txt", b"x"), purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert short.expires_at == short.created_at + 3600


FILE = ('name="file"; filename="a.jsonl"', b"{}")
PURPOSE = ('name="purpose"', b"batch")


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (form(FILE), 400, "purpose"),
        (form(PURPOSE), 400, "file"),
        (form(FILE, ('name="purpose"', b"evil")), 400, "purpose"),
        (form(('name="purpose"', b"evil"), FILE), 400, "purpose"),
        (form(PURPOSE, FILE, ('name="owner"', b"root")), 422, "owner"),
        (form(PURPOSE, FILE, FILE), 400, "file"),
        (form(PURPOSE, PURPOSE, FILE), 400, "purpose"),
        (form(PURPOSE, FILE, ('name="expires_after[seconds]"', b"3600")), 400, "expires_after.anchor"),
        (
            form(
                PURPOSE,
                FILE,
                ('name="expires_after[anchor]"', b"created_at"),
                ('name="expires_after[seconds]"', b"60"),
            ),
            400,
            "expires_after.seconds",
        ),
        (form(PURPOSE, FILE, whole=False), 400, None),
        (form(PURPOSE, ("filename=nameless", b"")), 400, None),
        (form(('name="purpose"', b"b" * 20_000), FILE), 400, "purpose"),
        (form(('name="purpose"', b"\xff\xfe"), FILE), 400, "purpose"),
        (form((f'name="file"; filename="{"a" * 9000}"', b"{}"), PURPOSE), 400, None),
        (form(*[('name="purpose"', b"batch")] * 40), 400, "purpose"),
        (b"no form at all", 400, None),
        (b"", 400, None),
    ],
)
def test_a_bad_form_is_refused_and_leaves_nothing(ground: Ground, body: bytes, status: int, param: str | None) -> None:
    before = ground.count("SELECT count(*) FROM penstock.files WHERE deleted_at IS NULL AND state <> 'failed'")
    error = refused(ground.server.ask("POST", "/v1/files", body, headers=FORM), status)
    assert error["param"] == param
    assert ground.count("SELECT count(*) FROM penstock.files WHERE deleted_at IS NULL AND state <> 'failed'") == before


def test_a_body_that_is_no_form_is_refused(ground: Ground) -> None:
    for headers in ({}, {"content-type": "application/json"}, {"content-type": "multipart/form-data"}):
        refused(ground.server.ask("POST", "/v1/files", form(PURPOSE, FILE), headers=headers), 400)


def test_a_file_can_be_the_whole_body(ground: Ground) -> None:
    content = jsonl(4)
    ask = ground.server.ask
    file = ask("PUT", "/v1/files?purpose=batch&filename=put.jsonl&expires_after_seconds=7200", content).json
    assert (file["filename"], file["bytes"], file["purpose"]) == ("put.jsonl", len(content), "batch")
    assert file["expires_at"] == file["created_at"] + 7200
    assert ask("GET", f"/v1/files/{file['id']}/content").content == content
    assert refused(ask("PUT", "/v1/files?filename=x", content), 400)["param"] == "purpose"
    assert refused(ask("PUT", "/v1/files?purpose=evil", content), 400)["param"] == "purpose"
    gzipped = {"content-encoding": "gzip"}
    refused(ask("PUT", "/v1/files?purpose=batch", content, headers=gzipped), 415)


def test_a_file_that_is_too_large_is_refused_before_and_while_it_comes(ground: Ground) -> None:
    body = form(PURPOSE, ('name="file"; filename="big"', b"x" * 8_000_001))
    assert refused(ground.server.ask("POST", "/v1/files", body, headers=FORM), 413)["code"] == "file_too_large"
    told = {"content-length": str(10**12)}
    with socket.create_connection(("127.0.0.1", ground.server.port), timeout=30) as connection:
        head = f"PUT /v1/files?purpose=batch HTTP/1.1\r\nHost: 127.0.0.1:{ground.server.port}\r\n"
        connection.sendall((head + "".join(f"{k}: {v}\r\n" for k, v in told.items()) + "\r\n").encode())
        assert connection.recv(65_536).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("cut", ["in the head of the file", "in the file", "before the last boundary"])
def test_a_client_that_leaves_leaves_nothing(ground: Ground, cut: str) -> None:
    content = jsonl(20_000, prefix="cut")
    whole = form(PURPOSE, ('name="file"; filename="cut.jsonl"', content))
    at = {"in the head of the file": 120, "in the file": len(whole) // 2, "before the last boundary": len(whole) - 8}
    told = "POST /v1/files "
    before = ground.server.log.count(told)
    with socket.create_connection(("127.0.0.1", ground.server.port), timeout=30) as connection:
        head = (
            f"POST /v1/files HTTP/1.1\r\nHost: 127.0.0.1:{ground.server.port}\r\n"
            f"Content-Type: {FORM['content-type']}\r\nContent-Length: {len(whole)}\r\n\r\n"
        )
        connection.sendall(head.encode() + whole[: at[cut]])
    wait_until(lambda: ground.server.log.count(told) > before, 30)
    nothing = (
        "SELECT (SELECT count(*) FROM penstock.files WHERE filename = 'cut.jsonl' AND state <> 'failed')"
        " + (SELECT count(*) FROM penstock.templates WHERE custom_id LIKE 'cut%')"
    )
    wait_until(lambda: ground.count(nothing) == 0, 30)


def test_an_idempotency_key_makes_one_file(ground: Ground, client: openai.OpenAI) -> None:
    content = jsonl(3)
    headers = {"Idempotency-Key": "once"}
    first = client.files.create(file=content, purpose="batch", extra_headers=headers)
    again = client.files.create(file=content, purpose="batch", extra_headers=headers)
    assert again == first
    with pytest.raises(openai.ConflictError) as error:
        client.files.create(file=content + b"\n", purpose="batch", extra_headers=headers)
    assert error.value.response.headers["x-should-retry"] == "false"
    assert error.value.code == "idempotency_conflict"
    for bad in ("", "x" * 256, "späti"):
        headers = {"idempotency-key": bad.encode().decode("latin-1")}
        refused(ground.server.ask("PUT", "/v1/files?purpose=batch", content, headers=headers), 400)


def test_lists_are_walked_to_the_end_while_files_come_and_go(ground: Ground, client: openai.OpenAI) -> None:
    made = [client.files.create(file=(f"walk-{n}", b"x"), purpose="evals").id for n in range(7)]
    seen = []
    for number, file in enumerate(client.files.list(purpose="evals", limit=2)):
        seen.append(file.id)
        client.files.delete(file.id)
        client.files.create(file=("new", b"x"), purpose="evals")
        assert number < 50
    assert seen == made[::-1]
    ascending = [file.id for file in client.files.list(order="asc", limit=3, purpose="evals")]
    assert ascending == sorted(ascending)
    page = ground.server.ask("GET", "/v1/files?limit=2&purpose=evals").json
    assert (page["object"], page["has_more"]) == ("list", True)
    assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
    empty = ground.server.ask("GET", "/v1/files?purpose=nothing").json
    assert empty == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    for query in ("limit=0", "limit=10001", "limit=x", "order=up", "after=nonsense"):
        assert refused(ground.server.ask("GET", f"/v1/files?{query}"), 400)["param"] == query.split("=")[0]


def test_a_download_cannot_be_taken_for_a_page(ground: Ground) -> None:
    name = '../../<script>"; x=.html\r\nEvil: 1'
    file = ground.server.ask("PUT", f"/v1/files?purpose=user_data&filename={quote(name, safe='')}", b"<script>").json
    assert "/" not in file["filename"]
    assert file["filename"].isprintable()
    answer = ground.server.ask("GET", f"/v1/files/{file['id']}/content")
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-disposition"].startswith("attachment; filename=")
    assert "<" not in answer.headers["content-disposition"]
    assert "evil" not in answer.headers


def test_an_offset_is_for_results_only(ground: Ground, client: openai.OpenAI) -> None:
    file = client.files.create(file=b"x", purpose="user_data")
    assert refused(ground.server.ask("GET", f"/v1/files/{file.id}/content?offset=1"), 400)["param"] == "offset"
    refused(ground.server.ask("GET", f"/v1/files/{MISSING}/content?offset=-1"), 400)


# -- uploads in parts


def test_an_upload_in_parts(client: openai.OpenAI) -> None:
    content = jsonl(3_000)
    upload = client.uploads.upload_file_chunked(
        file=content,
        filename="parts.jsonl",
        bytes=len(content),
        mime_type="application/jsonl",
        purpose="batch",
        part_size=100_000,
        md5=hashlib.md5(content).hexdigest(),
    )
    assert (upload.status, upload.bytes, upload.object) == ("completed", len(content), "upload")
    assert upload.file is not None
    assert (upload.file.filename, upload.file.purpose) == ("parts.jsonl", "batch")
    assert upload.file.expires_at == upload.file.created_at + 30 * DAY_S
    assert client.files.content(upload.file.id).content == content
    batch = client.batches.create(input_file_id=upload.file.id, endpoint=ENDPOINT, completion_window="24h")
    assert until(client, batch.id, "completed").request_counts.completed == 3_000  # type: ignore[union-attr]


def begin(client: openai.OpenAI, size: int, filename: str = "p.jsonl") -> str:
    upload = client.uploads.create(bytes=size, filename=filename, mime_type="text/plain", purpose="user_data")
    assert upload.status == "pending"
    assert upload.expires_at == upload.created_at + 3600
    assert upload.file is None
    return upload.id


def test_parts_are_put_together_in_the_order_asked_for(client: openai.OpenAI) -> None:
    upload_id = begin(client, 9)
    parts = [client.uploads.parts.create(upload_id, data=data) for data in (b"ccc", b"aaa", b"unused", b"bbb")]
    assert all((part.object, part.upload_id) == ("upload.part", upload_id) for part in parts)
    done = client.uploads.complete(upload_id, part_ids=[parts[n].id for n in (1, 3, 0)])
    assert done.file is not None
    assert client.files.content(done.file.id).content == b"aaabbbccc"
    assert client.uploads.complete(upload_id, part_ids=[parts[0].id]) == done
    for call in (
        lambda: client.uploads.parts.create(upload_id, data=b"late"),
        lambda: client.uploads.cancel(upload_id),
    ):
        with pytest.raises(openai.ConflictError) as error:
            call()
        assert error.value.response.headers["x-should-retry"] == "false"


def test_an_upload_that_does_not_add_up_is_refused_and_can_be_mended(client: openai.OpenAI) -> None:
    upload_id = begin(client, 6)
    first = client.uploads.parts.create(upload_id, data=b"abc")
    for ids in ([first.id], [first.id, first.id], [first.id, "part_" + "0" * 32], ["part_x"]):
        with pytest.raises(openai.BadRequestError) as error:
            client.uploads.complete(upload_id, part_ids=ids)
        assert error.value.param == "part_ids"
    second = client.uploads.parts.create(upload_id, data=b"def")
    with pytest.raises(openai.BadRequestError) as error:
        client.uploads.complete(upload_id, part_ids=[first.id, second.id], md5="0" * 32)
    assert error.value.param == "md5"
    good = hashlib.md5(b"abcdef").hexdigest()
    assert client.uploads.complete(upload_id, part_ids=[first.id, second.id], md5=good).status == "completed"


def test_an_error_about_a_file_that_is_named_like_a_parameter_names_no_parameter(client: openai.OpenAI) -> None:
    upload_id = begin(client, 1, "md5")
    for _ in range(3):
        client.uploads.parts.create(upload_id, data=b"a")
    with pytest.raises(openai.BadRequestError, match="md5: the 3 parts there are hold more than enough") as error:
        client.uploads.parts.create(upload_id, data=b"a")
    assert error.value.param is None


def test_a_cancelled_upload_takes_nothing_more(client: openai.OpenAI) -> None:
    upload_id = begin(client, 6)
    part = client.uploads.parts.create(upload_id, data=b"abc")
    assert client.uploads.cancel(upload_id).status == "cancelled"
    assert client.uploads.cancel(upload_id).status == "cancelled"
    with pytest.raises(openai.ConflictError):
        client.uploads.parts.create(upload_id, data=b"def")
    with pytest.raises(openai.ConflictError):
        client.uploads.complete(upload_id, part_ids=[part.id])
    for call in (
        lambda: client.uploads.cancel("upload_" + "0" * 32),
        lambda: client.uploads.complete("upload_x", part_ids=["part_x"]),
        lambda: client.uploads.parts.create("upload_x", data=b"x"),
    ):
        with pytest.raises(openai.NotFoundError) as error:
            call()
        assert error.value.message.find("No such Upload object") > 0

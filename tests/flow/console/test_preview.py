"""A job before it is made: first rows, first request, what stands in the way; and a trial over the first rows."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from typing import Any

import openpyxl
import pytest

from tests.support.images import png
from tests.support.jobs import CONFIG, items_of, jobs_server, post_job, start_job, table, until_state
from tests.support.server import Answered, ServerProcess
from tests.support.tenants import form

PROVIDER = '[[providers]]\nname = "away"\nbase_url = "http://127.0.0.1:9/v1"\nmodels = ["m"]\n'
CHAT = {"type": "chat", "provider": "away", "model": "m", "prompt": "Sell {{ product_title }}"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, shared_database_18: str) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("preview")
    with jobs_server(directory, database=shared_database_18, config_text=CONFIG + PROVIDER) as running:
        yield running


def preview(
    server: ServerProcess, content: bytes, spec: Any = None, filename: str = "a.csv", **fields: str
) -> Answered:
    sent: dict[str, Any] = {**fields, "file": content}
    if spec is not None:
        sent["spec"] = json.dumps(spec)
    body, kind = form(sent, filename)
    return server.ask("POST", "/api/jobs/preview", body, headers={"content-type": kind})


def shown(server: ServerProcess, *args: Any, **fields: Any) -> Any:
    answer = preview(server, *args, **fields)
    assert answer.status == 200, answer.content
    return answer.json


def test_the_first_rows_and_the_first_request(server: ServerProcess) -> None:
    found = shown(server, table(40), {"processor": CHAT})
    assert [(column["name"], column["type"]) for column in found["columns"]] == [
        ("sku", "integer"),
        ("product_title", "text"),
        ("note", "text"),
    ]
    assert len(found["rows"]) == 10
    assert found["rows"][1] == {"sku": 2, "product_title": "Chair 2", "note": None}
    assert found["problems"] == []
    assert found["request"]["path"] == "/v1/chat/completions"
    assert found["request"]["body"]["messages"][0]["content"] == "Sell Chair 1"


def test_columns_as_the_spec_has_them(server: ServerProcess) -> None:
    columns = {"rename": {"SKU": "number"}, "keep": ["number"], "types": {"number": "text"}}
    found = shown(server, table(3), {"columns": columns})
    assert found["columns"] == [{"name": "number", "type": "text"}]
    assert found["rows"] == [{"number": "1"}, {"number": "2"}, {"number": "3"}]
    assert (found["request"], found["problems"]) == (None, [])
    assert shown(server, table(3), {"processor": "price"})["problems"] == []


def test_a_file_that_was_cut(server: ServerProcess) -> None:
    whole = table(1_000)
    assert len(shown(server, whole[:4_001], cut="true")["rows"]) == 10
    few = shown(server, whole[:60], cut="true")
    assert (len(few["rows"]), few["problems"]) == (2, [])
    quoted = b'a;b\n1;2\n3;"begins\nand goes on'
    assert (shown(server, quoted, cut="true")["rows"], shown(server, quoted, cut="true")["problems"]) == (
        [{"a": 1, "b": 2}],
        [],
    )
    packed = gzip.compress(b"a\n" + b"".join(b"%d\n" % n for n in range(100_000)))
    assert len(shown(server, packed[:100_000], filename="a.csv.gz", cut="true")["rows"]) == 10


def test_what_stands_in_the_way(server: ServerProcess) -> None:
    cases = (
        ((b"\x00\x01\x02", None, "a.csv"), "file"),
        ((b"%PDF-1.4", None, "a.pdf"), "file"),
        ((b"", None, "a.csv"), "file"),
        ((table(3), {"columns": {"keep": ["none"]}}), "file"),
        ((table(3), {"processor": "nobody"}), "processor"),
        ((table(3), {"processor": {**CHAT, "provider": "nobody"}}), "processor"),
        ((table(3), {"processor": {**CHAT, "prompt": "{{ nothing }}"}}), "processor"),
        ((table(3), {"processor": {**CHAT, "prompt": "{{"}}), "processor"),
    )
    for case, where in cases:
        found = shown(server, *case)
        assert [problem["where"] for problem in found["problems"]] == [where], case
        assert found["problems"][0]["message"]
    for bad in ("nonsense", {"columns": {"unknown": 1}}, {"processor": "price", "other": 1}):
        assert preview(server, table(3), bad).status == 400


def test_workbooks_and_images(server: ServerProcess) -> None:
    book = openpyxl.Workbook()
    for name, cells in (("First", ["a", 1]), ("Second", ["b", "x"])):
        sheet = book.create_sheet(name)
        for cell in cells:
            sheet.append([cell])
    del book["Sheet"]
    content = io.BytesIO()
    book.save(content)
    found = shown(server, content.getvalue(), {"columns": {"sheet": "Second"}}, "a.xlsx")
    assert (found["sheets"], found["rows"]) == (["First", "Second"], [{"b": "x"}])
    picture = shown(server, png(3, 2), {"processor": {**CHAT, "prompt": "What is {{ path }}?"}}, "a.png")
    assert picture["images"] is True
    assert picture["rows"][0]["width"] == 3
    assert picture["problems"] == []


def test_a_trial_takes_the_first_rows_alone(server: ServerProcess) -> None:
    name = start_job(server, table(40), {"processor": "price", "limit": 7})
    done = until_state(server, name, "DONE")
    assert done["total"] == 7
    assert [item["input"]["sku"] for item in items_of(server, name)] == list(range(1, 8))
    whole = start_job(server, table(5), {"processor": "price", "limit": 10})
    assert until_state(server, whole, "DONE")["total"] == 5
    for bad in (0, -1, 2**31, "7"):
        assert post_job(server, table(5), {"processor": "price", "limit": bad}).status == 400

"""The console as a browser gets it: whole, from this origin alone, and nothing in place of what is missing."""

from __future__ import annotations

import gzip
import hashlib
import re
from base64 import b64encode
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

from penstock.console.files import ROOT
from tests.support.server import Answered, ServerProcess, served

UPSTREAM = ("--base-url", "http://127.0.0.1:9/v1")
PREFIX = "/deep/penstock"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, shared_database_18: str) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("serving")
    options = (*UPSTREAM, "--root-path", PREFIX, "--forwarded-prefix")
    with served(directory, *options, database=shared_database_18, workers=0) as running:
        yield running


def get(server: ServerProcess, path: str, method: str = "GET", **headers: str) -> Answered:
    """One request that follows no redirect, and asks for the path as it is."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        with connection.getresponse() as answer:
            return Answered(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("path", "target"),
    [
        (f"{PREFIX}/", "console/"),
        (PREFIX, f"{PREFIX}/console/"),
        (f"{PREFIX}/console", "console/"),
        ("/", "console/"),  # a proxy took the prefix off
        ("/console", "console/"),
    ],
)
def test_a_browser_is_sent_to_the_console(server: ServerProcess, path: str, target: str) -> None:
    answer = get(server, path, accept="text/html,application/xhtml+xml,*/*;q=0.8")
    assert (answer.status, answer.headers["location"]) == (307, target)


def test_a_program_at_the_root_gets_what_it_got(server: ServerProcess) -> None:
    for accept in ("application/json", "*/*"):
        answer = get(server, f"{PREFIX}/", accept=accept)
        assert (answer.status, answer.json["error"]["code"]) == (404, "unknown_url")


def test_a_prefix_that_is_said_by_a_proxy(server: ServerProcess) -> None:
    answer = get(server, "/told", accept="text/html", x_forwarded_prefix="/told")
    assert answer.headers["location"] == "/told/console/"


def test_the_page_and_what_it_is_allowed(server: ServerProcess) -> None:
    page = get(server, f"{PREFIX}/console/")
    assert page.status == 200
    assert page.content == (ROOT / "index.html").read_bytes()
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["referrer-policy"] == "no-referrer"
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in page.headers["content-security-policy"]
    # The import map is the only script in the page, and the only one that the policy lets in.
    scripts = re.findall(rb"<script([^>]*)>(.*?)</script>", page.content, re.DOTALL)
    inline = [content for attributes, content in scripts if b"src=" not in attributes]
    hashes = [f"'sha256-{b64encode(hashlib.sha256(content).digest()).decode()}'" for content in inline]
    assert policy["script-src"].split() == ["'self'", *hashes]
    assert len(inline) <= 1
    assert b"<style" not in page.content
    assert not re.search(rb"\s(on\w+|style)=", page.content)


def test_every_file_is_served_and_asked_for_again_by_its_tag(server: ServerProcess) -> None:
    names = [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*") if path.is_file()]
    assert "index.html" in names
    for name in names:
        if name.endswith((".toml", ".md")):
            continue  # about the files, not for browsers
        path = f"{PREFIX}/console/static/{name}"
        plain, packed = get(server, path), get(server, path, accept_encoding="gzip")
        assert plain.status == packed.status == 200, name
        assert plain.content == (ROOT / name).read_bytes()
        if packed.headers.get("content-encoding") == "gzip":
            assert gzip.decompress(packed.content) == plain.content
        assert plain.headers["content-type"].startswith(("text/", "image/", "font/", "application/json"))
        assert plain.headers["cache-control"] == "no-cache"
        again = get(server, path, if_none_match=plain.headers["etag"])
        assert (again.status, again.content) == (304, b"")
        assert again.headers["etag"] == plain.headers["etag"]


@pytest.mark.parametrize(
    "name",
    [
        "missing.js",
        "app/missing.js",
        "",
        "../files.py",
        "%2e%2e/files.py",
        "..%2ffiles.py",
        "app/../../files.py",
        "%2fetc/passwd",
        "/etc/passwd",
        "..%5cfiles.py",
        ".hidden.js",
        "index.html%00.js",
        "vendor/vendor.toml",
        "a" * 5_000,
    ],
)
def test_what_is_no_file_is_not_found(server: ServerProcess, name: str) -> None:
    """A page in place of a missing script would be a blank screen."""
    answer = get(server, f"{PREFIX}/console/static/{name}", accept="text/html")
    assert answer.status == 404
    assert answer.headers["content-type"] == "application/json"


def test_other_methods_and_heads(server: ServerProcess) -> None:
    head = get(server, f"{PREFIX}/console/", "HEAD")
    assert (head.status, head.content) == (200, b"")
    assert get(server, f"{PREFIX}/console/", "POST").status == 405
    assert "/console/" not in get(server, f"{PREFIX}/openapi.json").json["paths"]


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    from penstock.console.files import StaticFiles

    files, path = StaticFiles(tmp_path), tmp_path / "a.js"
    assert files.find("a.js") is None
    path.write_text("1")
    first = files.find("a.js")
    path.write_text("22")
    second = files.find("a.js")
    assert first is not None
    assert second is not None
    assert (first.content, second.content) == (b"1", b"22")
    assert first.etag != second.etag

"""Files of adapters over the API: jobs by reference, scans, and who may see what."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.adapters import NEVER_S, adapter_tables, ingested, scan
from tests.support.file_servers import Folder, FtpServer, ftp_server
from tests.support.server import Answered
from tests.support.tenants import TenantGround, form, tenant_ground

CHAT = {"type": "chat", "provider": "default", "model": "small", "prompt": "{{ a }}"}
SPEC = {"processor": CHAT, "jobType": "described"}
ROWS = b"a,b\n1,2\n3,4\n"


@pytest.fixture
def ftp(tmp_path: Path) -> Iterator[FtpServer]:
    with ftp_server(tmp_path / "ftp") as server:
        yield server


@pytest.fixture
def drop(tmp_path: Path) -> Folder:
    """Alice's folder."""
    root = tmp_path / "drop"
    root.mkdir()
    return Folder(root)


@pytest.fixture
def ground(tmp_path: Path, drop: Folder, ftp: FtpServer, server_18: str) -> Iterator[TenantGround]:
    """Alice has a folder and an FTP server, to which she refers; Bob's folder is scanned."""
    away = FtpServer(tmp_path, port=1)
    inbox = Folder(tmp_path / "inbox")
    inbox.root.mkdir()
    config = tmp_path / "penstock.toml"
    config.write_text(
        adapter_tables(
            {**drop.entry("drop"), "owner": "alice", "pattern": "**/*.csv"},
            {**ftp.entry("ftp"), "owner": "alice"},
            {**away.entry("away"), "owner": "alice"},
            {**inbox.entry("inbox"), "owner": "bob", "spec": SPEC, "settled_s": 0, "scan_every_s": NEVER_S},
        )
    )
    options = ("--config", config, "--set", "scan_timeout_s=5")
    with tenant_ground(tmp_path, server_18, *options, env=ftp.env, workers=0) as running:
        yield running


def refer(ground: TenantGround, tenant: str, source: Any, spec: Any = SPEC, **options: Any) -> Answered:
    """`POST /api/jobs` with a reference."""
    fields = {"source": source if isinstance(source, str) else json.dumps(source), "spec": json.dumps(spec)}
    body, kind = form(fields)
    headers = {"content-type": kind, **options.pop("headers", {})}
    return ground.ask(tenant, "POST", "/api/jobs", body, headers=headers, **options)


def test_a_job_by_reference(ground: TenantGround, drop: Folder, ftp: FtpServer) -> None:
    drop.put("2024/may.csv", ROWS)
    ftp.put("rows.csv", b"a\n5\n")
    for tenant, source, total in (
        ("alice", {"adapter": "drop", "path": "2024/may.csv"}, 2),
        ("alice", {"adapter": "ftp", "path": "rows.csv"}, 1),
        ("root", {"adapter": "drop", "path": "2024/may.csv"}, 2),
    ):
        answer = refer(ground, tenant, source)
        assert answer.status == 200, answer.content
        job = ground.until(tenant, f"/api/jobs/{answer.json['jobId']}", "state", "QUEUED")
        assert (job["owner"], job["total"], job["client"]) == (tenant, total, "127.0.0.1")
        assert job["filename"] == source["path"].split("/")[-1]


def test_a_reference_under_a_key_is_one_job(ground: TenantGround, drop: Folder) -> None:
    drop.put("a.csv", ROWS)
    drop.put("b.csv", ROWS)
    key = {"idempotency-key": "once"}
    first = refer(ground, "alice", {"adapter": "drop", "path": "a.csv"}, headers=key)
    # What is there now does not matter: the same was asked.
    drop.put("a.csv", b"a\n9\n")
    again = refer(ground, "alice", {"adapter": "drop", "path": "a.csv"}, headers=key)
    assert first.status == 200, first.content
    assert again.json == first.json
    for path, spec in (("b.csv", SPEC), ("a.csv", {**SPEC, "priority": -1})):
        refused = refer(ground, "alice", {"adapter": "drop", "path": path}, spec, headers=key)
        assert (refused.status, refused.json["error"]["code"]) == (409, "idempotency_conflict")
    assert len(ground.ok("alice", "GET", "/api/jobs")["jobs"]) == 1


def test_references_lead_nowhere_else(ground: TenantGround, drop: Folder, tmp_path: Path) -> None:
    (tmp_path / "secret.csv").write_bytes(ROWS)
    (drop.root / "link.csv").symlink_to(tmp_path / "secret.csv")
    (drop.root / "up").symlink_to(tmp_path)
    drop.put("notes.txt", ROWS)
    drop.put("ragged.csv", b"a,b\n1\n")
    for source, words in (
        ({"adapter": "drop", "path": "../secret.csv"}, "path: it is not a relative path"),
        ({"adapter": "drop", "path": str(tmp_path / "secret.csv")}, "path: it is not a relative path"),
        ({"adapter": "drop", "path": "link.csv"}, "links are not followed"),
        ({"adapter": "drop", "path": "up/secret.csv"}, "links are not followed"),
        ({"adapter": "ftp", "path": "../../secret.csv"}, "path: it is not a relative path"),
        ({"adapter": "ftp", "path": "a\r\nDELE b"}, "control character"),
        ({"adapter": "drop", "path": "notes.txt"}, "there is no such file"),
        ({"adapter": "drop", "path": "none.csv"}, "there is no such file"),
        ({"adapter": "drop", "path": "ragged.csv"}, "row 1 (line 2): 1 cell"),
        ({"adapter": "nobody", "path": "a.csv"}, "there is no adapter 'nobody' whose files you may use"),
        ({"adapter": "drop"}, "missing required field `path`"),
        ({"adapter": "drop", "path": "a.csv", "root": "/"}, "unknown field `root`"),
        ("{", "Invalid 'source'"),
    ):
        answer = refer(ground, "alice", source)
        assert answer.status == 400, answer.content
        assert words in answer.json["error"]["message"]
    assert ground.ok("alice", "GET", "/api/jobs")["jobs"] == []


def test_a_file_and_a_source_are_one_too_many(ground: TenantGround, drop: Folder) -> None:
    drop.put("a.csv", ROWS)
    source = json.dumps({"adapter": "drop", "path": "a.csv"})
    cases: tuple[tuple[dict[str, str | bytes], str], ...] = (
        ({"spec": json.dumps(SPEC), "source": source, "file": ROWS}, "a file is given too"),
        ({"spec": json.dumps(SPEC)}, "Missing required parameter: 'file'"),
        ({"source": source}, "Missing required parameter: 'spec'"),
    )
    for fields, words in cases:
        body, kind = form(fields, "rows.csv")
        answer = ground.ask("alice", "POST", "/api/jobs", body, headers={"content-type": kind})
        assert answer.status == 400
        assert words in answer.json["error"]["message"]


def test_a_source_that_is_away_is_said_to_be(ground: TenantGround) -> None:
    answer = refer(ground, "alice", {"adapter": "away", "path": "a.csv"})
    assert answer.status == 503
    assert "127.0.0.1" not in answer.json["error"]["message"]
    assert answer.headers["retry-after"]


def test_an_owner_sees_its_own_adapters_alone(ground: TenantGround, drop: Folder, tmp_path: Path) -> None:
    drop.put("a.csv", ROWS)
    theirs = refer(ground, "bob", {"adapter": "drop", "path": "a.csv"})
    nobodys = refer(ground, "bob", {"adapter": "none", "path": "a.csv"})
    assert theirs.status == nobodys.status == 400
    assert theirs.content.replace(b"'drop'", b"'none'") == nobodys.content

    for tenant in ("alice", "bob"):
        assert ground.ask(tenant, "POST", "/api/ingestion/scan").status == 403
    Folder(tmp_path / "inbox").put("good.csv", ROWS)
    Folder(tmp_path / "inbox").put("bad.csv", b"a,b\n1\n")
    server, root = ground.server, ground.keys["root"]
    found = scan(server, key=root)
    assert list(found) == ["inbox"]  # nothing is scanned without a spec
    seen = ingested(server, key=ground.keys["bob"])
    assert {(file["path"], file["owner"], file["reason"] is None) for file in seen} == {
        ("good.csv", "bob", True),
        ("bad.csv", "bob", False),
    }
    assert ingested(server, page_size=1, user_id="all", key=root) == seen
    assert ingested(server, key=root) == []
    assert ground.ask("bob", "GET", "/api/ingestion/files?userId=all").status == 403
    assert ingested(server, key=ground.keys["alice"]) == []
    assert ground.ask("bob", "GET", "/api/ingestion/files?after=x").status == 400
    (job,) = ground.ok("bob", "GET", "/api/jobs")["jobs"]
    assert (job["filename"], job["client"]) == ("good.csv", "adapter inbox")

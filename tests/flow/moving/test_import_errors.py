"""What cannot be imported is refused with advice, and nothing is half imported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tests.support.cli import run_cli
from tests.support.eager import Eager, digest_of, eager_database
from tests.support.moving import bring, check_whole


@pytest.fixture(scope="module")
def eager(server_18: str) -> Iterator[Eager]:
    with eager_database(server_18, batches=10, lines=20) as made:
        yield made


@pytest.fixture(autouse=True)
def _nothing_changes(shared_database_18: str) -> Iterator[None]:
    before = digest_of(shared_database_18, "penstock")
    yield
    assert digest_of(shared_database_18, "penstock") == before


def test_a_source_of_another_layout(shared_database_18: str, tmp_path: Path) -> None:
    other = Eager(shared_database_18)
    done = bring(other, shared_database_18, tmp_path, "--schema", "penstock")
    done.refuses(1, "is not of the eager layout: it has no", "table request_templates", "--map")
    bring(other, shared_database_18, tmp_path, "--schema", "nowhere").refuses(1, "no schema 'nowhere'", "--schema")


def test_a_source_that_cannot_be_reached(shared_database_18: str, tmp_path: Path) -> None:
    away = Eager("postgresql://nobody:secret@127.0.0.1:1/none")
    done = bring(away, shared_database_18, tmp_path)
    done.refuses(1, "the source cannot be reached", "the same command goes on")
    assert "secret" not in done.stderr
    command = ("import", "--database-url", shared_database_18)
    run_cli(*command, "--from", "no address", cwd=tmp_path).refuses(2, "--from is not the address")
    run_cli(*command, cwd=tmp_path).refuses(2, "import takes --from URL, or --back --to URL")


def test_a_role_without_rights(eager: Eager, shared_database_18: str, tmp_path: Path) -> None:
    eager.run("DROP ROLE IF EXISTS stranger", "CREATE ROLE stranger LOGIN", "GRANT USAGE ON SCHEMA public TO stranger")
    stranger = Eager(make_conninfo(eager.conninfo, user="stranger"))
    bring(stranger, shared_database_18, tmp_path).refuses(1, "may not read files", "Grant it SELECT")
    eager.run("DROP OWNED BY stranger", "DROP ROLE stranger")


def test_workers_that_seem_alive(eager: Eager, shared_database_18: str, tmp_path: Path) -> None:
    one = "WHERE id = (SELECT id FROM requests WHERE state = 'claimed' ORDER BY id LIMIT 1)"
    eager.run(f"UPDATE requests SET claimed_at = now() {one}")
    try:
        done = bring(eager, shared_database_18, tmp_path)
        done.refuses(1, "workers seem alive", "claimed", "--workers-stopped")
    finally:
        eager.run(f"UPDATE requests SET claimed_at = now() - interval '1 day' {one}")


@pytest.mark.parametrize(
    ("column", "value", "word"),
    [
        ("method", "GET", "its method is GET"),
        ("path", "https://elsewhere/v1", "url: found"),
        ("model", "", "body.model: empty"),
    ],
)
def test_a_line_that_penstock_cannot_send(
    eager: Eager, database_18: str, tmp_path: Path, column: str, value: str, word: str
) -> None:
    (batch_id,) = eager.batches("halfway")
    line = f"WHERE file_id = (SELECT file_id FROM batches WHERE id = '{batch_id}') AND line_number = 7"
    ((before,),) = eager.rows(f"SELECT {column} FROM request_templates {line}")
    eager.run(f"UPDATE request_templates SET {column} = '{value}' {line}")
    try:
        done = bring(eager, database_18, tmp_path, "--only", str(batch_id))
        done.refuses(1, "line 7 of file-", word, "Nothing of this file was stored")
        with psycopg.connect(database_18) as connection:
            assert connection.execute("SELECT count(*) FROM penstock.templates").fetchall() == [(0,)]
            assert connection.execute("SELECT count(*) FROM penstock.imports").fetchall() == [(0,)]
    finally:
        eager.run(f"UPDATE request_templates SET {column} = '{before}' {line}")


def test_names_can_be_mapped(server_18: str, database_18: str, tmp_path: Path) -> None:
    with eager_database(server_18, batches=10, lines=20) as eager:
        eager.run(
            "CREATE SCHEMA old",
            "ALTER TABLE requests SET SCHEMA old",
            "ALTER TABLE batches SET SCHEMA old",
            "ALTER TABLE files SET SCHEMA old",
            "ALTER TABLE request_templates SET SCHEMA old",
            'ALTER TABLE old.requests RENAME TO "100% Requests"',
            'ALTER TABLE old."100% Requests" RENAME response_body TO "Body"',
            "ALTER TABLE old.request_templates DROP COLUMN api_key",
        )
        maps = ("requests=100% Requests", "requests.response_body=Body")
        named = [part for each in maps for part in ("--map", each)]
        bring(eager, database_18, tmp_path, "--schema", "old", *named).refuses(1, "request_templates.api_key")
        named += ["--map", "request_templates.api_key="]
        done = bring(eager, database_18, tmp_path, "--schema", "old", *named, "--verify").expect(0)
        assert done.summary["verified"]["batches"] == 9
        check_whole(database_18)
        for wrong in ("requests", "nothing=there", "requests.id=", "files.nothing=x"):
            bring(eager, database_18, tmp_path, "--map", wrong).refuses(2, f"--map {wrong}")

"""What goes wrong for a user of `penstock run`: the exit code, a message that says what to do, nothing half-written."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from penstock.cli.paths import check_paths
from penstock.errors import UsageError
from tests.support.cli import (
    Finished,
    ask,
    call_count,
    check_agreement,
    check_answers,
    finish,
    ids_of,
    interrupt,
    opened,
    request_line,
    run_cli,
    slow_down_intake,
    start_cli,
    write_lines,
    write_requests,
)
from tests.support.mock_process import MockProcess, start_mock_process
from tests.support.wait import wait_until

MIB = 1024 * 1024
MIGRATION_LOCK = 0x50454E53544F434B


@pytest.fixture(scope="module")
def mock() -> Iterator[MockProcess]:
    with start_mock_process() as process:
        yield process


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_requests(tmp_path / "requests.jsonl", 5)


def run(directory: Path, *options: str | Path, env: dict[str, str] | None = None) -> Finished:
    """Run to the end; whatever happened, no draft may be left."""
    ended = run_cli("run", *options, cwd=directory, env=env)
    assert not list(directory.rglob("*.part"))
    return ended


# -- the input


def test_inputs_that_are_no_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, said in (
        ("missing.jsonl", "missing.jsonl: no such file"),
        ("folder", "folder is a directory"),
        ("pipe", "pipe is not a regular file"),
        ("x" * 300, "File name too long"),
    ):
        with pytest.raises(UsageError, match=said) as refused:
            check_paths([tmp_path / name], tmp_path / "answers.jsonl")
        assert refused.value.hint
    rest = ("--processor", "any:thing", "-o", "answers.jsonl")
    run(tmp_path, "missing.jsonl", *rest).refuses(2, "missing.jsonl: no such file", "Check the path")
    run(tmp_path, "-", *rest).refuses(2, "standard input", "Save the stream to a file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "pipe"], "something was made for nothing"


_GOOD = json.dumps(request_line("a", "hello"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ["requests.jsonl: holds no requests"]),
        (_GOOD + "\n\n{not json\n", ["requests.jsonl", "line 3", "not valid; nothing was stored"]),
        (_GOOD + "\n" + _GOOD.replace('"a"', '"b"') + "\n\n" + _GOOD + "\n", ["line 4", "line 1", "custom_id"]),
    ],
    ids=["empty", "not JSON", "duplicate custom_id"],
)
def test_inputs_that_are_no_requests(
    tmp_path: Path, database_18: str, mock: MockProcess, text: str, said: list[str]
) -> None:
    before = call_count(mock)
    (tmp_path / "requests.jsonl").write_text(text)
    rest = ("--base-url", mock.base_url, "-o", "answers.jsonl", "--database-url", database_18)
    run(tmp_path, "requests.jsonl", *rest).refuses(2, *said)
    assert not (tmp_path / "answers.jsonl").exists()
    assert call_count(mock) == before
    with psycopg.connect(database_18) as connection:
        assert ask(connection, "SELECT count(*) FROM penstock.batches") == 0
        assert ask(connection, "SELECT count(*) FROM penstock.files WHERE state = 'ready'") == 0


@pytest.mark.parametrize("second", ["more.jsonl", "rows.csv", "book.xlsx"])
@pytest.mark.parametrize("asked", [(), ("--prompt", "What is {{ it }}?", "--model", "small")])
def test_several_files_of_requests(tmp_path: Path, source: Path, second: str, asked: tuple[str, ...]) -> None:
    (tmp_path / second).touch()
    rest = ("--base-url", "http://127.0.0.1:1/v1", *asked, "-o", "answers.csv")
    run(tmp_path, source, second, *rest).refuses(2, "run one at a time", "Only images may be several files")
    assert not (tmp_path / ".penstock").exists()


# -- the target


def test_a_base_url_that_nobody_answers(tmp_path: Path, database_18: str, source: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused, and nobody else gets it
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
        rest = ("-o", "answers.jsonl", "--database-url", database_18)
        run(tmp_path, source, "--base-url", url, *rest).refuses(1, f"nothing answers at {url}", "Check the URL")
    with psycopg.connect(database_18) as connection:
        assert ask(connection, "SELECT count(*) FROM penstock.files") == 0, "stored although it cannot be run"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], ["give either --base-url or --processor"]),
        (["--base-url", "http://127.0.0.1:1", "--processor", "a:b"], ["give either --base-url or --processor"]),
        (["--base-url", "localhost:8000/v1"], ["localhost:8000/v1", "http"]),
        (["--base-url", "http://[::1/v1"], ["http://[::1/v1", "http"]),
        (["--base-url", "http://127.0.0.1:1", "--set", "max_atempts=3"], ["max_atempts", "Did you mean max_attempts"]),
        (["--base-url", "http://127.0.0.1:1", "--set", "max_attempts"], ["expected NAME=VALUE"]),
        (["--base-url", "http://127.0.0.1:1", "--set", "max_attempts=0"], ["max_attempts: 0 is out of range"]),
        (["--base-url", "http://127.0.0.1:1", "--concurrency", "10001"], ["concurrency", "out of range"]),
        (["--base-url", "http://127.0.0.1:1", "--config", "missing.toml"], ["missing.toml", "No such file"]),
        (["--base-url", "http://127.0.0.1:1", "--ca-file", "ca.pem"], ["--ca-file without an https://"]),
        (["--base-url", "https://127.0.0.1:1", "--ca-file", "missing.pem"], ["missing.pem cannot be read", "ca_file"]),
        (["--base-url", "http://127.0.0.1:1", "--proxy", "socks5://h"], ["the proxy's URL is not http://host:port"]),
        (["--base-url", "http://127.0.0.1:1", "--proxy", "http://u:p@h:1"], ["--proxy must not carry credentials"]),
        (["--processor", "a:b", "--proxy", "http://h:1"], ["--proxy without --base-url"]),
    ],
    ids=[
        *("neither", "both", "no scheme", "bad host", "unknown setting", "no value", "range", "concurrency", "config"),
        *("no TLS", "no certificates", "no proxy", "password", "proxy of a function"),
    ],
)
def test_wrong_usage(tmp_path: Path, source: Path, options: list[str], said: list[str]) -> None:
    ended = run(tmp_path, source, "-o", "answers.jsonl", "--json", *options)
    ended.expect(2)
    assert ended.summary["exit_code"] == 2
    for word in said:
        assert word in ended.stderr
    assert ended.summary["error"]["message"] in ended.stderr
    assert not (tmp_path / ".penstock").exists()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("rows", ["not of the form module:function"]),
        ("nowhere:work", ["there is no module 'nowhere'"]),
        ("rows:wrok", ["rows has no 'wrok'", "Did you mean work?"]),
        ("broken:work", ["importing broken failed: SyntaxError", "broken.py, line 2"]),
        ("dependent:work", ["importing dependent failed: ModuleNotFoundError", "absent_module"]),
    ],
)
def test_bad_processors(tmp_path: Path, database_18: str, source: Path, spec: str, said: list[str]) -> None:
    (tmp_path / "rows.py").write_text("def work(item):\n    return 1\n")
    (tmp_path / "broken.py").write_text("\ndef work(item:\n")
    (tmp_path / "dependent.py").write_text("import absent_module\n")
    rest = ("-o", "answers.jsonl", "--database-url", database_18)
    run(tmp_path, source, "--processor", spec, *rest).refuses(2, *said)
    assert not (tmp_path / "answers.jsonl").exists()


# -- the key


def test_a_wrong_key_pauses_and_the_right_one_goes_on(tmp_path: Path, database_18: str) -> None:
    source = write_requests(tmp_path / "requests.jsonl", 200, models=("a", "b"))
    with start_mock_process("--require-key", "right-and-long") as mock:
        command = (source, "--base-url", mock.base_url, "-o", "answers.jsonl", "--database-url", database_18)
        wrong = run(tmp_path, *command, env={"OPENAI_API_KEY": "wrong-and-long"})
        wrong.expect(4)
        assert "reason" in wrong.stderr
        assert "401" in wrong.stderr
        assert "then go on with the same command:" in wrong.stdout
        assert "wrong-and-long" not in wrong.stdout + wrong.stderr
        assert not (tmp_path / "answers.jsonl").exists()
        with psycopg.connect(database_18) as connection:
            assert ask(connection, "SELECT count(*) FROM penstock.attempts") == 0
            assert ask(connection, "SELECT count(*) FROM penstock.leases") == 0
            assert ask(connection, "SELECT max(attempt) FROM penstock.deferrals") <= 1

        paused = run(tmp_path, *command, "--json").expect(4)
        assert paused.summary["pending"] == 200
        assert "401" in paused.summary["reasons"][0]

        run(tmp_path, *command, env={"OPENAI_API_KEY": "right-and-long"}).expect(0)
        assert call_count(mock) < 200 + 3 * 64 * 2
    check_answers(tmp_path / "answers.jsonl", ids_of(200))
    with psycopg.connect(database_18) as connection:
        assert ask(connection, "SELECT max(attempts) FROM penstock.outcomes") == 1


def test_keys_that_cannot_be_read(tmp_path: Path, database_18: str, source: Path, mock: MockProcess) -> None:
    rest = (source, "--base-url", mock.base_url, "-o", "answers.jsonl", "--database-url", database_18)
    run(tmp_path, *rest, "--api-key-env", "NO_SUCH_KEY").refuses(2, "NO_SUCH_KEY: the variable is not set")
    run(tmp_path, *rest, "--api-key-file", "missing.key").expect(2)
    (tmp_path / "two.key").write_text("sk-one\nsk-two\n")
    ended = run(tmp_path, *rest, "--api-key-file", "two.key")
    ended.refuses(2, "two.key: does not hold a usable API key")
    assert "sk-" not in ended.stderr


# -- the output


def test_outputs_that_cannot_be_written(tmp_path: Path, source: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "taken.errors.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "mirror.jsonl").symlink_to(source)
    for output, said in (
        ("missing/answers.jsonl", "cannot write .*missing/answers.jsonl: No such file or directory"),
        ("requests.jsonl/answers.jsonl", "cannot write .*: Not a directory"),
        ("folder", "folder is a directory"),
        ("/", "/ is a directory"),
        ("taken.jsonl", "taken.errors.jsonl is a directory"),
        ("requests.jsonl", "overwrite the input"),
        ("mirror.jsonl", "overwrite the input"),
        ("pipe", "pipe is not a regular file"),
        ("/dev/null", "/dev/null is not a regular file"),
        ("loop", "cannot write .*loop"),
        ("y" * 250, "File name too long"),
    ):
        with pytest.raises(UsageError, match=said) as refused:
            check_paths([source], tmp_path / output)
        assert refused.value.hint
    with pytest.raises(UsageError, match="is a directory"):
        check_paths([source], Path())
    ended = run(tmp_path, source, "--processor", "any:thing", "-o", "missing/answers.jsonl")
    ended.refuses(2, "missing/answers.jsonl: No such file", "Its directory must exist")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["requests.jsonl", "folder", "taken.errors.jsonl", "pipe", "loop", "mirror.jsonl"]
    )


@contextmanager
def small_disk(directory: Path, size_bytes: int) -> Iterator[Callable[[], None]]:
    """A file system of this size at the directory; yields what lifts the limit.

    Where mounting is not allowed, this process's limit on the size of a file stands in for it: children inherit
    it, and a write beyond it fails much as one on a full disk.
    """
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=0755", "tmpfs", str(directory)]
    if os.geteuid() == 0 and subprocess.run(mount, check=False, capture_output=True).returncode == 0:
        try:
            yield partial(_call, "mount", "-o", f"remount,size={64 * size_bytes}", str(directory))
        finally:
            _call("umount", "--lazy", str(directory))  # lazily: a server may still be about to leave
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    lift = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (soft, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield lift
    finally:
        lift()


def _call(*command: str) -> None:
    subprocess.run(command, check=True)


def test_a_full_disk_keeps_the_old_output_and_the_results(tmp_path: Path, database_18: str, mock: MockProcess) -> None:
    source = write_requests(tmp_path / "requests.jsonl", 5_000)
    disk = tmp_path / "disk"
    with small_disk(disk, MIB) as lift:
        output = disk / "answers.jsonl"
        output.write_bytes(b"what was there before\n")
        command = (source, "--base-url", mock.base_url, "-o", output, "--database-url", database_18)
        run(tmp_path, *command).refuses(1, f"cannot write {output}: ", "every result is stored", "make room")
        assert [path.name for path in disk.iterdir()] == ["answers.jsonl"]
        assert output.read_bytes() == b"what was there before\n"
        called = call_count(mock)
        lift()
        run(tmp_path, *command).expect(0)
        check_answers(output, ids_of(5_000))
        assert call_count(mock) == called


# -- the database


_FAT = """
import os

def work(item):
    return os.urandom(20_000).hex()
"""


@contextmanager
def crowded(directory: Path) -> Iterator[tuple[Callable[..., Finished], Callable[[], None]]]:
    """Runs on an embedded database with room for little; and what gives it room."""
    (directory / "fat.py").write_text(_FAT)
    disk = directory / "disk"
    rest = ("--processor", "fat:work", "-o", "answers.jsonl", "--data-dir", disk / "data")
    impatient = ("--set", "settle_retry_s=1", "--set", "connect_wait_s=5")
    with small_disk(disk, 80 * MIB) as lift:
        yield partial(run, directory, *rest, *impatient), lift


def test_a_disk_too_small_for_the_input(tmp_path: Path) -> None:
    lines = (request_line(f"r-{number}", os.urandom(10_000).hex()) for number in range(1, 3_001))
    source = write_lines(tmp_path / "large.jsonl", lines)
    small = write_requests(tmp_path / "small.jsonl", 3)
    with crowded(tmp_path) as (run_here, lift):
        run_here(source).refuses(1, "large.jsonl", "nothing was stored", "disk is full", "free some space")
        lift()
        run_here(small).expect(0)
        with opened(tmp_path / "disk" / "data") as connection:
            # Rows of the file that was given up go as there is time for it.
            kept = "SELECT count(*) FROM penstock.templates JOIN penstock.files USING (source_id) WHERE state = 'ready'"
            assert ask(connection, kept) == 3
    check_answers(tmp_path / "answers.jsonl", ids_of(3))


def test_a_disk_that_fills_up_with_answers(tmp_path: Path) -> None:
    source = write_requests(tmp_path / "requests.jsonl", 2_000)
    with crowded(tmp_path) as (run_here, lift):
        run_here(source).refuses(1, "the database failed", "the same command goes on")
        assert not (tmp_path / "answers.jsonl").exists()
        lift()
        run_here(source).expect(0)
        with opened(tmp_path / "disk" / "data") as connection:
            check_agreement(connection)
    check_answers(tmp_path / "answers.jsonl", ids_of(2_000))


def test_databases_that_cannot_be_reached(tmp_path: Path, source: Path, mock: MockProcess) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        for url, code, *said in (
            (f"postgresql://me:secret@127.0.0.1:{port}/x", 1, "cannot reach the database", "Connection refused"),
            ("mysql://me:secret@127.0.0.1/x", 2, "not the address of a PostgreSQL", "postgresql://user@host"),
            ("nonsense", 2, "not the address of a PostgreSQL"),
        ):
            ended = run(
                tmp_path, source, "--base-url", mock.base_url, "-o", "answers.jsonl", "--database-url", str(url)
            )
            ended.refuses(int(code), "--database-url", *map(str, said))
            assert "secret" not in ended.stdout + ended.stderr


def test_a_database_user_without_rights(tmp_path: Path, server: str, source: Path, mock: MockProcess) -> None:
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute("CREATE ROLE weak LOGIN")
        connection.execute("CREATE DATABASE bare")
        try:
            url = make_conninfo(server, user="weak", dbname="bare")
            rest = ("--base-url", mock.base_url, "-o", "answers.jsonl", "--database-url", url)
            run(tmp_path, source, *rest).refuses(1, "may not create the schema 'penstock'", "CREATE SCHEMA penstock")
        finally:
            connection.execute("DROP DATABASE bare WITH (FORCE)")
            connection.execute("DROP ROLE weak")


def test_a_data_directory_that_cannot_be_used(tmp_path: Path, source: Path, mock: MockProcess) -> None:
    rest = (source, "--base-url", mock.base_url, "-o", "answers.jsonl")
    ended = run(tmp_path, *rest, "--data-dir", source)
    ended.expect(2)
    assert "is a file" in ended.stderr
    run(tmp_path, *rest, "--data-dir", source / "below").refuses(1, "is not a directory", "--data-dir")


def test_an_interrupted_intake_keeps_nothing(tmp_path: Path, mock: MockProcess) -> None:
    # More than the reader may be ahead of the database: it is interrupted in the middle.
    source = write_requests(tmp_path / "requests.jsonl", 60_000)
    data_dir = tmp_path / ".penstock"
    slow_down_intake(data_dir, 0.2)
    with opened(data_dir) as connection:
        slow = ("--set", "intake_max_rows=500")
        with start_cli(
            "run", source, "--base-url", mock.base_url, "-o", "answers.jsonl", "--json", *slow, cwd=tmp_path
        ) as process:
            wait_until(lambda: _stored(connection) > 0, 60)
            interrupt(process)
            ended = finish(process).expect(130)
        assert ended.summary["exit_code"] == 130
        assert "nothing was kept" in ended.summary["error"]["message"]
        assert ask(connection, "SELECT count(*) FROM penstock.files WHERE state <> 'failed'") == 0
        assert ask(connection, "SELECT count(*) FROM penstock.workers") == 0


def test_an_interrupted_start_does_nothing(tmp_path: Path, database_18: str, source: Path, mock: MockProcess) -> None:
    rest = ("--base-url", mock.base_url, "-o", "answers.jsonl", "--database-url", database_18)
    with psycopg.connect(database_18, autocommit=True) as connection:
        connection.execute("SELECT pg_advisory_lock(%s)", [MIGRATION_LOCK])
        with start_cli("run", source, *rest, cwd=tmp_path) as process:
            waiting = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'penstock migration lock'"
            wait_until(lambda: ask(connection, waiting) == 1, 60)
            interrupt(process)
            connection.execute("SELECT pg_advisory_unlock_all()")
            finish(process).refuses(130, "interrupted before anything was done")
        assert ask(connection, "SELECT count(*) FROM penstock.files") == 0


def _stored(connection: psycopg.Connection) -> int:
    return ask(connection, "SELECT count(*) FROM penstock.templates")

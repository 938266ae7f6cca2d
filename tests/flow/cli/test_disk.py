"""`penstock rm` on the embedded server: the files on the disk are smaller afterwards."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from tests.support.cli import request_line, run_cli, write_lines
from tests.support.mock_process import start_mock_process
from tests.support.prepared import Prepared


def test_space_is_given_back(tmp_path: Path, prepared: Prepared) -> None:
    data_dir = prepared(tmp_path / ".penstock")
    source = tmp_path / "requests.jsonl"
    # What does not compress: the database keeps long texts packed.
    lines = [
        request_line(f"r-{n}", "".join(f"{(n + 7919 * i) * 2654435761 % 2**32:x}" for i in range(400)))
        for n in range(3_000)
    ]
    write_lines(source, lines)
    with start_mock_process() as mock:
        words = ("--base-url", mock.base_url, "-o", tmp_path / "answers.jsonl", "--data-dir", data_dir, "--json")
        name = run_cli("run", source, *words, cwd=tmp_path).expect(0).summary["batch"]
    before = bytes_of(data_dir)
    gone = run_cli("rm", name, "--data-dir", data_dir, "--json", cwd=tmp_path).expect(0).summary
    assert gone["database_bytes"]["before"] - gone["database_bytes"]["after"] > 8_000_000
    assert before - bytes_of(data_dir) > 8_000_000


def bytes_of(data_dir: Path) -> int:
    """Bytes of the tables on the disk; the server's log is used again and not counted."""
    total = 0
    for path in (data_dir / "pg" / "base").rglob("*"):
        with suppress(FileNotFoundError):  # the server is on its way out, and removes files
            total += path.stat().st_size if path.is_file() else 0
    return total

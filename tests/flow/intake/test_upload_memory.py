"""What a process needs to store a file does not depend on the file."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import openai
import pytest

from tests.support.server import served

MIB = 1024 * 1024

_STORE = """
import gzip, itertools, resource, sys
from uuid import UUID
from penstock.config import IntakeLimits
from penstock.intake.intake import FileIntake
from penstock.intake.message_batch import MessageBatchIntake

conninfo, worker, how, size = sys.argv[1], UUID(sys.argv[2]), sys.argv[3], int(sys.argv[4])
about = {"owner": "me", "worker_id": worker, "limits": IntakeLimits()}
kept = {"keep_bytes": True, "keep_problems": True}
TEXT = "words and more words " * 190
LINE = '{"custom_id": "id-%d", "url": "/v1/embeddings", "body": {"model": "m", "input": "' + TEXT + '"}}\\n'
REQUEST = '{"custom_id": "id-%d", "params": {"model": "m", "input": "' + TEXT + '"}},'


def lines(template):
    made = 0
    for number in itertools.count():
        if made >= size:
            return
        line = (template % number).encode()
        made += len(line)
        yield line


if how == "message batch":
    upload = MessageBatchIntake(conninfo, **about)
    upload.feed(b'{"requests": [')
    for request in lines(REQUEST):
        upload.feed(request)
    upload.feed(b'{"custom_id": "last", "params": {"model": "m"}}]}')
elif how == "gzip":
    import zlib
    upload = FileIntake(conninfo, filename="f", **kept, **about)
    packer = zlib.compressobj(1, wbits=31)
    for line in lines(LINE):
        upload.feed(packer.compress(line))
    upload.feed(packer.flush())
else:
    upload = FileIntake(conninfo, filename="f", purpose="batch" if how == "batch" else None, **kept, **about)
    for line in lines(LINE):
        upload.feed(line)
    upload.purpose = how if how != "purpose last" else "batch"
file = upload.finish().file
assert file.problems is None
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.parametrize(
    "how",
    [
        "batch",
        pytest.param("purpose last", marks=pytest.mark.again),
        pytest.param("user_data", marks=pytest.mark.again),
        "gzip",
        "message batch",
    ],
)
def test_memory_is_flat(database_18: str, how: str) -> None:
    def peak_kib(size: int) -> int:
        arguments = [sys.executable, "-c", _STORE, database_18, str(uuid4()), how, str(size)]
        return int(subprocess.run(arguments, capture_output=True, check=True).stdout)

    small, large = peak_kib(2 * MIB), peak_kib(100 * MIB)
    assert large <= 1.3 * small, f"{small:,} KiB became {large:,}"


def test_a_server_is_flat(tmp_path: Path, database_18: str) -> None:
    """With the SDK, each upload to a server that has done nothing yet. bench/upload.py has the large sizes."""

    def peak_kib(size: int) -> int:
        line = (
            b'{"custom_id": "%d", "url": "/v1/embeddings", "body": {"model": "m", "input": "' + b"x " * 2_000 + b'"}}\n'
        )
        path = tmp_path / f"{size}.jsonl"
        with path.open("wb") as file:
            file.writelines(line % number for number in range(size // len(line)))
        with served(tmp_path, "--base-url", "http://127.0.0.1:9/v1", database=database_18, workers=0) as server:
            client = server.closing(openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0))
            # A path would be read into memory as a whole, on this side.
            with path.open("rb") as file:
                stored = client.files.create(file=file, purpose="batch")
            assert stored.bytes == path.stat().st_size
            status = Path(f"/proc/{server.process.pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0])

    small, large = peak_kib(2_000_000), peak_kib(20_000_000)
    assert large <= 1.3 * small, f"{small:,} KiB became {large:,}"

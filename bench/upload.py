"""The most memory `penstock serve` ever needs, for a small upload and for one a hundred times as large.

    python -m bench.upload [--rounds 3] [--quick]

The whole way with the openai SDK, a fresh server process each time: a file uploaded as it is read from the disk, a
batch over it run against a mock upstream, its output streamed back and every line of it looked at. Counted is the
process that answers (its largest resident set, as the kernel keeps it): at rest, after the upload, and when all has
been downloaded. Its worker and PostgreSQL are processes of their own. The speed of an upload is set beside that of the
raw bytes over the same kind of socket, with nobody looking at them, in turns.

Then, in turns as well, how fast `penstock run` stores a file and how fast a server takes the same one, as a form and as
a plain body. The server also keeps the bytes as they came, which `run` does not.
"""

from __future__ import annotations

import random
import re
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from string import ascii_lowercase
from time import perf_counter
from typing import Final
from uuid import uuid4

import msgspec
import openai

from bench.ground import median, options, print_table, scratch_database, server, settle_down, sized, timed
from penstock.intake.ingest import ingest_file
from tests.support.cli import calls_by_key
from tests.support.mock_process import start_mock_process
from tests.support.server import ServerProcess, served
from tests.support.wait import wait_until

ENDPOINT: Final = "/v1/chat/completions"
LINE = (
    '{"custom_id": "r%d", "method": "POST", "url": "'
    + ENDPOINT
    + '", "body": {"model": "small", "messages": [{"role": "user", "content": "%s"}]}}\n'
)
TEXT_CHARS = 3_870
"""Of each line, which makes 4,000 bytes."""
SHORT_TEXT_CHARS = 470
"""Of each line, which makes 600 bytes."""
POOL_CHARS = 8_000_000
"""Lines are cut from so much text, so that they compress about as well as people's words do, and no better."""
BOUNDARY = "bench-upload"
DEADLINE_S = 900.0


@dataclass(frozen=True, slots=True)
class Figures:
    idle: float
    """Peak MiB of a server that has done nothing yet."""
    uploaded: float
    """The same after the upload."""
    peak: float
    """And in the end."""
    upload_s: float
    run_s: float
    """From the creation of the batch to its end."""
    download_s: float


class _Result(msgspec.Struct):
    custom_id: str
    error: None


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    rounds = 1 if chosen.quick else chosen.rounds
    sizes = (sized(chosen, 500, 500), sized(chosen, 50_000, 5_000))
    found: dict[int, list[Figures]] = {lines: [] for lines in sizes}
    bare_s: list[float] = []
    with server() as conninfo, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = {lines: _write(folder / f"{lines}.jsonl", lines) for lines in sizes}
        for _ in range(rounds):
            for lines, path in paths.items():
                found[lines].append(_measure(conninfo, path, lines))
            bare_s.append(_send_bare(paths[sizes[-1]]))
        short = _write(folder / "short.jsonl", sized(chosen, 300_000, 5_000), SHORT_TEXT_CHARS)
        rates = [_rates(conninfo, path, rounds) for path in (paths[sizes[-1]], short)]
        megabytes = {lines: path.stat().st_size / 1e6 for lines, path in paths.items()}
    few, many = sizes
    least = median([each.peak for each in found[few]])
    print_table(
        ["upload", "lines", "idle MiB", "after the upload", "peak MiB", "ratio", "run, s", "download, s"],
        [
            [
                *(f"{megabytes[lines]:,.0f} MB", f"{lines:,}"),
                *(
                    f"{median([each.idle for each in figures]):.0f}",
                    f"{median([each.uploaded for each in figures]):.0f}",
                ),
                *(f"{(peak := median([each.peak for each in figures])):.0f}", f"{peak / least:.2f}"),
                *(
                    f"{median([each.run_s for each in figures]):.1f}",
                    f"{median([each.download_s for each in figures]):.1f}",
                ),
            ]
            for lines, figures in found.items()
        ],
    )
    upload_s, nothing_s = median([each.upload_s for each in found[many]]), median(bare_s)
    print_table(
        [f"{megabytes[many]:,.0f} MB over a loopback socket", "seconds", "MB/s"],
        [
            ["uploaded: checked, parsed, stored twice", f"{upload_s:.1f}", f"{megabytes[many] / upload_s:,.0f}"],
            ["thrown away", f"{nothing_s:.1f}", f"{megabytes[many] / nothing_s:,.0f}"],
        ],
    )
    print_table(["stored, MB/s", "run", "form", "of run", "body", "of run"], rates)


def _measure(conninfo: str, path: Path, lines: int) -> Figures:
    with (
        tempfile.TemporaryDirectory() as folder,
        scratch_database(conninfo) as database,
        start_mock_process() as mock,
        served(Path(folder), "--quiet", "--base-url", mock.base_url, database=database) as running,
    ):
        settle_down(database)
        client = openai.OpenAI(base_url=running.base_url, api_key="none", max_retries=0, timeout=DEADLINE_S)
        # A path would be read into memory as a whole, on our side.
        idle = _peak_mib(running)
        started = perf_counter()
        with path.open("rb") as file:
            file_id = client.files.create(file=file, purpose="batch").id
        upload_s, uploaded = perf_counter() - started, _peak_mib(running)
        started = perf_counter()
        batch = client.batches.create(input_file_id=file_id, endpoint=ENDPOINT, completion_window="24h")
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", DEADLINE_S)
        run_s = perf_counter() - started
        batch = client.batches.retrieve(batch.id)
        assert batch.request_counts is not None
        if batch.output_file_id is None or batch.request_counts.completed != lines:
            raise AssertionError(f"{batch.request_counts.completed} answers of {lines}")
        started = perf_counter()
        _check_output(client, batch.output_file_id, lines)
        download_s, peak = perf_counter() - started, _peak_mib(running)
        calls = calls_by_key(mock)
    repeated = sum(record["calls"] > 1 for record in calls.values())
    if len(calls) != lines or repeated:
        raise AssertionError(f"{len(calls)} of {lines} lines were called, {repeated} more than once")
    return Figures(idle, uploaded, peak, upload_s, run_s, download_s)


def _check_output(client: openai.OpenAI, file_id: str, lines: int) -> None:
    """Every line has one answer, and they come in the order of the input."""
    decoder = msgspec.json.Decoder(_Result)
    seen = 0
    with client.files.with_streaming_response.content(file_id) as answer:
        for line in answer.iter_lines():
            custom_id = decoder.decode(line).custom_id
            if custom_id != f"r{seen}":
                raise AssertionError(f"line {seen} of the output is {custom_id}")
            seen += 1
    if seen != lines:
        raise AssertionError(f"{seen} lines of output, {lines} expected")


def _rates(conninfo: str, path: Path, rounds: int) -> list[str]:
    """How fast a file is stored by `run`, from a form and from a body; the shares of `run` are those within a turn."""
    ways = ("run", "form", "body")
    turns = [{way: _store_s(conninfo, path, way) for way in ways} for _ in range(rounds)]
    megabytes = path.stat().st_size / 1e6
    rate = {way: f"{megabytes / median([turn[way] for turn in turns]):,.0f}" for way in ways}
    share = {way: f"{median([turn['run'] / turn[way] for turn in turns]):.2f}" for way in ways}
    with path.open("rb") as file:
        line_bytes = len(file.readline())
    name = f"{megabytes:,.0f} MB in lines of {line_bytes:,} bytes"
    return [name, rate["run"], rate["form"], share["form"], rate["body"], share["body"]]


def _store_s(conninfo: str, path: Path, way: str) -> float:
    with scratch_database(conninfo) as database:
        if way == "run":
            settle_down(database)
            return timed(lambda: ingest_file(database, path, owner="bench", worker_id=uuid4()))
        with (
            tempfile.TemporaryDirectory() as folder,
            served(
                Path(folder), "--quiet", "--base-url", "http://127.0.0.1:9/v1", database=database, workers=0
            ) as running,
        ):
            settle_down(database)
            return timed(lambda: _send(running, path, way))


def _send(running: ServerProcess, path: Path, way: str) -> None:
    """As a client does that costs next to nothing itself."""
    headers, before, after = {}, b"", b""
    method, target = "PUT", "/v1/files?purpose=batch"
    if way == "form":
        method, target = "POST", "/v1/files"
        headers["content-type"] = f"multipart/form-data; boundary={BOUNDARY}"
        before = (
            f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
        ).encode()
        after = f"\r\n--{BOUNDARY}--\r\n".encode()
    headers["content-length"] = str(len(before) + path.stat().st_size + len(after))

    def body() -> Iterator[bytes]:
        with path.open("rb") as file:
            yield before
            while data := file.read(64 * 1024):
                yield data
            yield after

    with closing(HTTPConnection("127.0.0.1", running.port, timeout=DEADLINE_S)) as connection:
        connection.request(method, target, body(), headers)
        with connection.getresponse() as answer:
            if answer.status != 200:
                raise AssertionError(f"{way}: {answer.status} {answer.read()!r}")
            answer.read()


def _send_bare(path: Path) -> float:
    """Seconds to send a file over a socket to a thread that throws it away."""
    sink = socket.create_server(("127.0.0.1", 0))
    taken = threading.Thread(target=_swallow, args=(sink,))
    taken.start()
    started = perf_counter()
    with socket.create_connection(sink.getsockname()) as sender, path.open("rb") as file:
        # As the SDK sends it, and not by sendfile.
        while data := file.read(64 * 1024):
            sender.sendall(data)
    taken.join()
    sink.close()
    return perf_counter() - started


def _swallow(sink: socket.socket) -> None:
    with sink.accept()[0] as received:
        while received.recv(64 * 1024):
            pass


def _peak_mib(running: ServerProcess) -> float:
    status = Path(f"/proc/{running.process.pid}/status").read_text("ascii")
    return int(re.findall(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)[0]) / 1024


def _write(path: Path, lines: int, text_chars: int = TEXT_CHARS) -> Path:
    chance = random.Random(1)
    words = ["".join(chance.choices(ascii_lowercase, k=chance.randint(2, 10))) for _ in range(5_000)]
    text = " ".join(chance.choices(words, k=POOL_CHARS // 6))
    with path.open("w", encoding="ascii") as file:
        for line in range(lines):
            start = chance.randrange(len(text) - text_chars)
            file.write(LINE % (line, text[start : start + text_chars]))
    return path


if __name__ == "__main__":
    main()

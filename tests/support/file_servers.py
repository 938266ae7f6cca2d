"""Places where files arrive: a folder, aioftp's FTP server over a folder, and moto's S3 server.

with ftp_server(tmp_path / "ftp") as server:
    server.put("rows.csv", content)
    server.entry("incoming")  # as it stands in penstock.toml, its password in server.env
"""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import aioftp
import obstore
from obstore.store import S3Store

START_DEADLINE_S = 30.0
_S3_PROGRAM = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
_KEYS = {"STORE_KEY": "a-key", "STORE_SECRET": "a-secret"}
_BUCKET = "drop"
_PASSWORD = "wonderland"


class FileServer(Protocol):
    """Place where files arrive."""

    env: Mapping[str, str]
    """Variables that hold its secrets."""

    def put(self, path: str, content: bytes) -> None:
        """Put a file there, or another in its place."""

    def entry(self, name: str) -> dict[str, Any]:
        """Fields of an adapter that say where it is."""


@dataclass
class Folder:
    root: Path
    env: Mapping[str, str] = field(default_factory=dict)

    def put(self, path: str, content: bytes) -> None:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)

    def entry(self, name: str) -> dict[str, Any]:
        return {"name": name, "kind": "folder", "root": str(self.root)}


class Gate:
    """Gate in the way of the bytes that an FTP server sends: while it is closed to a file, none of it is sent."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._opened = threading.Event()
        self._opened.set()
        self._closed_to = ""

    def close(self, name: str = "") -> None:
        """Close it to files whose names end so."""
        self._closed_to = name
        self.reached.clear()
        self._opened.clear()

    def open(self) -> None:
        self._opened.set()

    async def pass_through(self, name: str) -> None:
        if not self._opened.is_set() and name.endswith(self._closed_to):
            self.reached.set()
            await asyncio.to_thread(self._opened.wait)


@dataclass
class FtpServer(Folder):
    port: int = 0
    gate: Gate = field(default_factory=Gate)
    env: Mapping[str, str] = field(default_factory=lambda: {"FTP_PASSWORD": _PASSWORD})

    def entry(self, name: str) -> dict[str, Any]:
        place = {"host": "127.0.0.1", "port": self.port, "user": "alice", "directory": "/in"}
        return {"name": name, "kind": "ftp", "password_env": "FTP_PASSWORD", **place}


@contextmanager
def ftp_server(directory: Path) -> Iterator[FtpServer]:
    """An FTP server whose directory `in` is the adapter's."""
    (directory / "in").mkdir(parents=True)
    running = FtpServer(directory / "in")

    class GatedPathIO(aioftp.PathIO):
        async def read(self, file: io.BytesIO, n: int = -1) -> bytes:
            await running.gate.pass_through(str(getattr(file, "name", "")))
            block: bytes = await super().read(file, n)
            return block

    started, stopped = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        user = aioftp.User("alice", _PASSWORD, base_path=directory)
        server = aioftp.Server([user], path_io_factory=GatedPathIO)
        await server.start("127.0.0.1", 0)
        running.port = server.address[1]
        started.set()
        await stopped.wait()
        await server.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), name="ftp", daemon=True)
    thread.start()
    assert started.wait(START_DEADLINE_S)
    try:
        yield running
    finally:
        running.gate.open()
        loop.call_soon_threadsafe(stopped.set)
        thread.join(START_DEADLINE_S)
        loop.close()


@dataclass
class S3Server:
    port: int
    env: Mapping[str, str] = field(default_factory=lambda: dict(_KEYS))

    @property
    def store(self) -> S3Store:
        return S3Store(
            _BUCKET,
            config={"endpoint": f"http://127.0.0.1:{self.port}", "region": "us-east-1"},
            access_key_id=_KEYS["STORE_KEY"],
            secret_access_key=_KEYS["STORE_SECRET"],
            client_options={"allow_http": True},
        )

    def put(self, path: str, content: bytes) -> None:
        obstore.put(self.store, f"in/{path}", content)

    def entry(self, name: str) -> dict[str, Any]:
        keys = {"access_key_env": "STORE_KEY", "secret_key_env": "STORE_SECRET"}
        place = {"bucket": _BUCKET, "prefix": "in", "endpoint": f"http://127.0.0.1:{self.port}"}
        return {"name": name, "kind": "s3", **place, **keys}


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """An S3 server with one empty bucket; the adapter's files are those below `in/`."""
    command = [sys.executable, "-c", _S3_PROGRAM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            _make_bucket(port)
            yield S3Server(port)
        finally:
            process.kill()


def _make_bucket(port: int) -> None:
    from http.client import HTTPConnection

    connection = HTTPConnection("127.0.0.1", port, timeout=START_DEADLINE_S)
    connection.request("PUT", f"/{_BUCKET}")
    assert connection.getresponse().read() is not None
    connection.close()

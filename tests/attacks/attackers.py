"""python -m tests.attacks.attackers PORT KEY SECONDS [NAME]: every attack at once, or one, from a process of its own.

Each costs the attacker little: payloads are made once, and what is sent slowly is sent slowly.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from time import monotonic

import zstandard

MIB = 1024 * 1024
_BLANK_MIB = 300
_RATIO = 950
"""Just below the limit, which is 1,000: beyond it, an upload is refused before much is read."""
_REST_S = 0.2
NAMES = ("trailers", "blank", "hang-up", "lines", "slow", "stalled", "idle")
_JSON = "content-type: application/json\r\n"


class Attackers:
    """The attackers of one server, with a key of their own."""

    def __init__(self, port: int, key: str, seconds: float) -> None:
        self._port = port
        self._key = f"x-api-key: {key}\r\n"
        self._until = monotonic() + seconds
        self.counts: Counter[str] = Counter()
        """What the server answered, by attack."""
        self._bomb = _compressed_blank() * _BLANK_MIB
        # All have the same id, so nothing of them stays stored.
        line = b'{"custom_id":"a","url":"/v1/x","body":{"model":"m","n":%d}}\n'
        self._lines = zstandard.compress(b"".join(line % number for number in range(20 * MIB // len(line))))

    async def run(self, only: str = "") -> None:
        """Every attack at once, or those of one name."""
        attacks: list[tuple[str, int, Callable[[], Awaitable[str]]]] = [
            ("trailers", 2, lambda: self.trailers("")),
            ("trailers", 2, lambda: self.trailers(self._key)),
            ("blank", 4, lambda: self.upload(self._bomb)),
            ("hang-up", 4, lambda: self.upload(self._bomb[: len(self._bomb) // 5], hang_up=True)),
            ("lines", 2, lambda: self.upload(self._lines)),
            ("slow", 60, self.slow_body),
            ("stalled", 40, self.stalled_reader),
            ("idle", 300, self.idle_stranger),
        ]
        await self._store_large_file()
        chosen = [(count, attack) for name, count, attack in attacks if only in ("", name)]
        await asyncio.gather(*(self._repeat(attack) for count, attack in chosen for _ in range(count)))

    async def _repeat(self, attack: Callable[[], Awaitable[str]]) -> None:
        while monotonic() < self._until:
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + self._until - monotonic()):
                    self.counts[await attack()] += 1
            except TimeoutError:  # which is an OSError, too
                return
            except (OSError, asyncio.IncompleteReadError):
                self.counts["cut off"] += 1
            await asyncio.sleep(_REST_S)

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            yield reader, writer
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def trailers(self, key: str) -> str:
        """Trailers without end."""
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n{key}transfer-encoding: chunked\r\n\r\n0\r\n"
        block = (b"x-t: " + b"a" * 1_000 + b"\r\n") * 64
        async with self._connect() as (reader, writer):
            writer.write(head.encode())
            with suppress(ConnectionError):
                for _ in range(800):
                    writer.write(block)
                    await writer.drain()
            return f"trailers {_status(await reader.readline())}"

    async def upload(self, content: bytes, *, hang_up: bool = False) -> str:
        """A little that is compressed and stands for very much."""
        head = f"PUT /v1/files?purpose=batch HTTP/1.1\r\nhost: a\r\n{self._key}content-length: {len(content)}\r\n\r\n"
        async with self._connect() as (reader, writer):
            writer.write(head.encode() + content)
            await writer.drain()
            if hang_up:
                return "upload hung up"
            return f"upload {_status(await reader.readline())}"

    async def slow_body(self) -> str:
        """Megabytes at once, then as little as is needed to stay."""
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n{self._key}{_JSON}content-length: {6 * MIB}\r\n\r\n"
        async with self._connect() as (reader, writer):
            writer.write(head.encode() + b" " * (4 * MIB))
            await writer.drain()
            answer = asyncio.create_task(reader.readline())
            try:
                while not answer.done():
                    writer.write(b" " * 4_096)
                    await asyncio.wait({answer}, timeout=2)
                return f"slow body {_status(answer.result())}"
            finally:
                answer.cancel()

    async def _store_large_file(self) -> None:
        content = json.dumps({"x": "y" * 100}).encode() * (20 * MIB // 110)
        head = (
            f"PUT /v1/files?purpose=user_data HTTP/1.1\r\nhost: a\r\n{self._key}content-length: {len(content)}\r\n\r\n"
        )
        async with self._connect() as (reader, writer):
            writer.write(head.encode() + content)
            await writer.drain()
            await reader.readuntil(b"\r\n\r\n")
            self._file_id = json.loads(await reader.readuntil(b"}"))["id"]

    async def stalled_reader(self) -> str:
        """A large answer that is never read."""
        head = f"GET /v1/files/{self._file_id}/content HTTP/1.1\r\nhost: a\r\n{self._key}\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1_024)
        try:
            writer.write(head.encode())
            status = _status(await reader.readline())
            if status == "200":
                await asyncio.sleep(60)
            return f"stalled reader {status}"
        finally:
            writer.transport.abort()

    async def idle_stranger(self) -> str:
        """A connection on which nothing is said."""
        async with self._connect() as (reader, _):
            await reader.read(1)
            return "idle stranger closed"


def _compressed_blank() -> bytes:
    """A mebibyte of line ends, and behind it as much that stands for nothing as keeps the ratio."""
    blank = zstandard.compress(b"\n" * MIB)
    nothing = bytes(MIB // _RATIO - len(blank) - 8)
    return blank + b"\x50\x2a\x4d\x18" + len(nothing).to_bytes(4, "little") + nothing


def _status(line: bytes) -> str:
    return line.split()[1].decode() if line else "closed"


async def _main() -> None:
    attackers = Attackers(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
    print("ready", flush=True)
    await attackers.run(*sys.argv[4:])
    print(json.dumps(dict(sorted(attackers.counts.items()))), flush=True)


if __name__ == "__main__":
    asyncio.run(_main())

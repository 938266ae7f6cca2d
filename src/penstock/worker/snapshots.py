"""Snapshots of a worker process's metrics, sent to its parent over a pipe: a length, then as much msgpack."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

import msgspec

from penstock.observe.metrics import ProcessMetrics, Snapshot, take_snapshot
from penstock.tasks import cancel_and_wait

_EVERY_S = 1.0
_LAST_WITHIN_S = 1.0
_LENGTH_BYTES = 4
_MAX_BYTES = 64 * 1024 * 1024

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Snapshot] = msgspec.msgpack.Decoder(Snapshot)


@contextlib.asynccontextmanager
async def send_snapshots(descriptor: int | None) -> AsyncIterator[None]:
    """Send snapshots into the pipe while the context lasts, and a last one at its end. None: there is no pipe."""
    if descriptor is None:
        yield
        return
    os.set_inheritable(descriptor, False)  # a processor may start processes, which must not keep the pipe open
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(_Drained, os.fdopen(descriptor, "wb", buffering=0))
    sending = asyncio.create_task(_send(transport), name="metrics")
    try:
        yield
    finally:
        await cancel_and_wait([sending])
        if not transport.is_closing():  # the parent may be gone
            transport.write(_frame())
        transport.close()
        await asyncio.wait([protocol.closed], timeout=_LAST_WITHIN_S)


async def _send(transport: asyncio.WriteTransport) -> None:
    while not transport.is_closing():
        await asyncio.sleep(_EVERY_S)
        # A parent that stands still is not waited for: the next snapshot says it all.
        if not (transport.is_closing() or transport.get_write_buffer_size()):
            transport.write(_frame())


def _frame() -> bytes:
    content = _encoder.encode(take_snapshot())
    return len(content).to_bytes(_LENGTH_BYTES, "big") + content


class _Drained(asyncio.Protocol):
    """Tells when the pipe is closed: all is written, or the parent is gone."""

    def __init__(self) -> None:
        self.closed = asyncio.get_running_loop().create_future()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 -- why does not matter
        if not self.closed.done():
            self.closed.set_result(None)


class SnapshotPipe:
    """Pipe by which one worker process reports to this process."""

    def __init__(self, metrics: ProcessMetrics) -> None:
        self._metrics = metrics
        self._read, self.descriptor = os.pipe()
        """`descriptor` is the end of the worker process."""
        self._receiving: asyncio.Task[None] | None = None

    def begin(self, process: int) -> None:
        """Receive from this process, which has its end by now."""
        os.close(self.descriptor)
        self._process = process
        self._receiving = asyncio.create_task(self._receive(), name="worker metrics")

    async def end(self) -> None:
        """Take the last snapshot of the process, which has ended."""
        if self._receiving is not None:
            await asyncio.wait([self._receiving], timeout=_LAST_WITHIN_S)
            await cancel_and_wait([self._receiving])
            self._metrics.end(self._process)

    def abandon(self) -> None:
        """Close the pipe: no process was started."""
        os.close(self.descriptor)
        os.close(self._read)

    async def _receive(self) -> None:
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(self._read, "rb", buffering=0)
        )
        try:
            while True:
                length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
                if length > _MAX_BYTES:
                    return
                content = await reader.readexactly(length)
                self._metrics.take(self._process, _decoder.decode(content))
        except (asyncio.IncompleteReadError, msgspec.DecodeError):
            return  # the process has ended, perhaps while it was writing
        finally:
            transport.close()

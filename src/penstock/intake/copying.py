"""Rows on their way into one table: queued by one thread, copied by another.

The server works while the next rows are made, and the reader waits when the queue is full. The copying thread,
its connection and its transaction last only while there is something to copy: nothing is held for an input that is slow
or silent.
"""

from __future__ import annotations

import logging
import select
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from time import monotonic
from typing import NamedTuple

from psycopg import AsyncConnection, Connection
from psycopg.abc import Buffer
from psycopg.copy import LibpqWriter

from penstock.adapt.intake_batch import IntakeBatchSize, MeasuredBatch
from penstock.config import IntakeLimits
from penstock.db import sql
from penstock.intake import sweep
from penstock.intake.rows import find_cut

_SQL = sql.load("penstock.intake", "intake.sql")
_log = logging.getLogger("penstock.intake")

_QUEUE_BYTES = 4 * 1024 * 1024
"""What may wait to be copied."""
_COPY_FROM_BYTES = 1024 * 1024
"""What is worth beginning a COPY for, or going on with one."""
_SEND_BYTES = 256 * 1024
"""Handed to libpq at once: what it cannot send it keeps a copy of."""
_LINGER_S = 0.2
"""How long a transaction stays open for more to come."""
_THREADS = 8
"""Each holds a connection: few enough for the server, enough to keep it busy."""
_SWITCH_S = 0.0005
"""How long a thread that reads may keep the interpreter from one that copies, which wants it after every block sent.
With Python's 5 ms, files come in a quarter slower."""
COPY_SIGNATURE = b"PGCOPY\n\xff\r\n\0" + bytes(8)
COPY_TRAILER = b"\xff\xff"


class PromptWriter(LibpqWriter):
    """Sends each block before it takes the next.

    Left to itself, psycopg piles what the socket does not take into libpq's buffer, which moves all of it at every
    write: three to four times slower.
    """

    def write(self, data: Buffer) -> None:
        super().write(data)
        pgconn = self.connection.pgconn
        while pgconn.flush():
            writable = select.poll()
            writable.register(pgconn.socket, select.POLLOUT)
            writable.poll()


async def copy_rows(connection: AsyncConnection, packed: bytes) -> None:
    """Copy packed rows of templates in the connection's transaction."""
    async with connection.cursor() as cursor, cursor.copy(_SQL["copy_templates"]) as copy:
        await copy.write(COPY_SIGNATURE)
        for at in range(0, len(packed), _SEND_BYTES):
            await copy.write(packed[at : at + _SEND_BYTES])
        await copy.write(COPY_TRAILER)


class _Threads:
    """The threads that copy, for all files. After a batch, a thread goes to the next file that waits for one."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "penstock-copy")
        self._lock = threading.Lock()
        self._busy = 0
        self._usual_switch_s = sys.getswitchinterval()
        self.waiting = 0

    def submit(self, work: Callable[[], None]) -> None:
        with self._lock:
            self._pool.submit(self._run, work)
            self.waiting += 1

    def _run(self, work: Callable[[], None]) -> None:
        with self._lock:
            self.waiting -= 1
            self._busy += 1
            if self._busy == 1:
                self._usual_switch_s = sys.getswitchinterval()
                sys.setswitchinterval(_SWITCH_S)
        try:
            work()
        finally:
            with self._lock:
                self._busy -= 1
                if self._busy == 0:
                    sys.setswitchinterval(self._usual_switch_s)


_threads = _Threads(_THREADS)


class _Block(NamedTuple):
    size: int
    rows: int
    pack: Callable[[], bytes]


def _packed_block(data: bytes, rows: int) -> _Block:
    return _Block(len(data), rows, lambda: data)


class _Batch:
    """A batch under way: what is left of its bounds, and the time its transaction takes but for waits for input."""

    def __init__(self, max_rows: int, max_bytes: int) -> None:
        self.rows_left = max_rows
        self.bytes_left = max_bytes
        self._bounds = max_rows, max_bytes
        self._since = monotonic()

    @property
    def full(self) -> bool:
        return self.rows_left <= 0 or self.bytes_left <= 0

    @contextmanager
    def pause_clock(self) -> Iterator[None]:
        paused = monotonic()
        try:
            yield
        finally:
            self._since += monotonic() - paused

    def add(self, rows: int, size: int) -> None:
        self.rows_left -= rows
        self.bytes_left -= size

    def measure(self, wait_s: float) -> MeasuredBatch:
        rows, size = self._bounds
        seconds = monotonic() - self._since
        return MeasuredBatch(rows - self.rows_left, size - self.bytes_left, seconds, wait_s)


class CopyQueue:
    """Copies rows of one file into one table, in batches that commit on their own.

    Filled by one thread. Its calls raise what the copying met, also since an earlier call.
    """

    def __init__(
        self, conninfo: str, statement: bytes, limits: IntakeLimits, hold: Callable[[Connection], None]
    ) -> None:
        """`hold` begins each transaction: it makes sure that the file still takes rows."""
        self._conninfo = conninfo
        self._statement = statement
        self._limits = limits
        self._hold = hold
        self._batch_size = IntakeBatchSize(limits)
        """Used by the thread that copies."""
        self._wait_s = 0.0
        """For a thread and its connection, before the next batch."""
        # What the two threads share, under the lock of `_changed`.
        self._changed = threading.Condition()
        self._blocks: deque[_Block] = deque()
        self._queued_bytes = 0
        self._queued_rows = 0
        self._copying = False
        """A thread copies, or is about to."""
        self._hurried = False
        """The reader waits for all that is queued."""
        self._failure: BaseException | None = None

    def put(self, size: int, rows: int, pack: Callable[[], bytes]) -> None:
        """Queue so many rows of that size, which are packed for COPY when their turn comes."""
        with self._changed:
            self._changed.wait_for(lambda: self._queued_bytes < _QUEUE_BYTES or not self._copying)
            self._raise_failure()
            self._blocks.append(_Block(size, rows, pack))
            self._queued_bytes += size
            self._queued_rows += rows
            if not self._copying and self._is_worth_copying():
                self._start_copying()
            self._changed.notify_all()

    @property
    def held_bytes(self) -> int:
        """Bytes that wait to be copied."""
        return self._queued_bytes

    def hurry(self) -> None:
        """Copy all that is queued, however little it is."""
        with self._changed:
            self._hurried = True
            self._changed.notify_all()

    def flush(self, session: Callable[[], AbstractContextManager[Connection]]) -> None:
        """Wait until all that is queued is committed. What is too little for a thread is copied in the session, at
        once: in batches that begin small, a small file would take longer."""
        self.hurry()
        self._wait_for_thread()
        self._raise_failure()
        if self._blocks:
            limits = self._limits
            with session() as connection:
                while self._blocks:
                    self._copy_batch(connection, limits.intake_max_rows, limits.intake_max_batch_bytes)
        self._hurried = False

    def drop(self) -> None:
        """Copy nothing more. When this returns, no thread is at it."""
        with self._changed:
            self._blocks.clear()
            self._queued_bytes = self._queued_rows = 0
        self.hurry()
        self._wait_for_thread()

    def _wait_for_thread(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._copying)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _start_copying(self) -> None:
        _threads.submit(partial(self._copy, monotonic()))
        self._copying = True

    def _copy(self, wanted_at: float) -> None:
        """Copy batch after batch, until nothing more comes or a thread is wanted elsewhere."""
        failure: BaseException | None = None
        try:
            with sweep.connected(self._conninfo) as connection:
                self._wait_s = monotonic() - wanted_at
                while self._copy_measured_batch(connection) and not _threads.waiting:
                    pass
        except BaseException as error:  # raised again where the next call is made
            failure = error
        with self._changed:
            self._copying, self._failure = False, failure
            self._changed.notify_all()
            if failure is None and self._is_worth_copying():
                self._start_copying()

    def _copy_measured_batch(self, connection: Connection) -> bool:
        """Copy a batch, and learn from it how large the next may be; False once nothing more comes."""
        if not self._wait_for_more():
            return False
        size = self._batch_size
        rows = size.rows
        batch = self._copy_batch(connection, size.rows, size.bytes)
        size.observe(batch.measure(self._wait_s))
        self._wait_s = 0.0
        if size.rows < rows:
            _log.info("batches of an intake: %d rows or %d bytes (%s)", size.rows, size.bytes, size.reason)
        return batch.full

    def _copy_batch(self, connection: Connection, max_rows: int, max_bytes: int) -> _Batch:
        """Copy what is queued, and what comes meanwhile, in one transaction."""
        batch = _Batch(max_rows, max_bytes)
        with connection.transaction(), connection.cursor() as cursor:
            self._hold(connection)
            with cursor.copy(self._statement, writer=PromptWriter(cursor)) as copy:
                copy.write(COPY_SIGNATURE)
                while not batch.full and (data := self._next(batch)) is not None:
                    for at in range(0, len(data), _SEND_BYTES):
                        copy.write(data[at : at + _SEND_BYTES])
                copy.write(COPY_TRAILER)
        return batch

    def _next(self, batch: _Batch) -> bytes | None:
        """The next rows for the batch, packed: no more than it takes."""
        with batch.pause_clock():
            with self._changed:
                if not self._blocks and not self._wait_for_more():
                    return None
                block = self._take_block(batch)
                self._changed.notify_all()
            data = block.pack()
        batch.add(block.rows, len(data))
        return data

    def _take_block(self, batch: _Batch) -> _Block:
        block = self._blocks.popleft()
        if block.rows > 1 and (block.rows > batch.rows_left or block.size > batch.bytes_left):
            data = block.pack()
            cut, rows = find_cut(data, batch.rows_left, batch.bytes_left)
            if rows < block.rows:
                self._blocks.appendleft(_packed_block(data[cut:], block.rows - rows))
                block = _packed_block(data[:cut], rows)
        self._queued_bytes -= block.size
        self._queued_rows -= block.rows
        return block

    def _wait_for_more(self) -> bool:
        """Whether enough is there, or comes soon."""
        with self._changed:
            linger_s = 0.0 if _threads.waiting else _LINGER_S
            self._changed.wait_for(lambda: self._hurried or self._is_worth_copying(), linger_s)
            return self._is_worth_copying()

    def _is_worth_copying(self) -> bool:
        if self._hurried:
            return bool(self._blocks)
        return self._queued_bytes >= _COPY_FROM_BYTES or self._queued_rows >= self._limits.intake_max_rows

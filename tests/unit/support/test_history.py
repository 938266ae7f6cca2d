"""Histories: nothing written is lost, whatever became of the writer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.history import BrokenHistoryError, Event, HistoryWriter, digest_of, in_order, read_history
from tests.support.wait import wait_until


def test_what_is_written_is_read_in_order_of_time(tmp_path: Path) -> None:
    with HistoryWriter(tmp_path, "a") as a, HistoryWriter(tmp_path, "b") as b:
        a.record("invoke", "upload", "u1", {"lines": 2})
        b.record("info", "kill", "worker-1")
        a.record("ok", "upload", "u1")
    events = read_history(tmp_path)
    assert [(event.process, event.type, event.f, event.key) for event in events] == [
        ("a", "invoke", "upload", "u1"),
        ("b", "info", "kill", "worker-1"),
        ("a", "ok", "upload", "u1"),
    ]
    assert events[0].value == {"lines": 2}
    assert events[0].t <= events[1].t <= events[2].t


def test_a_name_used_again_gets_a_file_and_a_process_of_its_own(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        with HistoryWriter(tmp_path, "upstream") as writer:
            writer.record("info", "started")
            names.append(writer.process)
    assert names == ["upstream", "upstream.2", "upstream.3"]
    assert sorted(event.process for event in read_history(tmp_path)) == names


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    with HistoryWriter(tmp_path, "a") as writer:
        writer.record("info", "one")
        writer.record("info", "two")
    whole = writer.path.read_bytes()
    for kept in range(whole.index(b"\n") + 1, len(whole)):
        writer.path.write_bytes(whole[:kept])
        assert [event.f for event in read_history(tmp_path)] == ["one"]


def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    with HistoryWriter(tmp_path, "a") as writer:
        writer.record("info", "one")
        writer.record("info", "two")
    writer.path.write_bytes(writer.path.read_bytes().replace(b'"two"', b'"two', 1) + b"{}\n")
    with pytest.raises(BrokenHistoryError, match=r"a\.jsonl, line 2"):
        read_history(tmp_path)


def test_an_unknown_type_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"t": 1.0, "process": "a", "type": "maybe", "f": "upload"}\n')
    with pytest.raises(BrokenHistoryError, match="line 1"):
        read_history(tmp_path)


def test_threads_share_a_writer(tmp_path: Path) -> None:
    with HistoryWriter(tmp_path, "a") as writer:

        def write(thread: int) -> None:
            for number in range(500):
                writer.record("info", "note", f"{thread}-{number}")

        threads = [threading.Thread(target=write, args=[thread]) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {event.key for event in read_history(tmp_path)} == {f"{a}-{b}" for a in range(4) for b in range(500)}


_WRITES_FOR_EVER = """
import sys
from itertools import count
from pathlib import Path
from tests.support.history import HistoryWriter

writer = HistoryWriter(Path(sys.argv[1]), "doomed")
for number in count():
    writer.record("info", "note", str(number), {"padding": "x" * 1000})
"""


def test_a_killed_writer_leaves_every_line_it_finished(tmp_path: Path) -> None:
    path = tmp_path / "doomed.jsonl"
    with subprocess.Popen([sys.executable, "-c", _WRITES_FOR_EVER, str(tmp_path)]) as process:
        wait_until(lambda: path.exists() and path.stat().st_size > 200_000, 30)
        os.kill(process.pid, signal.SIGKILL)
    keys = [event.key for event in read_history(tmp_path)]
    assert len(keys) > 100
    assert keys == [str(number) for number in range(len(keys))]


def test_events_of_one_time_keep_their_order() -> None:
    events = [Event(2.0, "a", "info", "third"), Event(1.0, "a", "info", "first"), Event(1.0, "a", "info", "second")]
    assert [event.f for event in in_order(events)] == ["first", "second", "third"]


def test_digests_differ_with_their_bytes() -> None:
    assert digest_of(b"a") == digest_of(b"a") != digest_of(b"b")
    assert digest_of(b"") != ""

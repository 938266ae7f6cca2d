from __future__ import annotations

from pathlib import Path

import pytest

from penstock.observe.machine import read_figures


@pytest.mark.parametrize(
    ("limit", "used", "seen"),
    [
        ("1000\n", "700\n", (1000, 700)),
        ("max\n", "700\n", (None, 0)),
        (None, None, (None, 0)),
        ("1000\n", None, (None, 0)),
    ],
)
def test_the_limit_of_a_control_group(
    tmp_path: Path, limit: str | None, used: str | None, seen: tuple[int | None, int]
) -> None:
    for name, text in (("memory.max", limit), ("memory.current", used)):
        if text is not None:
            (tmp_path / name).write_text(text)
    figures = read_figures(loop_lag_s=-0.1, cgroup=tmp_path)
    assert (figures.limit_bytes, figures.used_bytes, figures.loop_lag_s) == (*seen, 0.0)
    assert 0 < figures.available_bytes <= figures.total_bytes

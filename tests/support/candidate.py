"""A process that stands for the lead and writes down every moment at which it found itself leading.

    python -m tests.support.candidate CONNINFO GRACE_S

The moments are those of the machine's monotonic clock, which all its processes share.
"""

from __future__ import annotations

import asyncio
import re
import sys
from itertools import pairwise
from pathlib import Path
from time import monotonic

from penstock.db.leader import Leader

_LOOK_S = 0.002
_MOMENT = re.compile(r"^(\d+\.\d{6})\n", re.MULTILINE)


async def _stand(conninfo: str, grace_s: float) -> None:
    async with Leader(conninfo, "test", grace_s=grace_s) as leader:
        while True:
            # Taken before the look: a process may stand still at any point of this.
            now = monotonic()
            if leader.leads:
                print(f"{now:.6f}", flush=True)
            await asyncio.sleep(_LOOK_S)


def moments(log: Path) -> list[float]:
    """When it found itself leading."""
    # Its log has other lines too, and the last may be half written.
    return [float(line) for line in _MOMENT.findall(log.read_text())]


def changes(moments_of: list[list[float]]) -> int:
    """How often the lead went from one to another. Two who lead at once take turns in this, many times."""
    marks = sorted((moment, who) for who, moments in enumerate(moments_of) for moment in moments)
    return sum(a[1] != b[1] for a, b in pairwise(marks))


if __name__ == "__main__":
    asyncio.run(_stand(sys.argv[1], float(sys.argv[2])))

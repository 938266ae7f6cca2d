"""Standard output of a run: for its results alone, whatever its processor prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


@contextmanager
def keep_stdout(*, apart: bool) -> Iterator[TextIO]:
    """Yield standard output. Where it is to be kept `apart`, everything else that is written to it meanwhile, by this
    process or by processes it starts, goes to standard error."""
    if not apart:
        yield sys.stdout
        return
    sys.stdout.flush()
    printed_by_others, kept = sys.stdout, os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        with os.fdopen(os.dup(kept), "w", encoding="utf-8", errors="surrogateescape") as results:
            yield results
    finally:
        sys.stderr.flush()
        os.dup2(kept, 1)
        os.close(kept)
        sys.stdout = printed_by_others

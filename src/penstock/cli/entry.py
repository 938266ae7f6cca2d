"""Entry of the program: an interrupt ends it with its exit code, even while it is still being imported."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from penstock.cli.main import main as run

        run()
    except KeyboardInterrupt:
        print("penstock: interrupted", file=sys.stderr)
        sys.exit(130)

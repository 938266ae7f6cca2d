"""Writes docs/configuration.md from the settings themselves."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from penstock import config

HEAD = """# Configuration

Every setting has one name. In a TOML file (`--config FILE`, or `PENSTOCK_CONFIG`) it is a key; in the environment it
is the name in capitals behind `PENSTOCK_`; on the command line it is `--set NAME=VALUE`. The command line wins over
the environment, the environment over the file, the file over the default. A value outside its range is refused with a
message that names the place.

| where | environment | command line | default | what it is |
|---|---|---|---|---|
| `database_url` | `PENSTOCK_DATABASE_URL` | `--database-url URL` | the embedded server | a PostgreSQL, 15 or later |
| `data_dir` | `PENSTOCK_DATA_DIR` | `--data-dir DIR` | `./.penstock` | where the embedded server lives |
| `public_url` | `PENSTOCK_PUBLIC_URL` | `serve --public-url URL` | none | where clients reach the server |
| `root_path` | `PENSTOCK_ROOT_PATH` | `serve --root-path PATH` | none | what a proxy puts before every path |
| `webhook_allow` | `PENSTOCK_WEBHOOK_ALLOW` | | none | private networks and hosts that webhooks may go to (list) |
| `secrets_key_file` | `PENSTOCK_SECRETS_KEY_FILE` | | in `data_dir` | keys that [seal secrets](security.md) |
| `[[providers]]` | | `serve --base-url URL` | none | the endpoints that serve models: see [serve.md](serve.md) |
| `[[adapters]]` | | | none | places where files arrive by themselves: see [jobs.md](jobs.md) |

The file is the one named by `--config`, else by `PENSTOCK_CONFIG`, else `penstock.toml` in the data directory.

`--concurrency N` is short for `--set concurrency=N`. This page is written by `make docs`; a test keeps it current.
"""

TITLES = {
    "intake": "Intake: what a file may contain",
    "tables": "Tables and images: what a job's file may contain",
    "claim": "Claims: how much a worker takes at once",
    "settle": "The coalescing writer",
    "samples": "Samples for charts",
    "dispatch": "Calls",
    "retry": "Retries",
    "liveness": "Liveness",
    "database": "Database",
    "serve": "The HTTP server",
    "sessions": "Sessions",
    "scan": "Adapters",
    "erase": "Erasure",
    "quotas": "Limits per owner",
    "observe": "Logs and readiness",
    "webhooks": "Webhooks",
    "metrics": "Metrics",
}


def page() -> str:
    parts = [HEAD]
    for group, knobs in groupby(config.knobs(), key=lambda knob: knob.group):
        parts.append(
            f"\n## {TITLES[group]}\n\n| setting | environment | default | range | meaning |\n|---|---|---|---|---|\n"
        )
        parts += [
            f"| `{knob.name}` | `{knob.variable}` | {config.plain(knob.default)} | {knob.span} | {knob.about} |\n"
            for knob in knobs
        ]
    return "".join(parts)


if __name__ == "__main__":
    target = Path(__file__).parent.parent / "docs" / "configuration.md"
    target.write_text(page(), "utf-8")
    print(f"wrote {target.name}")

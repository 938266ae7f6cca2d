"""`make conformance`: this folder's tests with every major version of the official clients, and with what is built on
them, each in an environment of its own beside `.venv`, all against one server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from penstock.db.embedded import postgres
from tests.support.conformance import official_ground

ROOT = Path(__file__).parents[2]
TOOLS = ("pytest", "pytest-timeout")
# name -> (what to install, the tests it is for)
CLIENTS = {
    "openai-3": (("openai>=3,<4",), ("test_openai.py", "test_openai_webhooks.py", "test_coverage.py")),
    "openai-2": (("openai>=2,<3",), ("test_openai.py", "test_openai_webhooks.py", "test_coverage.py")),
    "openai-1": (("openai>=1,<2",), ("test_openai.py", "test_openai_webhooks.py", "test_coverage.py")),
    "anthropic": (("anthropic",), ("test_anthropic.py",)),
    "anthropic-older": (("anthropic<2",), ("test_anthropic.py",)),
    "litellm": (("litellm",), ("test_litellm.py",)),
    "curator": (("bespokelabs-curator",), ("test_curator.py",)),
    "instructor": (("instructor", "anthropic"), ("test_instructor.py",)),
    "langchain": (("langchain-openai",), ("test_langchain.py",)),
    "llama-index": (("llama-index-llms-openai",), ("test_llama_index.py",)),
    "any-llm": (("any-llm-sdk[openai]",), ("test_any_llm.py",)),
    "autobatcher": (("autobatcher",), ("test_autobatcher.py",)),
    "frames": (("pandas", "polars", str(ROOT)), ("test_frames.py",)),
}
# What is named in the page: distributions, and what of them is tried.
FRAMEWORKS = {
    "litellm": "files and batches: create, retrieve, content, list, cancel, delete",
    "bespokelabs-curator": "`LLM(..., batch=True, backend='openai')` over a list of prompts",
    "instructor": "`BatchProcessor` of OpenAI and of Anthropic: submit, status, results, list",
    "langchain-openai": "`ChatOpenAI`: invoke, stream, batch, async, and in a session",
    "llama-index-llms-openai": "`OpenAI`: chat, stream, async",
    "any-llm-sdk": "a completion; batches: create, retrieve, results, list",
    "autobatcher": "`BatchOpenAI`: single calls that become a batch",
    "pandas": "rows of a frame for `penstock.map`",
    "polars": "rows of a frame for `penstock.map`",
}


def environment(name: str, packages: tuple[str, ...]) -> Path:
    """The python of an environment with these packages, made or brought up to date."""
    place = ROOT / ".venv" / "conformance" / name
    python = place / "bin" / "python"
    uv = Path(sys.executable).with_name("uv")
    if not python.exists():
        subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, place], check=True)
    install: list[str | Path] = [
        uv,
        "pip",
        "install",
        "--quiet",
        "--system-certs",
        "--upgrade",
        "--python",
        python,
        *packages,
        *TOOLS,
    ]
    subprocess.run(install, check=True)
    return python


def tried(name: str, python: Path, tests: tuple[str, ...], env: dict[str, str]) -> bool:
    paths: list[str | Path] = [str(Path(__file__).with_name(test)) for test in tests]
    command: list[str | Path] = [
        python,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-W",
        "default",
        "--confcutdir",
        str(Path(__file__).parent),
    ]
    print(f"== {name}", flush=True)
    return subprocess.run(command + paths, cwd=ROOT, env=env, check=False).returncode == 0


METHODS = """
import importlib.metadata, json, sys
package, resources = sys.argv[1], json.loads(sys.argv[2])
client = getattr(__import__(package), {"openai": "OpenAI", "anthropic": "Anthropic"}[package])(api_key="none")
found = []
for resource in resources:
    part = client
    for name in resource.split("."):
        part = getattr(part, name, None)
    for name in dir(type(part)) if part is not None else []:
        if not name.startswith(("_", "with_")) and callable(getattr(type(part), name)):
            found.append(f"{resource}.{name}")
print(json.dumps([importlib.metadata.version(package), found]))
"""
RESOURCES = {
    "openai": ["files", "uploads", "uploads.parts", "batches", "webhooks", "webhooks.event_types"],
    "anthropic": ["messages.batches", "beta.messages.batches"],
}
PAGE = """# Official clients

Every call the official clients have for files, uploads, batches, webhooks and message batches, sync and async, success
and every class of error, made against a real server by `make conformance`. A dash: this version does not have the call.
What is built on them is tried in the same run, each in an environment of its own: see the last table.

This page is written by `make conformance`, when all of it is green.
"""


def told(python: Path, package: str) -> tuple[str, set[str]]:
    """A client's version and the methods it has."""
    command: list[str | Path] = [python, "-c", METHODS, package, json.dumps(RESOURCES[package])]
    version, methods = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return version, set(methods)


def write_page(environments: dict[str, Path]) -> None:
    """The matrix: each method, each version."""
    page = PAGE
    for package in RESOURCES:
        clients = [told(python, package) for name, python in environments.items() if name.startswith(package)]
        page += f"\n| `{package}` | {' | '.join(version for version, _ in clients)} |\n|---|{'---|' * len(clients)}\n"
        for method in sorted(set().union(*(methods for _, methods in clients))):
            page += f"| `{method}` | {' | '.join('yes' if method in methods else '–' for _, methods in clients)} |\n"
    page += "\n| built on them | version | what is tried |\n|---|---|---|\n"
    for distribution, about in FRAMEWORKS.items():
        page += f"| `{distribution}` | {version_of(distribution, environments)} | {about} |\n"
    (ROOT / "docs" / "conformance.md").write_text(page, "utf-8")


def version_of(distribution: str, environments: dict[str, Path]) -> str:
    """The version in the environment that is for it."""
    name = next(name for name, (packages, _) in CLIENTS.items() if _is_for(packages, distribution))
    ask = f"import importlib.metadata; print(importlib.metadata.version({distribution!r}))"
    command: list[str | Path] = [environments[name], "-c", ask]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _is_for(packages: tuple[str, ...], distribution: str) -> bool:
    return any(package.split("[")[0] == distribution for package in packages)


def main() -> int:
    wanted = sys.argv[1:] or list(CLIENTS)
    failed = []
    environments = {}
    with tempfile.TemporaryDirectory(prefix="conformance") as directory:
        place = Path(directory)
        with postgres.acquire(place / "pg") as server, official_ground(place, server.conninfo) as ground:
            env = {
                **os.environ,
                "CONFORMANCE_URL": ground.url,
                "CONFORMANCE_KEY": ground.key,
                "CONFORMANCE_OTHER_KEY": ground.other_key,
            }
            for name in wanted:
                packages, tests = CLIENTS[name]
                environments[name] = environment(name, packages)
                if not tried(name, environments[name], tests, env):
                    failed.append(name)
    if not failed and set(environments) == set(CLIENTS):
        write_page(environments)
    print(f"failed: {', '.join(failed)}" if failed else f"all green: {', '.join(wanted)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

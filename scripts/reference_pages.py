"""Writes the reference of docs/reference/ from the code: the commands, the HTTP API, and the library."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

import penstock
from penstock.api.app import endpoints
from penstock.api.openapi import document
from penstock.cli.main import main

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
_WRITTEN = "This page is written by `make docs`; a test keeps it current.\n"
_GROUPS = {
    "/v1/files": "Files",
    "/v1/uploads": "Uploads in parts",
    "/v1/batches": "Batches",
    "/v1/messages": "Message batches",
    "/v1/webhooks": "Webhooks",
    "/v1/sessions": "Sessions",
    "/v1/events": "CloudEvents",
    "/v1/": "Models and calls",
    "/api/jobs": "Jobs",
    "/api/": "Operation",
    "/": "Health and metrics",
}


def commands_page() -> str:
    """Every command with its help, as the program prints it."""
    page = (
        "# Commands\n\nWhat `--help` of every command prints. Exit codes: 0 all done, 1 operational error, 2 wrong\n"
        "usage or input, 3 some rows failed, 4 paused for a person, 130 interrupted. " + _WRITTEN
    )
    for path, command in _walk(main, ("penstock",)):
        context = click.Context(command, info_name=" ".join(path), max_content_width=100, terminal_width=100)
        page += f"\n## {' '.join(path)}\n\n```\n{command.get_help(context).rstrip()}\n```\n"
    return page


def _walk(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            if found is not None and not found.hidden:
                yield from _walk(found, (*path, name))


def api_page() -> str:
    """Every operation of the API, by what it is about."""
    page = (
        "# HTTP API\n\nEvery operation of a server. `GET /openapi.json` has the same with all types, for the server\n"
        "that answers it. Official clients of OpenAI and Anthropic work as they are:\n"
        "[conformance](../conformance.md). " + _WRITTEN
    )
    groups: dict[str, list[str]] = {title: [] for title in _GROUPS.values()}
    for path, operations in document(endpoints())["paths"].items():
        title = next(title for prefix, title in _GROUPS.items() if path.startswith(prefix))
        for method, operation in operations.items():
            about = str(operation.get("summary", "")).replace("|", "\\|")
            groups[title].append(f"| `{method.upper()} {path}` | {about} |\n")
    for title, rows in groups.items():
        if rows:
            page += f"\n## {title}\n\n| operation | what it does |\n|---|---|\n{''.join(rows)}"
    return page


def library_page() -> str:
    """Everything that is public in `penstock`."""
    page = (
        "# Library\n\nEverything in `penstock.__all__`; nothing else is promised. How it is used: [the tutorial]"
        "(../tutorial.md) and\n[Python functions](../howto/functions.md). " + _WRITTEN
    )
    for name in sorted(penstock.__all__, key=str.lower):
        if name == "__version__":
            continue
        found = getattr(penstock, name)
        page += f"\n## penstock.{name}\n\n"
        page += _class(name, found) if inspect.isclass(found) else _function(f"penstock.{name}", found)
    return page


def _function(name: str, function: Callable[..., Any]) -> str:
    return f"```python\n{name}{_signature(function)}\n```\n\n{_text(function)}\n"


def _signature(function: Callable[..., Any]) -> str:
    signature = inspect.signature(inspect.unwrap(function))
    parts: list[str] = []
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        if name != "self":
            default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
            parts.append(f"{name}: {parameter.annotation}{default}")
    result = "" if signature.return_annotation in (signature.empty, "None") else f" -> {signature.return_annotation}"
    text = f"({', '.join(parts)}){result}"
    return text if len(text) <= 80 else "(\n    " + ",\n    ".join(parts) + f",\n){result}"


def _class(name: str, kind: type) -> str:
    page = f"{_text(kind)}\n"
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind) if not field.name.startswith("_")]
        page += f"\nFields: {', '.join(f'`{field}`' for field in names)}.\n"
    elif issubclass(kind, Exception):
        page += f"\n```python\npenstock.{name}{_signature(kind)}\n```\n"
    for member, found in vars(kind).items():
        if member.startswith("_"):
            continue
        if isinstance(found, property) and inspect.getdoc(found):
            page += f"\n- `{member}`: {' '.join((inspect.getdoc(found) or '').split())}\n"
        elif inspect.isfunction(found):
            page += f"\n```python\n{member}{_signature(found)}\n```\n\n{_text(found)}\n"
    return page


def _text(found: object) -> str:
    return inspect.getdoc(found) or ""


PAGES: dict[str, Callable[[], str]] = {"cli.md": commands_page, "api.md": api_page, "library.md": library_page}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), "utf-8")

"""Routes: which endpoints a path has, and the readers of their queries and bodies."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from starlette.routing import compile_path

from penstock.api.endpoint import Endpoint
from penstock.api.reading import BodyReader, QueryReader

_MAX_REMEMBERED_PATHS = 1_000
_MAX_REMEMBERED_CHARS = 200


class Reader:
    """Readers of one endpoint's query and body."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.query: QueryReader[Any] | None = QueryReader(endpoint.query) if endpoint.query else None
        self.body: BodyReader[Any] | None = BodyReader(endpoint.body) if endpoint.body is not None else None


class Routes:
    """Routes: finds the endpoints of a path, by method, and the path's variable parts."""

    def __init__(self, declared: Iterable[Endpoint]) -> None:
        paths: dict[str, dict[str, Reader]] = {}
        for endpoint in declared:
            methods = paths.setdefault(endpoint.path, {})
            if endpoint.method in methods:
                raise ValueError(f"{endpoint.method} {endpoint.path} is declared twice")
            methods[endpoint.method] = Reader(endpoint)
        self._plain = {path: methods for path, methods in paths.items() if "{" not in path}
        variable = [entry for entry in paths.items() if "{" in entry[0]]
        # Where two could match, the one with fewer variable parts goes first.
        variable.sort(key=lambda entry: [("{" in part, ":path" in part) for part in entry[0].split("/")])
        self._found: dict[str, tuple[dict[str, Reader], dict[str, str]]] = {}
        self._variable: dict[str, list[tuple[re.Pattern[str], dict[str, Reader]]]] = {}
        for path, methods in variable:
            self._variable.setdefault(_family(path), []).append((compile_path(path)[0], methods))

    def find(self, path: str) -> tuple[dict[str, Reader], dict[str, str]] | None:
        if path in self._plain:
            return self._plain[path], {}
        if (known := self._found.get(path)) is not None:
            return known
        for pattern, methods in self._variable.get(_family(path), ()):
            if match := pattern.match(path):
                found = methods, match.groupdict()
                if len(path) <= _MAX_REMEMBERED_CHARS:
                    if len(self._found) >= _MAX_REMEMBERED_PATHS:
                        self._found.clear()
                    self._found[path] = found
                return found
        return None


def _family(path: str) -> str:
    """The part of a path that is fixed in every route: `/v1/files`."""
    return "/".join(path.split("/", 3)[:3])

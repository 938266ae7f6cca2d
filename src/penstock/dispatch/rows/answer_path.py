"""Paths into a JSON answer: `a.b[0].c`, `a[-1]`, `a["odd name"]`; `a[*].b` is the list of every element's b, and an
empty path the whole answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec

from penstock.errors import UsageError

_MAX_STEPS = 32
_STEP = re.compile(
    r"""(?P<dot>\.?)(?P<name>[^.\[\]"'\s]+)
    | \[(?P<index>-?[0-9]{1,9})\]
    | \[(?P<each>\*)\]
    | \[(?P<text>"(?:[^"\\]|\\.)*")\]""",
    re.VERBOSE,
)


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


class _Each:
    pass


MISSING: Final = _Missing()
"""What is found where nothing is."""
_EACH: Final = _Each()

Step = str | int | _Each


@lru_cache(1_000)
def parse_path(text: str) -> tuple[Step, ...]:
    """The steps of a path. Raises UsageError."""
    steps: list[Step] = []
    at = 0
    while at < len(text):
        found = _STEP.match(text, at)
        # A dot stands between two steps, and only there.
        if found is None or (found["name"] is not None and (found["dot"] == ".") != (at > 0)):
            raise UsageError(f"'{text}' is not a path", hint='A path is written as a.b[0].c, a[*].b or a["odd name"].')
        steps.append(_step(found))
        at = found.end()
    if len(steps) > _MAX_STEPS:
        raise UsageError(f"'{text}' has {len(steps)} steps", hint=f"A path has at most {_MAX_STEPS}.")
    return tuple(steps)


def _step(found: re.Match[str]) -> Step:
    if found["name"] is not None:
        return found["name"]
    if found["index"] is not None:
        return int(found["index"])
    if found["each"] is not None:
        return _EACH
    try:
        return msgspec.json.decode(found["text"], type=str)
    except msgspec.DecodeError as error:
        raise UsageError(f"{found['text']} is not a JSON string: {error}", hint='For example a["odd name"].') from None


def find(answer: Any, path: str) -> Any:
    """What the path leads to, or MISSING. A list that `[*]` makes has null where an element lacks the rest."""
    return _follow(answer, parse_path(path))


def _follow(value: Any, steps: Sequence[Step]) -> Any:
    for at, step in enumerate(steps):
        if isinstance(step, _Each):
            return _each(value, steps[at + 1 :])
        if isinstance(step, str):
            value = value.get(step, MISSING) if isinstance(value, dict) else MISSING
        else:
            inside = isinstance(value, list) and -len(value) <= step < len(value)
            value = value[step] if inside else MISSING
        if value is MISSING:
            break
    return value


def _each(value: Any, rest: Sequence[Step]) -> Any:
    if not isinstance(value, list):
        return MISSING
    found = [_follow(element, rest) for element in value]
    if any(isinstance(step, _Each) for step in rest):  # one list, however many stars
        return [each for inner in found if inner is not MISSING for each in inner]
    return [None if each is MISSING else each for each in found]

"""Paths below an adapter's root, and the pattern that says which of them are files to take."""

from __future__ import annotations

import re

MAX_PATH_BYTES = 1024
_UNSAFE = re.compile(r"[\x00-\x1f\x7f\\]")


def explain_bad_path(path: str) -> str | None:
    """Reason why a path cannot be one below an adapter's root; None if it can."""
    try:
        size = len(path.encode())
    except UnicodeEncodeError:
        return "it is not UTF-8 text"
    if not 1 <= size <= MAX_PATH_BYTES:
        return f"it has {size:,} bytes; from 1 to {MAX_PATH_BYTES:,} are allowed"
    if _UNSAFE.search(path):
        return "it has a backslash or a control character"
    if any(part in ("", ".", "..") for part in path.split("/")):
        return "it is not a relative path of plain names, such as 2024/may.csv"
    return None


class Pattern:
    """Pattern of paths: `*` stands for any characters of one name, `?` for one, `**` for any number of directories.
    Names that begin with a dot never match."""

    def __init__(self, text: str) -> None:
        """Raises ValueError, with the reason, if the text is no pattern."""
        parts = text.split("/")
        if reason := explain_bad_path(text):
            raise ValueError(reason)
        if "**" in parts[-1] or any("**" in part and part != "**" for part in parts):
            raise ValueError("'**' is a directory of its own, as in **/*.csv")
        self.text = text
        self._depth = None if "**" in parts else len(parts)
        self._expression = re.compile(
            "".join(r"(?:[^/]+/)*" if part == "**" else _translate(part) + "/" for part in parts[:-1])
            + _translate(parts[-1])
        )

    @property
    def deep(self) -> bool:
        """Whether it can match files in directories below the root."""
        return self._depth != 1

    def matches(self, path: str) -> bool:
        return not path.startswith(".") and "/." not in path and self._expression.fullmatch(path) is not None

    def enters(self, directory: str) -> bool:
        """Whether files in this directory could match."""
        if directory.startswith(".") or "/." in directory:
            return False
        return self._depth is None or directory.count("/") + 1 < self._depth


def _translate(part: str) -> str:
    return "".join({"*": "[^/]*", "?": "[^/]"}.get(character, re.escape(character)) for character in part)

"""Processors named as `module:function`, or by an entry point: found and loaded, an error text for every failure."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from difflib import get_close_matches
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.errors import UsageError

ENTRY_POINTS = "penstock.processors"
"""Group of entry points by which an installed package offers processors."""


_A = {"item": "an", "row": "a"}


def load_processor(spec: str, option: str = "--processor") -> Callable[..., Any]:
    """The function or class that `module:function` names. The working directory is importable. Errors begin with the
    option that names it."""
    place = f"{option} {spec}"
    module_name, colon, path = spec.partition(":")
    if not colon or not module_name or not path:
        raise UsageError(
            f"{place}: not of the form module:function",
            hint=f"For a function 'clean' in ./rows.py write {option} rows:clean",
        )
    if module_name.endswith(".py") or "/" in module_name:
        raise UsageError(
            f"{place}: '{module_name}' is a path, not a module name",
            hint=f"Write {option} {Path(module_name).stem}:{path} from the folder that holds it.",
        )
    found: Any = _import(place, module_name)
    for name in path.split("."):
        if not hasattr(found, name):
            raise UsageError(f"{place}: {module_name} has no '{name}'", hint=_suggest_name(found, name))
        found = getattr(found, name)
    if not callable(found):
        raise UsageError(
            f"{place}: '{path}' is of type {type(found).__name__}, not a function",
            hint="A processor is a function that takes an item and returns its answer.",
        )
    check_takes_one(place, path, found, "item")
    return found  # type: ignore[no-any-return]


def check_takes_one(place: str, path: str, found: Any, noun: str) -> None:
    """Refuse what cannot be called with one thing alone, named by the noun: otherwise every row would be tried, and
    fail."""
    of_class = inspect.isclass(found)
    if of_class and not any("__call__" in vars(base) for base in found.__mro__):
        raise UsageError(
            f"{place}: the class '{path}' has no __call__",
            hint=f"Give it a method __call__(self, {noun}) that returns the {noun}'s answer.",
        )
    try:
        signature = inspect.signature(found.__call__ if of_class else found)
    except (TypeError, ValueError):
        return  # functions written in C need not tell
    try:
        signature.bind(*(("self", noun) if of_class else (noun,)))
    except TypeError as error:
        raise UsageError(
            f"{place}: '{path}{signature}' cannot be called with {_A[noun]} {noun}: {error}",
            hint=f"It takes one argument, the {noun}, and returns its answer; others need defaults.",
        ) from None


def find_entry_point(name: str, option: str) -> str:
    """The `module:function` of an installed package's entry point. The error begins with the option that names it."""
    offered = {entry.name: entry.value for entry in entry_points(group=ENTRY_POINTS)}
    if name not in offered:
        names = f"Installed packages offer {', '.join(sorted(offered))}." if offered else "None is installed."
        raise UsageError(
            f"{option} {name}: there is no entry point of this name in {ENTRY_POINTS}",
            hint=f"{names} A function of your own is named as module:function.",
        )
    return offered[name]


def _import(place: str, module_name: str) -> ModuleType:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # The module itself, or a package above it, is missing; otherwise an import inside it failed.
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise UsageError(
                f"{place}: there is no module '{module_name}'",
                hint=f"It is looked for in {folder} and in the installed packages.",
            ) from None
        raise _import_failed(place, module_name, error) from error
    except (Exception, SystemExit) as error:
        raise _import_failed(place, module_name, error) from error


def _import_failed(place: str, module_name: str, error: BaseException) -> UsageError:
    return UsageError(
        f"{place}: importing {module_name} failed: {describe(error)}",
        hint=f'Try it alone: python -c "import {module_name}"',
    )


def describe(error: BaseException) -> str:
    """An exception in one line, with the place in the user's code that it came from."""
    try:
        said = str(error)
    except Exception:  # an exception's own text is the user's code too
        said = ""
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename:
        line = (error.text or "").strip()
        return f"SyntaxError: {error.msg} ({Path(error.filename).name}, line {error.lineno}: {line})"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    if not frames:
        return text
    frame = frames[-1]
    where = f"{Path(frame.filename).name}, line {frame.lineno}"
    return f"{text} ({where}: {frame.line})" if frame.line else f"{text} ({where})"


_OWN_FOLDER = str(Path(__file__).parent)
_STANDARD_FOLDER = str(Path(traceback.__file__).parent)


def _is_users(filename: str) -> bool:
    if "site-packages" in filename:
        return False
    return not filename.startswith((_OWN_FOLDER, _STANDARD_FOLDER, "<frozen"))


def _suggest_name(found: Any, name: str) -> str:
    names = [n for n in dir(found) if not n.startswith("_") and callable(getattr(found, n, None))]
    close = get_close_matches(name, names, n=3)
    if close:
        return f"Did you mean {' or '.join(close)}?"
    own = [n for n in names if getattr(getattr(found, n), "__module__", None) == getattr(found, "__name__", None)]
    return f"Its functions: {', '.join(own[:10])}." if own else "It defines no function."

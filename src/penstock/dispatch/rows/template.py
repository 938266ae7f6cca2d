"""Templates: text with the row's columns in it, written as Jinja (`{{ title | upper }}`, `{% if %}`, `{% for %}`).

The language is kept small, because whoever makes a job writes its templates and all jobs share the workers. There are
no includes, no functions, no variables, and no operators that repeat (`*`) or join (`~`) text: without them a short
template cannot make a text that is huge beside its row. Fuel bounds loops, and `MAX_RENDERED_BYTES` what is written.

A null is written as nothing; true, false, numbers, lists and objects are written as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import quote

import minijinja
import msgspec

from penstock.config import KIB, MIB
from penstock.errors import UsageError

MAX_TEMPLATE_CHARS = 64 * KIB
MAX_RENDERED_BYTES = 4 * MIB
"""Bytes that a row's values may take in what is rendered; a row's image is not counted."""

_MIN_FUEL = 1_000
_MAX_FUEL = 100_000
_COLUMNS_SHOWN = 20
_COMPILED_MAX = 1_000
_NAME = "template"

# Braces inside a block are refused, so that this pattern and the engine agree on where every block ends.
_CODE = r"""(?:[^{}"']|"(?:[^"\\{}]|\\[^{}])*"|'(?:[^'\\{}]|\\[^{}])*')*"""
_BLOCK = re.compile(
    rf"""
      \{{%[-+]?\s*raw\s*[-+]?%\}}.*?\{{%[-+]?\s*endraw\s*[-+]?%\}}
    | \{{\#.*?\#\}}
    | \{{\{{(?P<expression>{_CODE})\}}\}}
    | \{{%(?P<statement>{_CODE})%\}}
    """,
    re.VERBOSE | re.DOTALL,
)
_OPENING = re.compile(r"\{[{%#]")
_STRING = re.compile(r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'""", re.DOTALL)
_STATEMENT = re.compile(r"[-+]?\s*(\w*)")
_FILTER = re.compile(r"\|\s*(\w+)")
_TEST = re.compile(r"\bis\s+(?:not\s+)?(\w+)")

_STATEMENTS = frozenset({"if", "elif", "else", "endif", "for", "endfor"})
_FILTERS = frozenset(
    {
        *("abs", "bool", "capitalize", "count", "d", "default", "dictsort", "first", "float", "int", "items", "join"),
        *("last", "length", "lines", "list", "lower", "map", "max", "min", "reject", "rejectattr", "replace"),
        *("reverse", "round", "select", "selectattr", "sort", "split", "string", "striptags", "sum", "title"),
        *("tojson", "trim", "truncate", "unique", "upper", "urlencode"),
    }
)
_TESTS = frozenset(
    {
        *("boolean", "defined", "divisibleby", "endingwith", "eq", "equalto", "even", "false", "float", "ge", "gt"),
        *("greaterthan", "in", "int", "integer", "iterable", "le", "lessthan", "lower", "lt", "mapping", "ne", "none"),
        *("number", "odd", "sameas", "sequence", "startingwith", "string", "true", "undefined", "upper"),
    }
)
# What the engine has besides: ways to grow text without limit, to mark it safe, to look into objects.
_LEFT_OUT_FILTERS = (
    *("attr", "batch", "chain", "e", "escape", "filesizeformat", "format", "groupby", "indent", "pluralize", "pprint"),
    *("safe", "slice", "wordwrap", "zip"),
)
_LEFT_OUT_GLOBALS = ("cycler", "debug", "dict", "joiner", "namespace", "range")

# A row is given to the engine read-only: mappings as proxies, which msgspec does not know.
_encoder = msgspec.json.Encoder(enc_hook=dict)


class RenderError(Exception):
    """A template that cannot be rendered with this row; the text can be shown as it is."""


Write = Callable[[Any], str]
"""How a value is written into the text."""


def as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else _encoder.encode(value).decode()


def as_json(value: Any) -> str:
    return _encoder.encode(value).decode()


def as_path_segment(value: Any) -> str:
    """The value percent-encoded, so that it stays in its segment. An empty one is refused: the path would lead to
    something else, most often to the list of all."""
    text = as_text(value)
    if not text:
        raise RenderError("a value in the path is empty")
    return quote(text, safe="")


class Template:
    """Compiled template. Rendering is thread-safe."""

    def __init__(self, source: str, write: Write) -> None:
        self._source = source
        self.is_json = write is as_json
        if len(source) > MAX_TEMPLATE_CHARS:
            raise UsageError(f"has {len(source):,} characters", hint=f"A template has at most {MAX_TEMPLATE_CHARS:,}.")
        self._engine = _engine(write)
        try:
            self._engine.add_template(_NAME, source)
        except minijinja.TemplateError as error:
            raise UsageError(f"line {error.line}: {error.detail or error.message}", hint=_HINT) from None
        except UnicodeEncodeError:
            raise UsageError("has half of a surrogate pair", hint="Write the whole character.") from None
        code_chars = 0
        for block in _blocks(source):
            _check_block(block)
            code_chars += len(block.code)
        # The text between blocks is not counted when it is written: the more there is of it, the fewer steps.
        steps = _MIN_FUEL + code_chars + 4 * MAX_RENDERED_BYTES // max(1, len(source))
        self._engine.fuel = min(steps, _MAX_FUEL)

    @property
    def sample(self) -> str:
        """The source with an x for every block."""
        return _BLOCK.sub("x", self._source)

    @property
    def names(self) -> set[str]:
        """The names that the template looks up."""
        return set(self._engine.undeclared_variables_in_template(_NAME))

    def render(self, context: Mapping[str, Any]) -> str:
        """The text with values of a `context_of`. Raises RenderError."""
        try:
            rendered: str = self._engine.render_template(_NAME, **context)
        except minijinja.TemplateError as error:
            raise RenderError(self._explain(error, context)) from None
        except RenderError:
            raise
        except Exception as error:  # of a filter that was called wrongly, or of a method of Python's containers
            raise RenderError(f"{type(error).__name__}: {error}") from None
        return rendered

    def _explain(self, error: minijinja.TemplateError, context: Mapping[str, Any]) -> str:
        line = f"line {error.line}: "
        if error.kind == "OutOfFuel":
            return "it takes too many steps: shorten its loops"
        if error.kind != "UndefinedError":
            return line + (error.detail or error.message)
        missing = sorted(self.names - set(context))
        if missing and "row" in context:
            return f"{line}there is no column '{missing[0]}'; the columns are {_listed(context['row'])}"
        start, _ = error.range or (0, 0)
        chars = len(self._source.encode()[:start].decode("utf-8", "replace"))
        block = next((found[0] for found in _BLOCK.finditer(self._source) if found.end() > chars), "")
        return f"{line}a value in {block} is not there"


@lru_cache(_COMPILED_MAX)
def compiled(source: str, write: Write = as_text) -> Template:
    """Template of this source; compiled once. Raises UsageError that says what is wrong, not where."""
    return Template(source, write)


@lru_cache(_COMPILED_MAX)
def compiled_value(source: str) -> Template:
    """Template of a text inside JSON. One that is a single `{{ … }}` is rendered as JSON, with the value's type."""
    found = _BLOCK.fullmatch(source)
    return compiled(source, as_json if found is not None and found["expression"] is not None else as_text)


def context_of(row: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The names that a row's templates know: its columns, `row` itself for columns that are no names, and `more`, which
    goes before columns of the same name."""
    frozen = _frozen(row)
    return {**frozen, "row": frozen, **more}


def _frozen(value: Any) -> Any:
    """The value as templates see it: read-only, as templates can call the methods of Python's containers."""
    if isinstance(value, Mapping):
        return MappingProxyType({name: _frozen(each) for name, each in value.items()})
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


# -- what a template may contain

_HINT = (
    "Templates are written as Jinja: {{ column }}, {% if … %}, {% for … %}, and filters such as {{ column | upper }}."
)


class _Block(NamedTuple):
    code: str
    """Without its strings."""
    is_statement: bool
    line: int


def _blocks(source: str) -> Iterator[_Block]:
    """The blocks of a template that compiles, without comments and raw text."""
    at = 0
    while (opening := _OPENING.search(source, at)) is not None:
        line = source.count("\n", 0, opening.start()) + 1
        block = _BLOCK.match(source, opening.start())
        if block is None:
            raise UsageError(
                f"line {line}: braces inside a block",
                hint="Objects and texts with braces cannot be written inside {{ }} and {% %}.",
            )
        code = block["expression"] if block["expression"] is not None else block["statement"]
        if code is not None:
            yield _Block(_STRING.sub("''", code), block["expression"] is None, line)
        at = block.end()


def _check_block(block: _Block) -> None:
    if block.is_statement:
        found = _STATEMENT.match(block.code)
        _check_word("statement", found[1] if found else "", _STATEMENTS, block.line)
    for operator in "*~":
        if operator in block.code:
            hint = "Write texts one after the other, as {{ a }}{{ b }}, and products as a column of the table."
            raise UsageError(f"line {block.line}: the operator {operator} is not available", hint=hint)
    for name in _FILTER.findall(block.code):
        _check_word("filter", name, _FILTERS, block.line)
    for name in _TEST.findall(block.code):
        _check_word("test", name, _TESTS, block.line)


def _check_word(kind: str, word: str, known: frozenset[str], line: int) -> None:
    if word not in known:
        raise UsageError(f"line {line}: there is no {kind} '{word}'", hint=f"There are {', '.join(sorted(known))}.")


# -- the engine


def _engine(write: Write) -> minijinja.Environment:
    engine = minijinja.Environment(
        filters={"join": _join, "replace": _replace, "string": as_text, "tojson": _tojson},
        undefined_behavior="strict",
        auto_escape_callback=lambda _: False,
        finalizer=_counting(write),
        keep_trailing_newline=True,
        debug=False,
        pycompat=False,
    )
    for name in _LEFT_OUT_FILTERS:
        engine.remove_filter(name)
    for name in _LEFT_OUT_GLOBALS:
        engine.remove_global(name)
    return engine


def _counting(write: Write) -> Any:
    @minijinja.pass_state
    def finalize(state: Any, value: Any) -> str:
        text = write(value)
        written = state.get_temp("written", 0) + (len(text) if text.isascii() else len(text.encode()))
        state.set_temp("written", written)
        if written > MAX_RENDERED_BYTES and written > MAX_RENDERED_BYTES + len(state.lookup("image") or ""):
            raise RenderError(f"its values take more than {MAX_RENDERED_BYTES:,} bytes")
        return text

    return finalize


# Filters that can multiply the length of a text, with a bound on what they make.


def _join(values: Iterable[Any], separator: str = "") -> str:
    texts = [as_text(value) for value in values]
    _check_length(sum(map(len, texts)) + len(texts) * len(separator))
    return separator.join(texts)


def _replace(value: Any, old: str, new: str) -> str:
    text = as_text(value)
    _check_length(len(text) + text.count(old) * len(new))
    return text.replace(old, new)


def _tojson(value: Any) -> str:
    text = as_json(value)
    _check_length(len(text))  # each time around, quotes and backslashes double
    return text


def _check_length(chars: int) -> None:
    if chars > MAX_RENDERED_BYTES:
        raise RenderError(f"a text in it has more than {MAX_RENDERED_BYTES:,} characters")


def _listed(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _COLUMNS_SHOWN} more" if len(listed) > _COLUMNS_SHOWN else ""
    return ", ".join(listed[:_COLUMNS_SHOWN]) + more

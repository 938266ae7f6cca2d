"""Templates: text with the row's columns in it, written as Jinja (`{{ title | upper }}`, `{% if %}`, `{% for %}`).

The language is kept small, because whoever makes a job writes its templates and all jobs share the workers. There are
no includes, functions or variables, no lists but of constants, and no operators that repeat (`*`) or join (`~`, `+`)
text: without them a short template cannot make a text that is huge beside its row. Fuel bounds loops, `MAX_WORK` what
filters and reading cost (see `work`), and `MAX_RENDERED_BYTES` what is written. A column is read anew wherever its name
stands, so that its length counts there; one with a long text cannot stand in a loop.

A null is written as nothing; true, false, numbers, lists and objects are written as JSON.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import quote

import minijinja

from penstock.config import KIB, MIB
from penstock.dispatch.rows.filters import FILTERS, METER, OF_THE_ENGINE, as_json, as_text
from penstock.dispatch.rows.work import LONG_CHARS, MAX_WORK, SEARCHED_CHARS, Meter, RenderError, counted
from penstock.errors import UsageError

MAX_TEMPLATE_CHARS = 64 * KIB
MAX_RENDERED_BYTES = 4 * MIB
"""Bytes that a row's values may take in what is rendered; a row's image is not counted."""

_MAX_CODE_CHARS = 4_096
"""Characters of a block, but for its texts. The engine parses a chain of operators by recursion: a long one takes it
seconds, and a longer one ends the process."""
_MIN_FUEL = 1_000
_MAX_FUEL = 20_000
_STEPS_PER_LOOP = 3
_WORK_OF_LOOPS = MAX_WORK // 8
"""Work that is counted for a template with loops beside what they read: some 15 ms at most."""
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
_STATEMENT = re.compile(r"\s*(\w*)")
_NAME_IN_CODE = re.compile(r"(?<![\w.])[^\W\d]\w*")
_CONSTANTS = re.compile(r"\s*(?:(?:''|-?[\d.]+|true|false|none)\s*(?:,\s*|(?=\])))*\]")
_COMPARES = re.compile(r"[=!<>\[]|\bin\b|\bis\b|\bchanged\b")
_SEARCHES = re.compile(r"\bin\b")
_SLICE = re.compile(r"\[[^\]]*:")
_LOOP_HEAD = re.compile(r".*?\bin\b", re.DOTALL)
_CONDITION = re.compile(r"\bif\b")
# Eighths of a character's work: a text that is only passed on is copied, one that is compared is searched.
_PASSED, _COMPARED = 1, 8
_FILTER = re.compile(r"\|\s*(\w+)")
_TEST = re.compile(r"\bis\s+(?:not\s+)?(\w+)")

_STATEMENTS = frozenset({"if", "elif", "else", "endif", "for", "endfor"})
_FILTERS = OF_THE_ENGINE | FILTERS.keys()
_TESTS = frozenset(
    {
        *("boolean", "defined", "divisibleby", "endingwith", "even", "false", "float", "int", "integer", "iterable"),
        *("mapping", "none", "number", "odd", "sequence", "startingwith", "string", "true", "undefined"),
    }
)
# The engine's other filters: ways to grow text without limit, to mark it safe, to look into objects, or to work long.
_LEFT_OUT_FILTERS = (
    *("attr", "batch", "chain", "dictsort", "e", "escape", "filesizeformat", "format", "groupby", "indent", "lines"),
    *(
        "list",
        "pluralize",
        "pprint",
        "reject",
        "rejectattr",
        "reverse",
        "safe",
        "select",
        "selectattr",
        "slice",
        "sort",
    ),
    *("striptags", "unique", "wordwrap", "zip"),
)
_LEFT_OUT_GLOBALS = ("cycler", "debug", "dict", "joiner", "namespace", "range")

Write = Callable[[Any], str]
"""How a value is written into the text."""


def as_path_segment(value: Any) -> str:
    """The value percent-encoded, so that it stays in its segment. An empty one is refused: the path would lead to
    something else, most often to the list of all."""
    text = as_text(value)
    if not text:
        raise RenderError("a value in the path is empty")
    if len(text) > LONG_CHARS:
        raise RenderError(f"a value in the path has more than {LONG_CHARS:,} characters")
    return quote(text, safe="")


class Template:
    """Compiled template; a text without blocks costs next to nothing. Rendering is thread-safe."""

    def __init__(self, source: str, write: Write) -> None:
        self._source = source
        self.is_json = write is as_json
        if len(source) > MAX_TEMPLATE_CHARS:
            most = f"{MAX_TEMPLATE_CHARS:,}"
            raise UsageError(f"has {len(source):,} characters, more than {most}", hint="Shorten the template.")
        try:
            source.encode()
        except UnicodeEncodeError:
            raise UsageError("has half of a surrogate pair", hint="Write the whole character.") from None
        self._is_plain = is_plain(source)
        if self._is_plain:
            return
        _refuse_long_blocks(source)
        self._engine = _engine(write)
        try:
            self._engine.add_template(_NAME, source)
        except minijinja.TemplateError as error:
            raise UsageError(f"line {error.line}: {error.detail or error.message}", hint=_HINT) from None
        self._use = _Use.of(source)
        # Text between blocks costs no fuel when it is written: the more of it is in loops, the fewer steps.
        steps = _STEPS_PER_LOOP * 4 * MAX_RENDERED_BYTES // max(1, self._use.text_in_loop)
        self._engine.fuel = min(max(steps, _MIN_FUEL), _MAX_FUEL)

    @property
    def sample(self) -> str:
        """The source with an x for every block."""
        return _BLOCK.sub("x", self._source)

    @property
    def names(self) -> set[str]:
        """The names that the template looks up."""
        return set() if self._is_plain else set(self._engine.undeclared_variables_in_template(_NAME))

    def render(self, context: Mapping[str, Any]) -> str:
        """The text with values of a `context_of`. Raises RenderError."""
        if self._is_plain:
            return self._source
        meter: Meter = context[METER]
        self._use.charge(context, meter)
        try:
            rendered: str = self._engine.render_template(_NAME, **context)
        except minijinja.TemplateError as error:
            meter.check()
            raise RenderError(self._explain(error, context)) from None
        except RenderError:
            raise
        except Exception as error:  # of a filter that was called wrongly, or of a method of Python's containers
            raise RenderError(f"{type(error).__name__}: {error}") from None
        meter.check()
        return rendered

    def _explain(self, error: minijinja.TemplateError, context: Mapping[str, Any]) -> str:
        line = f"line {error.line}: "
        if error.kind == "OutOfFuel":
            return "it takes too many steps: shorten its loops"
        if error.kind != "UndefinedError":
            return line + (error.detail or error.message)
        missing = sorted(self.names - context.keys())
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


def is_plain(source: str) -> bool:
    """Whether a text stands for itself: it has no blocks."""
    return _OPENING.search(source) is None


def context_of(row: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The names that a row's templates know: its columns, `row` itself for columns that are no names, and `more`, which
    goes before columns of the same name."""
    image = more.get("image")
    meter = Meter(MAX_WORK + len(image or ""))
    names = {name: counted(value, meter) for name, value in row.items()}
    return {**names, "row": counted(row, meter), **more, METER: meter}


def context_of_answer(answer: Any, status: int) -> dict[str, Any]:
    """The names that the message of a rule knows."""
    meter = Meter()
    return {"answer": counted(answer, meter), "status": status, METER: meter}


# -- what a template may contain

_HINT = (
    "Templates are written as Jinja: {{ column }}, {% if … %}, {% for … %}, and filters such as {{ column | upper }}."
)


class _Block(NamedTuple):
    code: str
    """Without its strings."""
    statement: str | None
    """Its first word; None of an expression."""
    line: int
    start: int
    end: int


def _refuse_long_blocks(source: str) -> None:
    """Refuse blocks that the engine had better not see. The source may be anything."""
    at = 0
    while (opening := _OPENING.search(source, at)) is not None:
        start = opening.start()
        block = _BLOCK.match(source, start)
        # What has no end is all of the rest; looked for from every opening in it, that would take quadratic time.
        if block is None or (block["statement"] or "").strip(" \t\r\n+-") == "raw":
            size, at = len(source) - start, len(source)
        else:
            size, at = len(_STRING.sub("''", block["expression"] or block["statement"] or "")), block.end()
        if size > _MAX_CODE_CHARS:
            line = source.count("\n", 0, start) + 1
            what = f"line {line}: a block has more than {_MAX_CODE_CHARS:,} characters, or no end"
            raise UsageError(what, hint=_HINT)


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
            if any(len(text) > LONG_CHARS for text in _STRING.findall(code)):
                raise UsageError(
                    f"line {line}: a text inside a block has more than {LONG_CHARS:,} characters", hint=_HINT
                )
            # Signs at both ends are about the blanks around the block.
            code = re.sub(r"^[-+]|[-+]$", "", _STRING.sub("''", code))
            found = None if block["expression"] is not None else _STATEMENT.match(code)
            yield _Block(code, None if found is None else found[1], line, block.start(), block.end())
        at = block.end()


def _check_block(block: _Block) -> None:
    if block.statement is not None:
        _check_word("statement", block.statement, _STATEMENTS, block.line)
    for operator in "*~+":
        if operator in block.code:
            hint = "Write texts one after the other, as {{ a }}{{ b }}; sums and products are columns of the table."
            raise UsageError(f"line {block.line}: the operator {operator} is not available", hint=hint)
    _check_brackets(block)
    for name in _FILTER.findall(block.code):
        _check_word("filter", name, _FILTERS, block.line)
    for name in _TEST.findall(block.code):
        _check_word("test", name, _TESTS, block.line)


def _check_brackets(block: _Block) -> None:
    """Refuse lists other than of constants: lists of lists would double with every loop around them."""
    inside: list[str] = []
    before = ""
    for found in _TOKEN.finditer(block.code):
        follows_a_value = _VALUE.match(before) is not None and before not in _BEFORE_A_VALUE
        before = found[0]
        match before:
            case "[" if follows_a_value:
                inside.append("subscript")
            case "[":
                if _CONSTANTS.match(block.code, found.end()) is None:
                    raise _no_list(block)
                inside.append("list")
            case "(":
                inside.append("call" if follows_a_value else "group")
            case "," if inside and inside[-1] == "group":
                raise _no_list(block)
            case ")" | "]" if inside:
                inside.pop()
            case _:
                pass


_TOKEN = re.compile(r"\w+|[^\w\s]")
_VALUE = re.compile(r"[\w)\]']")  # how the last token of a value begins
_BEFORE_A_VALUE = frozenset({"in", "is", "not", "and", "or", "if", "elif", "else"})


def _no_list(block: _Block) -> UsageError:
    hint = "Lists of texts and numbers can be written, as in {% if brand in ['a', 'b'] %}."
    return UsageError(f"line {block.line}: a list of other things than constants", hint=hint)


class _Use(NamedTuple):
    """What a template does with the names it knows."""

    once: Counter[str]
    """How often each is named where it is read once at most, in eighths."""
    in_loop: frozenset[str]
    has_loop: bool
    longest: int | None
    """Characters that a text may have which is read from a list or an object; None if no loop compares."""
    text_in_loop: int
    """Characters of the text between the blocks of loops."""

    @classmethod
    def of(cls, source: str) -> _Use:
        """Raises UsageError if something in the template is not available."""
        once: Counter[str] = Counter()
        looped: list[str] = []
        has_loop = False
        depth = text_chars = end = 0
        for block in _blocks(source):
            _check_block(block)
            if depth:
                text_chars += block.start - end
            depth -= block.statement == "endfor"
            head, of_each = block.code, []
            if block.statement == "for":  # its condition is asked of every element
                head, *of_each = _CONDITION.split(_LOOP_HEAD.sub("", block.code, count=1))
            looped += of_each
            if depth:
                looped.append(head)
            else:
                weight = _COMPARED if _COMPARES.search(head) else _PASSED
                once.update({name: weight * times for name, times in Counter(_NAME_IN_CODE.findall(head)).items()})
            depth += block.statement == "for"
            has_loop |= depth > 0
            end = block.end
        names = frozenset(name for code in looped for name in _NAME_IN_CODE.findall(code))
        longest = LONG_CHARS if any(map(_COMPARES.search, looped)) else None
        longest = SEARCHED_CHARS if any(map(_SEARCHES.search, looped)) else longest
        if any(map(_SLICE.search, looped)):
            raise UsageError("has a slice inside a loop", hint="Use truncate, or a slice outside of loops.")
        return cls(once, names, has_loop, longest, text_chars)

    def charge(self, context: Mapping[str, Any], meter: Meter) -> None:
        """Count what reading the texts of these names costs. Raises RenderError."""
        meter.longest = self.longest
        meter.add(_WORK_OF_LOOPS if self.has_loop else 0)
        longest = self.longest or LONG_CHARS
        for name, value in context.items():
            if not isinstance(value, str):
                continue
            if len(value) > longest and name in self.in_loop:
                meter.fail(f"'{name}' has more than {longest:,} characters, too many for use inside a loop")
            meter.add(self.once[name] * len(value) // _COMPARED)


def _check_word(kind: str, word: str, known: frozenset[str], line: int) -> None:
    if word not in known:
        raise UsageError(f"line {line}: there is no {kind} '{word}'", hint=f"There are {', '.join(sorted(known))}.")


# -- the engine


def _engine(write: Write) -> minijinja.Environment:
    engine = minijinja.Environment(
        filters=FILTERS,
        undefined_behavior="strict",
        auto_escape_callback=lambda _: False,
        finalizer=_finalizer(write),
        keep_trailing_newline=True,
        debug=False,
        pycompat=False,
    )
    for name in _LEFT_OUT_FILTERS:
        engine.remove_filter(name)
    for name in _LEFT_OUT_GLOBALS:
        engine.remove_global(name)
    return engine


def _finalizer(write: Write) -> Any:
    @minijinja.pass_state
    def finalize(state: Any, value: Any) -> str:
        text = write(value)
        if not isinstance(value, str):
            state.lookup(METER).add(len(text))
        written = state.get_temp("written", 0) + (len(text) if text.isascii() else len(text.encode()))
        state.set_temp("written", written)
        if written > MAX_RENDERED_BYTES and written > MAX_RENDERED_BYTES + len(state.lookup("image") or ""):
            raise RenderError(f"its values take more than {MAX_RENDERED_BYTES:,} bytes")
        return text

    return finalize


def _listed(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _COLUMNS_SHOWN} more" if len(listed) > _COLUMNS_SHOWN else ""
    return ", ".join(listed[:_COLUMNS_SHOWN]) + more

"""Definitions: what a job does with each of its rows, as it is written in the job's spec.

`{"type": "chat", "provider": "openai", "model": "gpt-5-mini", "prompt": "Which category is {{ title }}?"}`

`{"type": "http", "provider": "shop", "method": "GET", "path": "/items/{{ sku }}", "columns": {"price": "offer.price"}}`

A provider is named, never a host or a key. Texts are templates over the row's columns (see `template`). Attempt n of a
row uses strategy n, from the first again after the last; a field that a strategy has replaces the definition's, whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Self
from urllib.parse import unquote

import msgspec
from msgspec import UNSET, UnsetType

from penstock.dispatch.rows.answer_path import parse_path
from penstock.dispatch.rows.schema import MAX_PROPERTIES, check_schema
from penstock.dispatch.rows.template import as_path_segment, compiled, compiled_value, is_plain
from penstock.errors import UsageError
from penstock.model import MAX_STRATEGIES, strategy_of
from penstock.validators import CARRIES_SECRETS, checked_headers

MAX_RULES = 50
MAX_TEMPLATES = 400
"""Texts with blocks, over all strategies: each is compiled when a job is made, and again by every worker."""
_MAX_NESTING = 32
_MAX_DEPTH = 100
"""Levels of the whole definition."""
_MAX_NAME_CHARS = 200
_MAX_AFTER_S = 86_400

_PLACE = "processor"
_SET_BY_PENSTOCK = ("model", "messages", "response_format", "stream", "n")
_UNSAFE_IN_PATH = re.compile(r"[\x00-\x20\x7f\\#?]")
_STATUS_CLASS = re.compile(r"[1-5]xx")
_CODE = re.compile(r"[A-Za-z][A-Za-z0-9_.:-]{0,63}")
_WHERE = re.compile(r" - at (?:`key` in )?`\$(?P<path>[^`]*)`$")
_HINT = (
    'A processor is written as {"type": "chat", "provider": …, "model": …, "prompt": …} '
    'or {"type": "http", "provider": …, "method": …, "path": …}.'
)

Method = Literal["GET", "POST", "PUT", "PATCH"]
RuleOutcome = Literal["done", "not_found", "skipped", "retry", "fail"]


class _Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, rename="camel"):
    """Part of a job's spec."""


class ChatStrategy(_Spec, frozen=True, kw_only=True):
    """Chat strategy: what one attempt in turn asks instead."""

    name: str
    prompt: str | UnsetType = UNSET
    system: str | UnsetType = UNSET
    parameters: dict[str, Any] | UnsetType = UNSET


class HttpStrategy(_Spec, frozen=True, kw_only=True):
    """HTTP strategy: what one attempt in turn sends, or reads from the answer, instead."""

    name: str
    path: str | UnsetType = UNSET
    query: dict[str, str] | UnsetType = UNSET
    headers: dict[str, str] | UnsetType = UNSET
    body: Any = UNSET
    columns: dict[str, str] | UnsetType = UNSET


class Rule(_Spec, frozen=True, kw_only=True):
    """Rule: what an answer means that meets all of its conditions."""

    outcome: RuleOutcome
    status: int | str | tuple[int | str, ...] | None = None
    """A status, a class of them ("4xx"), or several."""
    path: str | None = None
    """Path into the answer, for one of the four conditions below."""
    equals: Any = UNSET
    contains: Any = UNSET
    """Part of the text, or element of the list, at the path."""
    exists: bool = False
    missing: bool = False
    after: float | str | None = None
    """Seconds until the retry, or the path to them in the answer."""
    code: str | None = None
    message: str | None = None
    """Template over `answer` and `status`."""

    @property
    def statuses(self) -> tuple[int | str, ...]:
        return self.status if isinstance(self.status, tuple) else () if self.status is None else (self.status,)


class _Definition(_Spec, frozen=True, kw_only=True, tag_field="type"):
    provider: str
    strategies: tuple[Any, ...] = ()

    def strategy(self, attempt: int) -> str | None:
        """Name of the attempt's strategy."""
        chosen = strategy_of(self.strategies, attempt)
        return None if chosen is None else str(chosen.name)

    def for_attempt(self, attempt: int) -> Self:
        """The definition with what the attempt's strategy puts in its place."""
        chosen = strategy_of(self.strategies, attempt)
        if chosen is None:
            return self
        fields = ((name, getattr(chosen, name)) for name in chosen.__struct_fields__ if name != "name")
        given = {name: value for name, value in fields if value is not UNSET}
        return msgspec.structs.replace(self, **given)


class ChatDefinition(_Definition, frozen=True, kw_only=True, tag="chat"):
    """Chat definition: one chat completion per row. The properties of `schema` become columns; without one, the text of
    the answer is the column `column`. An image's row carries the image after the prompt."""

    model: str
    prompt: str
    system: str | None = None
    schema: dict[str, Any] | None = None
    column: str = "answer"
    parameters: dict[str, Any] = {}
    """Members of the request such as temperature and max_tokens."""
    strategies: tuple[ChatStrategy, ...] = ()


class HttpDefinition(_Definition, frozen=True, kw_only=True, tag="http"):
    """HTTP definition: one request per row. `columns` says where in the answer each column is. The first of the `rules`
    that matches says what the answer means. If none does, it means what it means in a batch (see `retry`), except that
    a GET that is answered 404 or 410 has not found the row."""

    method: Method
    path: str
    query: dict[str, str] = {}
    headers: dict[str, str] = {}
    body: Any = UNSET
    """JSON whose texts are templates. A text that is one `{{ expression }}` keeps the value's JSON type."""
    columns: dict[str, str] = msgspec.field(default_factory=lambda: {"answer": ""})
    rules: tuple[Rule, ...] = ()
    strategies: tuple[HttpStrategy, ...] = ()

    @property
    def paths(self) -> list[str]:
        """The paths that it asks for, of every strategy."""
        return [self.for_attempt(attempt).path for attempt in range(1, max(1, len(self.strategies)) + 1)]


Definition = HttpDefinition | ChatDefinition


def parse_definition(obj: object) -> Definition:
    """The definition in a job's spec. All that can be checked without a row is checked; errors name the place."""
    _refuse_deep(obj)
    try:
        definition: Definition = msgspec.convert(obj, type=HttpDefinition | ChatDefinition)
    except msgspec.ValidationError as error:
        found = _WHERE.search(str(error))
        place = _PLACE + (found["path"].replace("[...]", "") if found else "")
        raise _PlacedError(place, _WHERE.sub("", str(error)), _HINT) from None
    with _inside(_PLACE):
        _count_texts(definition)
        _check(definition)
        _check_strategies(definition)
    return definition


class RefusedDefinition(msgspec.Struct, frozen=True):
    """A stored definition that this version does not take: the one that stored it had other bounds."""

    message: str


def parse_stored_definition(obj: object) -> Definition | RefusedDefinition:
    """The definition of a job that is to be worked off: if it is refused, its rows fail and others' are done."""
    try:
        return parse_definition(obj)
    except UsageError as error:
        return RefusedDefinition(error.message)


def _refuse_deep(obj: object) -> None:
    """Refuse nesting so deep that writing or rendering it could run out of stack."""
    level: list[Any] = [obj]
    for _ in range(_MAX_DEPTH):
        level = [
            each
            for one in level
            if isinstance(one, dict | list)
            for each in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return
    raise _PlacedError(_PLACE, f"is nested more than {_MAX_DEPTH} deep", "Make it flatter.")


class _PlacedError(UsageError):
    """Error that names the place inside the spec."""

    def __init__(self, place: str, reason: str, hint: str | None) -> None:
        super().__init__(f"{place}: {reason}", hint=hint)
        self.place = place
        self.reason = reason


@contextmanager
def _inside(place: str) -> Iterator[None]:
    """Errors of the block name this place, and the place inside it if they know one."""
    try:
        yield
    except _PlacedError as error:
        dot = "" if error.place.startswith("[") else "."
        raise _PlacedError(f"{place}{dot}{error.place}", error.reason, error.hint) from None
    except UsageError as error:
        raise _PlacedError(place, error.message, error.hint) from None


def _check_strategies(definition: Definition) -> None:
    """Check what the strategies put in the place of the definition's own, which is checked already."""
    strategies: Sequence[ChatStrategy | HttpStrategy] = definition.strategies
    names = [strategy.name for strategy in strategies]
    if len(names) > MAX_STRATEGIES:
        raise _PlacedError("strategies", f"there are {len(names)}", f"There may be {MAX_STRATEGIES}.")
    for at, strategy in enumerate(strategies):
        name = strategy.name
        with _inside(f"strategies[{at}]"):
            _check_name("name", name)
            if name in names[:at]:
                raise _PlacedError("name", f"'{name}' is taken by strategies[{names.index(name)}]", "Choose another.")
            if isinstance(strategy, ChatStrategy):
                _check_texts(strategy)
            elif isinstance(definition, HttpDefinition):
                _check_request(strategy, definition.method)


def _check(definition: Definition) -> None:
    _check_name("provider", definition.provider)
    if isinstance(definition, ChatDefinition):
        _check_name("model", definition.model)
        _check_name("column", definition.column)
        _check_texts(definition)
        with _inside("schema"):
            if definition.schema is not None:
                check_schema(definition.schema)
    else:
        _check_request(definition, definition.method)
        _check_rules(definition.rules)


def _check_name(field: str, name: str) -> None:
    if not name.strip() or len(name) > _MAX_NAME_CHARS or not name.isprintable():
        raise _PlacedError(field, f"{name[:_MAX_NAME_CHARS]!r} is not a name", f"1 to {_MAX_NAME_CHARS} characters.")


def _check_texts(chat: ChatDefinition | ChatStrategy) -> None:
    """Check what both a chat definition and a strategy of it may have."""
    if chat.prompt is not UNSET:
        with _inside("prompt"):
            compiled(chat.prompt)
            if not chat.prompt.strip():
                raise UsageError("is empty", hint="For example: Which category is {{ title }}?")
    with _inside("system"):
        compiled(chat.system or "")
    for name in _SET_BY_PENSTOCK:
        if chat.parameters is not UNSET and name in chat.parameters:
            hint = "The definition's own fields and the row say it."
            raise _PlacedError(f"parameters.{name}", "cannot be set here", hint)


def _check_request(http: HttpDefinition | HttpStrategy, method: Method) -> None:
    """Check what both an HTTP definition and a strategy of it may have."""
    if http.path is not UNSET:
        with _inside("path"):
            path = compiled(http.path, as_path_segment)
            if not http.path.startswith("/"):
                raise UsageError(f"'{http.path}' does not begin with /", hint="It is a path below the provider's URL.")
            check_path(path.sample)
    for name, text in (http.query or {}).items():
        with _inside(f"query.{name}"):
            compiled(text)
    for name, text in (http.headers or {}).items():
        with _inside(f"headers.{name}"):
            _check_header(name)
            compiled(text)
    with _inside("body"):
        if http.body is not UNSET:
            if method == "GET":
                raise UsageError("a GET has none", hint="Use query, or POST.")
            _check_body(http.body, 1)
    if http.columns is not UNSET:
        with _inside("columns"):
            if not 1 <= len(http.columns) <= MAX_PROPERTIES:
                raise UsageError(f"there are {len(http.columns)}", hint=f"There may be 1 to {MAX_PROPERTIES}.")
            for name, where in http.columns.items():
                _check_name(name, name)
                with _inside(name):
                    parse_path(where)


def _check_rules(rules: Sequence[Rule]) -> None:
    if len(rules) > MAX_RULES:
        raise _PlacedError("rules", f"there are {len(rules)}", f"There may be {MAX_RULES}.")
    for at, rule in enumerate(rules):
        with _inside(f"rules[{at}]"):
            _check_rule(rule)


def _count_texts(definition: Definition) -> None:
    """Refuse more templates than are worth compiling, before any is."""
    found: set[str] = set()
    waiting: list[Any] = [definition, *definition.strategies]
    if isinstance(definition, HttpDefinition):
        waiting += (rule.message for rule in definition.rules)
    while waiting:
        one = waiting.pop()
        match one:
            case str() if not is_plain(one):
                found.add(one)
            case dict():
                waiting += one.values()
            case list():
                waiting += one
            case ChatDefinition() | ChatStrategy():
                waiting += (one.prompt, one.system)
            case HttpDefinition() | HttpStrategy():
                waiting += (one.path, one.query, one.headers, one.body)
    if len(found) > MAX_TEMPLATES:
        raise UsageError(f"has {len(found):,} different texts with blocks", hint=f"There may be {MAX_TEMPLATES}.")


def check_path(path: str) -> None:
    """Refuse a path that is none below the provider's URL. Raises UsageError."""
    if path.startswith("//") or _UNSAFE_IN_PATH.search(path):
        raise UsageError(
            f"'{path[:200]}' is not a path", hint="It has no host, blank, '?', '#' or backslash; see query."
        )
    # Some servers decode before they resolve, some twice, and some drop what follows a semicolon.
    segments = re.split(r"[/\\]", unquote(unquote(path)))
    if any(segment.partition(";")[0] in (".", "..") for segment in segments):
        raise UsageError(f"'{path[:200]}' has a segment '.' or '..'", hint="Every segment must name something.")


def _check_header(name: str) -> None:
    checked_headers({name: ""})
    if CARRIES_SECRETS.search(name):
        raise UsageError("may carry a secret", hint="Keys and secret headers belong to the provider in penstock.toml.")


def _check_body(value: Any, depth: int) -> None:
    if depth > _MAX_NESTING:
        raise UsageError(f"is nested more than {_MAX_NESTING} deep", hint="Make it flatter.")
    if isinstance(value, str):
        compiled_value(value)
    elif isinstance(value, dict):
        for name, each in value.items():
            with _inside(name):
                _check_body(each, depth + 1)
    elif isinstance(value, list):
        for at, each in enumerate(value):
            with _inside(f"[{at}]"):
                _check_body(each, depth + 1)


def _check_rule(rule: Rule) -> None:
    conditions = [name for name in ("equals", "contains") if getattr(rule, name) is not UNSET]
    conditions += [name for name in ("exists", "missing") if getattr(rule, name)]
    if rule.status is None and rule.path is None:
        raise UsageError(
            "has no condition", hint="Give a status, or a path and one of equals, contains, exists, missing."
        )
    if len(conditions) != (rule.path is not None):
        found = " and ".join(conditions) or "nothing"
        raise _PlacedError(
            "path", f"{found} is asked of it", "A path goes with one of equals, contains, exists, missing."
        )
    with _inside("status"):
        _check_statuses(rule)
    with _inside("path"):
        parse_path(rule.path or "")
    with _inside("after"):
        _check_after(rule)
    if rule.code is not None and (rule.outcome != "fail" or not _CODE.fullmatch(rule.code)):
        raise _PlacedError(
            "code", f"'{rule.code}' cannot be used", "A code is a word such as sold_out, of outcome fail."
        )
    with _inside("message"):
        if rule.message is not None:
            if rule.outcome == "done":
                raise UsageError("a row that is done has none", hint="Make it a column.")
            if unknown := sorted(compiled(rule.message).names - {"answer", "status"}):
                raise UsageError(f"there is no '{unknown[0]}'", hint="A rule's message knows answer and status.")


def _check_statuses(rule: Rule) -> None:
    for status in rule.statuses:
        if not (_STATUS_CLASS.fullmatch(status) if isinstance(status, str) else 100 <= status <= 599):
            raise UsageError(f"{status!r} is not a status", hint='For example 404, "5xx" or [404, 410].')
    if rule.status == ():
        raise UsageError("is empty", hint='For example 404, "5xx" or [404, 410].')


def _check_after(rule: Rule) -> None:
    if rule.after is None:
        return
    if rule.outcome != "retry":
        raise UsageError(f"the outcome is {rule.outcome}", hint="Only a retry waits.")
    if isinstance(rule.after, str):
        parse_path(rule.after)
    elif not 0 <= rule.after <= _MAX_AFTER_S:
        raise UsageError(f"{rule.after:g} is out of range", hint=f"It takes 0 to {_MAX_AFTER_S:,} seconds, or a path.")

"""Templates: what they write, what they refuse, and that no row makes them take too much."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote, unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import KIB
from penstock.dispatch.rows.filters import METER, as_json, as_text
from penstock.dispatch.rows.template import (
    MAX_RENDERED_BYTES,
    MAX_TEMPLATE_CHARS,
    Write,
    as_path_segment,
    compiled,
    compiled_value,
    context_of,
)
from penstock.dispatch.rows.work import MAX_WORK, RenderError
from penstock.errors import UsageError

ROW: dict[str, Any] = {
    "title": "a/b?c",
    "price": 1.5,
    "stock": 2,
    "new": True,
    "brand": None,
    "tags": ["x", {"y": None}],
    "odd name": "odd",
}
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=10,
)


def rendered(source: str, row: dict[str, Any] | None = None, write: Write = as_text, **more: Any) -> str:
    return compiled(source, write).render(context_of(ROW if row is None else row, **more))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("plain * ~ text }} {", "plain * ~ text }} {"),
        ("{{ title }}, {{ price }}, {{ stock }}", "a/b?c, 1.5, 2"),
        ("{{ new }}[{{ brand }}]", "true[]"),
        ("{{ tags }} {{ tags[0] }} {{ tags[1].y }}", '["x",{"y":null}] x '),
        ('{{ row["odd name"] }} {{ row.title }}', "odd a/b?c"),
        ("{{ title | upper }} {{ title | replace('/', '-') }}", "A/B?C a-b?c"),
        ("{{ tags | join(', ') }}", 'x, {"y":null}'),
        ("{{ title | urlencode }} {{ title | tojson }}", 'a/b%3Fc "a/b?c"'),
        ("{{ tags | tojson }} {{ brand | string }} {{ new | string }}", '["x",{"y":null}]  true'),
        ("{% if brand %}{{ brand }}{% else %}none{% endif %}", "none"),
        ("{% for tag in tags %}{{ loop.index }}:{{ tag }};{% endfor %}", '1:x;2:{"y":null};'),
        ("{{ color | default('red') }} {{ color is defined }}", "red false"),
        ("{% raw %}{{ x * 3 }}{% endraw %}{# * {{ #}!", "{{ x * 3 }}!"),
        ("<{{ '<b>' }}> {{ 'a*b' }}\n", "<<b>> a*b\n"),
        ("{{ stock - 1 }} {{ stock / 4 }} {{ 'c' in title }}", "1 0.5 true"),
        ("{%+ if title in ['x', 'a/b?c', 1] +%}{{ (stock) }}{% endif %}", "2"),
        ("{% for tag in 'a,b' | split(',') %}{{ tag }};{% endfor %}", "a;b;"),
        ("{% for name, value in tags[1] | items %}{{ name }}={{ value }}{% endfor %}", "y="),
        ("{{ tags | first }} {{ tags | last }} {{ tags | length }} {{ '3' | int }}", 'x {"y":null} 2 3'),
        ("{{ 'one two three' | truncate(9, leeway=0) }} {{ title[2:] }}", "one... b?c"),
        ("{{- title -}}   {{ stock }}", "a/b?c2"),
    ],
)
def test_what_is_written(source: str, text: str) -> None:
    assert rendered(source) == text


def test_names_of_the_attempt_go_before_columns_which_row_still_has() -> None:
    row = {"strategy": "column", "row": 5}
    assert rendered("{{ strategy }} {{ row.strategy }} {{ row.row }}", row, strategy="exact") == "exact column 5"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("one\n{{ title", "line 2: unexpected end of input, expected end of variable block"),
        ("{% nope %}", "line 1: unknown statement nope"),
        ("{% set a = 1 %}", "line 1: there is no statement 'set'"),
        ("a\nb {%- include 'a' %}", "line 2: there is no statement 'include'"),
        ("{% macro f() %}{% endmacro %}", "line 1: there is no statement 'macro'"),
        ("{{ title | attr('x') }}", "line 1: there is no filter 'attr'"),
        ("\n\n{{ 'a' | safe }}", "line 3: there is no filter 'safe'"),
        ("{{ title is fresh }}", "line 1: there is no test 'fresh'"),
        ("{{ title is not fresh }}", "line 1: there is no test 'fresh'"),
        ("{{ 'x' * 1000000000 }}", "line 1: the operator * is not available"),
        ("{{ title ~ title }}", "line 1: the operator ~ is not available"),
        ("{{ title + title }}", "line 1: the operator + is not available"),
        ("{{ [title, title] }}", "line 1: a list of other things than constants"),
        ("{{ (title, title) }}", "line 1: a list of other things than constants"),
        ("{% for x in [tags[0]] %}{% endfor %}", "line 1: a list of other things than constants"),
        ("{{ [['a']] }}", "line 1: a list of other things than constants"),
        ("{% for x in tags %}{{ title[1:] }}{% endfor %}", "has a slice inside a loop"),
        ("{{ '" + "x" * 5_000 + "' }}", "line 1: a text inside a block has more than 4,096 characters"),
        ("{{ {'a': 1} }}", "line 1: braces inside a block"),
        ("{{ '}}' * 9 }}", "line 1: braces inside a block"),
        (
            "x" * (MAX_TEMPLATE_CHARS + 1),
            f"has {MAX_TEMPLATE_CHARS + 1:,} characters, more than {MAX_TEMPLATE_CHARS:,}",
        ),
        ("{{ '\ud800' }}", "has half of a surrogate pair"),
        ("{{ " + "(" * 1_000 + "1" + ")" * 1_000 + " }}", "line 1: template exceeds maximum recursion limits"),
    ],
)
def test_what_cannot_be_a_template(source: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        compiled(source)
    assert caught.value.message == message
    assert caught.value.hint


@pytest.mark.timeout(15)
@pytest.mark.parametrize(
    "source",
    [
        # The engine would end the process.
        *(f"{{{{ {operator.join('a' * 15_000)} }}}}" for operator in ("-", " / ")),
        "{{ " + "-" * 60_000 + "1 }}",
        "{% if " + "-" * 60_000 + "1 %}{% endif %}",
        "{{ {} }}{{ " + "-" * 60_000 + "1 }}",
        "{% raw %}{% raw %}" + "{{ '" * 15_000,
        "{% raw -%}" * 6_000,
        "{{ " + " and ".join(["a in [1]"] * 4_900) + " }}",
        "{{ a" + "[0]" * 20_000 + " }}",
        "{#" * 32_000,
    ],
    ids=range(10),
)
def test_a_long_block_is_refused_before_the_engine_sees_it(source: str) -> None:
    with pytest.raises(UsageError, match=r"line 1: a block has more than 4,096 characters, or no end"):
        compiled(source)


def test_long_comments_texts_and_lists_are_none() -> None:
    assert rendered("{# " + "-" * 10_000 + " #}{% raw %}{{ " + "-" * 10_000 + "{% endraw %}") == "{{ " + "-" * 10_000
    assert rendered("{{ '" + "-" * 4_000 + "' == title }}") == "false"
    assert rendered("{{ title in [" + "'boot', " * 900 + "'x'] }}")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "a\n{{ colour }}",
            "line 2: there is no column 'colour'; the columns are title, price, stock, new, brand, tags, odd name",
        ),
        ("é {{ tags[1].z }}", "line 1: a value in {{ tags[1].z }} is not there"),
        ("{{ title.__class__ }}", "line 1: a value in {{ title.__class__ }} is not there"),
        ("{{ 1 / 0 }}", "line 1: unable to calculate 1 / 0"),
        ("{{ range(3) }}", "line 1: range is unknown"),
        ("{{ debug() }}", "line 1: debug is unknown"),
        ("{% for i in tags recursive %}{{ loop(tags) }}{% endfor %}", "line 1: recursion limit exceeded"),
        ("{{ tags | join(5) }}", "TypeError: object of type 'int' has no len()"),
        ("{{ row.clear() }}", "AttributeError: 'CountedMapping' object has no attribute 'clear'"),
        ("{{ tags.append(1) }}", "AttributeError: 'CountedList' object has no attribute 'append'"),
        ("{{ tags == tags }}", "lists and objects cannot be compared"),
        ("{{ row._raw }}", "line 1: a value in {{ row._raw }} is not there"),
    ],
)
def test_what_cannot_be_rendered(source: str, message: str) -> None:
    with pytest.raises(RenderError) as caught:
        rendered(source)
    assert str(caught.value) == message


def test_of_many_columns_some_are_listed() -> None:
    with pytest.raises(RenderError, match=r"the columns are c0, .*, c19 and 5 more$"):
        rendered("{{ x }}", {f"c{number}": 1 for number in range(25)})


class TestBounds:
    BIG = "é" * (MAX_RENDERED_BYTES // 4)

    def test_what_the_values_take(self) -> None:
        assert len(rendered("{{ t }}", {"t": self.BIG})) == len(self.BIG)
        with pytest.raises(RenderError, match="its values take more than 4,194,304 bytes"):
            rendered("{{ t }}{{ t }}{{ t }}", {"t": self.BIG})

    def test_one_image_is_not_counted(self) -> None:
        image = "i" * (2 * MAX_RENDERED_BYTES)
        assert rendered("{{ image }}{{ title }}", image=image) == image + "a/b?c"
        with pytest.raises(RenderError, match="its values take"):
            rendered("{{ image }}{{ image }}", image=image)

    @pytest.mark.parametrize("source", ["{{ t | replace('', 'xxxx') }}", "{{ l | join(t) }}", "{{ t | tojson }}"])
    def test_what_a_filter_makes(self, source: str) -> None:
        with pytest.raises(RenderError, match="a text in it has more than 4,194,304 characters"):
            rendered(source, {"t": '"' * (3 * MAX_RENDERED_BYTES // 4), "l": [1, 2]})

    @pytest.mark.parametrize(
        "source",
        [
            "{% for c in l %}{% if row.t | upper | length %}{% endif %}{% endfor %}",
            "{% for c in l %}{% if row.t %}{% endif %}{% endfor %}",
            "{% for c in l %}{% if c in m %}{% endif %}{% endfor %}",
            "{% for c in l %}{% if m | join | length %}{% endif %}{% endfor %}",
            "{% for c in l %}{% if row | tojson %}{% endif %}{% endfor %}",
            "{% for c in l %}{% for x in m %}{% endfor %}{% endfor %}",
            "{{ t | upper | lower | upper | lower | upper }}",
            "{% if 'x' in t %}{% endif %}" * 5,
            "{{ t[1:] }}" * 5,
        ],
    )
    def test_how_much_work_it_is(self, source: str) -> None:
        row = {"t": "é" * 1_000_000, "l": list(range(1_000)), "m": ["é" * 100] * 10_000}
        context = context_of(row)
        with pytest.raises(RenderError, match=r"it takes (more than 4,194,304|too many) steps|whose loops compare"):
            compiled(source).render(context)
        # One step over the bound is taken before it is noticed.
        assert context[METER].done <= MAX_WORK + 3_100_000

    def test_templates_of_a_row_share_the_bound(self) -> None:
        context = context_of({"l": [1]})
        looping = compiled("{% for c in l %}{{ c }}{% endfor %}")
        assert [looping.render(context) for _ in range(7)] == ["1"] * 7
        with pytest.raises(RenderError, match="it takes more than"):
            looping.render(context)

    def test_a_long_text_is_not_for_loops(self) -> None:
        row = {"t": "x" * 5_000, "l": [1], "m": ["x" * 5_000]}
        for source in ("{% for c in l %}{{ t }}{% endfor %}", "{% for c in l if t %}{% endfor %}"):
            with pytest.raises(RenderError, match="'t' has more than 4,096 characters, too many for use inside a loop"):
                rendered(source, row)
        with pytest.raises(
            RenderError, match="a text of more than 4,096 characters is in a template whose loops compare"
        ):
            rendered("{% for c in m %}{% if c == 'x' %}{% endif %}{% endfor %}", row)
        with pytest.raises(
            RenderError, match="a text of more than 512 characters is in a template whose loops compare"
        ):
            rendered("{% for c in m %}{% if 'x' in c %}{% endif %}{% endfor %}", {"m": ["x" * 600]})
        assert len(rendered("{{ t }}{% for c in m %}{{ c | upper }}{% endfor %}", row)) == 10_000

    def test_how_long_it_loops(self) -> None:
        rows = {"l": list(range(1_000))}
        assert len(rendered("{% for a in l %}{{ a }}{% endfor %}", rows)) == 2_890
        with pytest.raises(RenderError, match="it takes too many steps"):
            rendered("{% for a in l %}{% for b in l %}{{ a }}{% endfor %}{% endfor %}", rows)

    def test_how_often_a_long_text_is_repeated(self) -> None:
        with pytest.raises(RenderError, match="it takes too many steps"):
            rendered("{% for a in l %}" + "x" * 60 * KIB + "{% endfor %}", {"l": list(range(100_000))})


@given(TEXTS, TEXTS)
def test_a_value_in_a_path_never_leaves_its_segment(value: str, other: str) -> None:
    row = {"a": value, "b": other}
    if not value or not other:
        with pytest.raises(RenderError, match="a value in the path is empty"):
            rendered("/x/{{ a }}/{{ b }}.json", row, as_path_segment)
        return
    path = rendered("/x/{{ a }}/{{ b }}.json", row, as_path_segment)
    assert path.isascii()
    assert not set(path) & set("?#\\ ")
    empty, first, *segments = path.split("/")
    assert (empty, first) == ("", "x")
    assert [unquote(segment) for segment in segments] == [value, f"{other}.json"]
    assert segments[0] == quote(value, safe="")


@given(JSON)
def test_one_expression_keeps_the_json_type(value: Any) -> None:
    template = compiled_value("{{ cell }}")
    assert template.is_json
    found = json.loads(template.render(context_of({"cell": value})))
    assert found == value
    assert isinstance(found, bool) == isinstance(value, bool)
    assert json.loads(compiled_value('{{ row["cell"] }}').render(context_of({"cell": value}))) == value


@pytest.mark.parametrize(
    "source", ["{{ stock }} ", "x{{ stock }}", "{{ stock }}{{ stock }}", "{% if new %}1{% endif %}", "1"]
)
def test_anything_else_is_text(source: str) -> None:
    assert not compiled_value(source).is_json


@given(JSON)
def test_what_is_written_of_a_value_is_text_or_json(value: Any) -> None:
    text = rendered("{{ cell }}", {"cell": value})
    if value is None or isinstance(value, str):
        assert text == (value or "")
    else:
        assert json.loads(text) == value
    assert as_json(value) == as_text(value) or value is None or isinstance(value, str)

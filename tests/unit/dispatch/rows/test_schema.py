from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dispatch.rows.schema import MAX_PROPERTIES, check_schema, misfit, same_json
from penstock.errors import UsageError

PRODUCT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "category": {"enum": ["shoe", "hat", 1, None]},
        "price": {"type": ["number", "null"], "minimum": 0, "maximum": 10},
        "stock": {"type": "integer"},
        "title": {"type": "string", "minLength": 2, "maxLength": 4, "pattern": "^never$", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "size": {
            "type": "object",
            "properties": {"eu": {"type": "integer"}},
            "required": ["eu"],
            "additionalProperties": False,
        },
        "free": True,
        "none": False,
    },
    "required": ["category"],
    "additionalProperties": {"type": "boolean"},
}


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"category": "shoe"}, None),
        ({"category": 1.0, "price": None, "stock": 3.0, "title": "äöü", "tags": [], "free": {}}, None),
        ({"category": "hat", "size": {"eu": 42}, "more": True}, None),
        ([], "it is not of type object"),
        ({}, "category is missing"),
        ({"category": "coat"}, "category is none of the values in enum"),
        ({"category": True}, "category is none of the values in enum"),
        ({"category": "hat", "price": "1"}, "price is not of type number or null"),
        ({"category": "hat", "price": False}, "price is not of type number or null"),
        ({"category": "hat", "price": -0.5}, "price is less than 0"),
        ({"category": "hat", "price": 11}, "price is more than 10"),
        ({"category": "hat", "stock": 1.5}, "stock is not of type integer"),
        ({"category": "hat", "stock": True}, "stock is not of type integer"),
        ({"category": "hat", "title": "x"}, "the length of title is less than 2"),
        ({"category": "hat", "title": "xxxxx"}, "the length of title is more than 4"),
        ({"category": "hat", "tags": ["a", 1]}, "tags[1] is not of type string"),
        ({"category": "hat", "size": {}}, "size.eu is missing"),
        ({"category": "hat", "size": {"eu": 1, "us": 2}}, "size.us is not allowed"),
        ({"category": "hat", "size": {"eu": "1"}}, "size.eu is not of type integer"),
        ({"category": "hat", "none": 1}, "none is not allowed"),
        ({"category": "hat", "more": 1}, "more is not of type boolean"),
    ],
)
def test_what_fits(value: object, problem: str | None) -> None:
    check_schema(PRODUCT)
    assert misfit(value, PRODUCT) == problem


def test_other_keywords_are_not_checked() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/x", "anyOf": [{"type": "string"}], "pattern": "["}},
        "$defs": {"x": {"type": "nonsense"}},
    }
    check_schema(schema)
    assert misfit({"a": 1}, schema) is None


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({}, "is not the schema of an object with properties, which become the columns"),
        ({"type": "object"}, "is not the schema of an object with properties, which become the columns"),
        (
            {"type": "object", "properties": {}},
            "is not the schema of an object with properties, which become the columns",
        ),
        (
            {"type": "array", "properties": {"a": {}}},
            "is not the schema of an object with properties, which become the columns",
        ),
        ({"properties": dict.fromkeys(map(str, range(MAX_PROPERTIES + 1)), True)}, "has 201 properties"),
        ({"properties": {"": {}}}, "has a property without a name"),
        ({"properties": {"a": 3}}, "properties.a: is not a schema"),
        ({"properties": {"a": {"items": []}}}, "properties.a.items: is not a schema"),
        ({"properties": {"a": {"type": "text"}}}, "properties.a.type: 'text' is no type"),
        ({"properties": {"a": {"type": ["string", 3]}}}, "properties.a.type: ['string', 3] is no type"),
        ({"properties": {"a": {"type": {}}}}, "properties.a.type: {} is no type"),
        ({"properties": {"a": {"enum": []}}}, "properties.a.enum: is not a list of values"),
        ({"properties": {"a": {"minimum": "1"}}}, "properties.a.minimum: is not a number"),
        ({"properties": {"a": {"maxLength": True}}}, "properties.a.maxLength: is not a number"),
        ({"properties": {"a": {"required": "b"}}}, "properties.a.required: is not a list of names"),
        ({"properties": {"a": {"properties": []}}}, "properties.a.properties: is not an object of schemas"),
        ({"properties": {"a": True}, "required": [1]}, "required: is not a list of names"),
    ],
)
def test_what_is_refused(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_schema({"type": "object", **schema} if "properties" in schema else schema)
    assert caught.value.message == message
    assert caught.value.hint


def test_one_that_is_nested_too_deep_is_refused() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(40):
        schema = {"type": "array", "items": schema}
    with pytest.raises(UsageError, match="is nested more than 32 deep"):
        check_schema({"type": "object", "properties": {"a": schema}})


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=8,
)


@given(JSON, JSON)
def test_equality_is_that_of_json(one: Any, other: Any) -> None:
    def canonical(value: Any) -> Any:
        """Numbers and booleans, which are equal in Python, told apart."""
        if isinstance(value, dict):
            return {name: canonical(each) for name, each in value.items()}
        return [canonical(each) for each in value] if isinstance(value, list) else (type(value) is bool, value)

    assert same_json(one, one)
    assert same_json(one, other) == (canonical(one) == canonical(other))


@given(st.dictionaries(st.sampled_from(list(PRODUCT["properties"])), JSON))
def test_every_value_fits_or_says_where_it_does_not(value: dict[str, Any]) -> None:
    problem = misfit({"category": "hat", **value}, PRODUCT)
    assert problem is None or any(name in problem for name in value)

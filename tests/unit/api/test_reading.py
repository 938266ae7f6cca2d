from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

import msgspec
import pytest

from penstock.api.errors import ApiError
from penstock.api.reading import BodyReader, QueryReader


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    seconds: Annotated[int, msgspec.Meta(ge=1)]


class Body(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    inner: Inner | None = None
    tags: list[str] = []
    labels: dict[Annotated[str, msgspec.Meta(max_length=3)], str] = {}


class Query(msgspec.Struct):
    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    wait: float | None = None
    status: list[str] = []
    metadata: dict[str, str] = {}
    since: Annotated[datetime, msgspec.Meta(tz=True)] | None = None


def refusal(content: bytes, kind: object = Body, content_type: str | None = "application/json") -> ApiError:
    with pytest.raises(ApiError) as caught:
        BodyReader(kind).read(content, content_type)
    return caught.value


@pytest.mark.parametrize(
    ("content", "status", "param"),
    [
        (b"", 400, None),
        (b"{", 400, None),
        (b"[]", 400, None),
        (b'{"name": "\xff"}', 400, None),
        (b"[" * 100_000, 400, None),
        (b'{"inner": null}', 400, "name"),
        (b'{"name": 5}', 400, "name"),
        (b'{"name": "a", "inner": {"seconds": 0}}', 400, "inner.seconds"),
        (b'{"name": "a", "tags": ["a", 5]}', 400, "tags[1]"),
        (b'{"name": "a", "labels": {"long": "b"}}', 400, "labels"),
        (b'{"name": "a", "owner": "b"}', 422, "owner"),
        (b'{"name": "a", "inner": {"seconds": 1, "state": 2}}', 422, "inner.state"),
        (b'{"name": "a", "inner": {"seconds": 1, "a - at `$.b": 2}}', 422, "inner.a - at "),
    ],
)
def test_a_bad_body_is_answered_with_its_field(content: bytes, status: int, param: str | None) -> None:
    error = refusal(content)
    assert (error.status, error.param) == (status, param)
    assert param is None or f"'{param}'" in error.message


@pytest.mark.timeout(20)
def test_a_field_with_a_long_name_is_refused_at_once() -> None:
    assert refusal(b'{"name": "a", "inner": {"%b": 1}}' % (b" - at `$" * 100_000)).status in (400, 422)


def test_an_optional_body_may_be_absent() -> None:
    assert BodyReader[Body | None](Body | None).read(b" ", "application/json") is None
    assert BodyReader[Body | None](Body | None).read(b'{"name": "a"}', None) == Body("a")


def test_a_body_of_another_type_is_refused() -> None:
    assert refusal(b'{"name": "a"}', content_type="text/plain").status == 415
    assert BodyReader[Body](Body).read(b'{"name": "a"}', "application/json; charset=utf-8") == Body("a")


def test_a_query_is_converted() -> None:
    read = QueryReader(Query).read
    assert read(b"") == Query()
    assert read(b"limit=5&order=asc&wait=1.5") == Query(5, "asc", 1.5)
    assert read(b"status=a&status=b&metadata[k]=v&metadata%5Bx%20y%5D=z&other=1") == Query(
        status=["a", "b"], metadata={"k": "v", "x y": "z"}
    )
    assert read(b"status[]=a") == Query(status=["a"])
    assert read(b"since=2026-01-02T03:04:05Z") == Query(since=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))
    # Every key can be asked for: one that was not understood would not narrow the answer.
    assert read(b"metadata[[]=a&metadata[x]]=b&metadata[]=c") == Query(metadata={"[": "a", "x]": "b", "": "c"})


@pytest.mark.parametrize(
    ("query", "param"),
    [
        (b"limit=0", "limit"),
        (b"limit=x", "limit"),
        (b"limit=", "limit"),
        (b"order=up", "order"),
        (b"metadata=3", "metadata"),
        (b"wait=null", "wait"),
        (b"since=0.5", "since"),
        (b"since=-1e3", "since"),
        (b"since=2026-01-02T03:04:05", "since"),
    ],
)
def test_a_bad_query_is_answered_with_its_parameter(query: bytes, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        QueryReader(Query).read(query)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_query_of_many_fields_is_refused() -> None:
    with pytest.raises(ApiError) as caught:
        QueryReader(Query).read(b"a=1&" * 1000)
    assert caught.value.status == 400

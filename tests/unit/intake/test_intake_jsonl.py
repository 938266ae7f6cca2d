"""The line parser: what it takes, what it refuses and how it says so, however the bytes are cut."""

from __future__ import annotations

import json
import struct
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import IntakeLimits
from penstock.intake.jsonl import JsonlParser
from penstock.intake.refusal import BadLine, IntakeRefused
from penstock.intake.rows import FileLane

LIMITS = IntakeLimits()
URL = "/v1/chat/completions"


class Row(NamedTuple):
    source_lane: int
    ordinal: int
    line: int
    custom_id: str
    body: bytes


class Parsed(NamedTuple):
    rows: list[Row]
    lanes: list[FileLane]


def unpack(packed: bytes) -> list[Row]:
    """Read rows the way COPY does."""
    rows, at = [], 0
    while at < len(packed):
        (count,) = struct.unpack_from("!h", packed, at)
        at += 2
        fields: list[bytes | None] = []
        for _ in range(count):
            (length,) = struct.unpack_from("!i", packed, at)
            at += 4
            fields.append(None if length < 0 else packed[at : at + length])
            at += max(length, 0)
        source_id, source_lane, ordinal, line, custom_id, summary, body = fields
        assert source_id == struct.pack("!q", 7)
        assert summary is None
        assert source_lane is not None
        assert ordinal is not None
        assert line is not None
        assert custom_id is not None
        assert body is not None
        rows.append(
            Row(
                int.from_bytes(source_lane),
                int.from_bytes(ordinal),
                int.from_bytes(line),
                custom_id.decode(),
                body,
            )
        )
    return rows


def parse(data: bytes, *, limits: IntakeLimits = LIMITS, chunk: int = 1 << 20) -> Parsed:
    blocks: list[bytes] = []
    parser = JsonlParser("in.jsonl", 7, limits, lambda rows, _: blocks.append(rows))
    try:
        for at in range(0, len(data), chunk):
            parser.feed(data[at : at + chunk])
        parser.finish()
    finally:
        parser.close()
    return Parsed(unpack(b"".join(blocks)), parser.lanes)


def refusal(data: bytes, **options: Any) -> IntakeRefused:
    with pytest.raises(IntakeRefused) as caught:
        parse(data, **options)
    return caught.value


def only_bad(data: bytes, **options: Any) -> BadLine:
    (bad,) = refusal(data, **options).bad_lines
    return bad


def request(custom_id: str = "a", body: str = "{}", **others: Any) -> bytes:
    fields = {"custom_id": custom_id, "url": URL, **others}
    return json.dumps(fields)[:-1].encode() + b', "body": ' + body.encode() + b"}\n"


def test_rows_carry_line_lane_ordinal_and_the_body_as_it_was_written() -> None:
    data = (
        request("a", '{"model": "m",  "n": 1.50}')
        + request("b", '{"model": "k"}')
        + request("c", '{ "model":"m", "é": "\\u00e9" }')
    )
    rows, lanes = parse(data)
    assert rows == [
        Row(0, 0, 1, "a", b'{"model": "m",  "n": 1.50}'),
        Row(1, 0, 2, "b", b'{"model": "k"}'),
        Row(0, 1, 3, "c", '{ "model":"m", "é": "\\u00e9" }'.encode()),
    ]
    assert lanes == [FileLane(0, "m", URL, 2), FileLane(1, "k", URL, 1)]


def test_lanes_are_told_apart_by_url_too_and_a_missing_model_is_the_default_route() -> None:
    _, lanes = parse(request("a") + request("b", url="/v1/embeddings"))
    assert lanes == [FileLane(0, "default", URL, 1), FileLane(1, "default", "/v1/embeddings", 1)]


@pytest.mark.parametrize(
    "line",
    [
        b'{"body":{"x":1},"custom_id":"a","url":"/v1/x"}',
        b'{"body":{"x":1},"custom_id":"a","url":"/v1/x","method":"POST"}',
        b' { "custom_id" : "a" , "url" : "/v1/x" , "body" : {"x":1} } ',
        b'{"custom_id":"a","url":"/v1/x","body":  {"x":1}  }\t',
        b'{"custom_id":"a","url":"/v1/x","body":{"x":1},"extra":[{"y":"}"}]}',
        b'{"extra":{"body":{}},"custom_id":"a","url":"/v1/x","body":{"x":1}}',
        b'{"custom_id":"\\u0061","url":"\\/v1/x","body":{"x":1}}',
        b'{"cus\\u0074om_id":"a","url":"/v1/x","body":{"x":1}}',
        b'{"custom_id":"a","url":"/v1/x","a \\"quoted\\" key":0,"body":{"x":1}}',
        b'{"custom_id":"a","url":"/v1/x","\\"body":{"z":1},"body":{"x":1}}',
    ],
)
def test_the_way_a_line_is_written_does_not_matter(line: bytes) -> None:
    assert parse(line).rows == [Row(0, 0, 1, "a", b'{"x":1}')]


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_bom_line_ends_and_blank_lines_are_tolerated(newline: bytes, last: bool, chunk: int) -> None:
    lines = [b"", request("a").strip(), b"   \t", b"", request("b").strip()]
    data = b"\xef\xbb\xbf" + newline.join(lines) + (newline if last else b"")
    rows = parse(data, chunk=chunk).rows
    assert [(row.line, row.custom_id, row.body) for row in rows] == [(2, "a", b"{}"), (5, "b", b"{}")]


BAD_LINES = {
    "not JSON": (b"{oops}", "", "invalid_json_line", "not valid JSON: Expecting property name"),
    "cut short": (b'{"custom_id": "a", "url": "/x", "body": {"k": "v', "", "invalid_json_line", "column"),
    "two objects": (b'{"body":{}} {"body":{}}', "", "invalid_json_line", "Extra data at column 13"),
    "garbage for the last brace": (
        b'{"custom_id":"a","url":"/x","body":{}x',
        "",
        "invalid_json_line",
        'found "x"',
    ),
    "NULs, which json takes for UTF-16": (b"{\0}\0\0", "", "invalid_json_line", "not valid JSON"),
    "an array": (b"[1]", "", "invalid_json_line", "found an array; expected a JSON object"),
    "a number": (b"1e999", "", "invalid_json_line", "found a number; expected a JSON object"),
    "NaN": (request("a", '{"t": NaN}'), "", "invalid_json_line", "NaN is not a JSON value; write null"),
    "half a surrogate pair": (request("a", '{"t": "\\ud83d"}'), "", "invalid_json_line", "other half"),
    "half a pair in the id": (
        b'{"custom_id": "\\ud83d", "url": "/x", "body": {}}',
        "",
        "invalid_json_line",
        "other half",
    ),
    "bad UTF-8 in the body": (
        request("a", '{"t": "?"}').replace(b"?", b"\xff"),
        "",
        "invalid_json_line",
        "0xff) is not valid UTF-8",
    ),
    "bad UTF-8 in an unknown key": (
        b'{"custom_id":"a","url":"/x","\xe9":1,"body":{}}',
        "",
        "invalid_json_line",
        "byte 30 (0xe9) is not valid UTF-8",
    ),
    "a surrogate in UTF-8": (
        request("a", '{"t": "?"}').replace(b"?", b"\xed\xa0\x80"),
        "",
        "invalid_json_line",
        "not valid UTF-8",
    ),
    "a BOM further down": (b"\xef\xbb\xbf{}", "", "invalid_json_line", "byte order mark"),
    "no custom_id": (b'{"url": "/x", "body": {}}', "custom_id", "missing_required_parameter", "missing"),
    "no url": (b'{"custom_id": "a", "body": {}}', "url", "missing_required_parameter", "missing"),
    "no body": (b'{"custom_id": "a", "url": "/x"}', "body", "missing_required_parameter", "missing"),
    "no url and no body": (b'{"custom_id": "a"}', "url", "missing_required_parameter", "missing, and so is body;"),
    "nothing": (b"{}", "custom_id", "missing_required_parameter", "so are url and body; a request has custom_id, url"),
    "custom_id a number": (
        b'{"custom_id": 1, "url": "/x", "body": {}}',
        "custom_id",
        "invalid_request",
        "found a number; expected a string",
    ),
    "custom_id empty": (request(""), "custom_id", "invalid_request", "empty"),
    "custom_id too long": (request("x" * 513), "custom_id", "invalid_request", "513 characters long"),
    "custom_id with NUL": (request("a\0b"), "custom_id", "invalid_request", "U+0000"),
    "method GET": (request(method="GET"), "method", "invalid_request", 'found "GET"; expected "POST"'),
    "method null": (request(method=None), "method", "invalid_request", "found null"),
    "url with a host": (request(url="https://a.b/v1/x"), "url", "invalid_request", "https://a.b/v1/x"),
    "url of another host": (request(url="//a.b/v1/x"), "url", "invalid_request", "expected a path"),
    "url going up": (request(url="/v1/../admin"), "url", "invalid_request", "expected a path"),
    "url going up at the end": (request(url="/v1/.."), "url", "invalid_request", "expected a path"),
    "url going up, escaped": (request(url="/v1/%2e%2e/x"), "url", "invalid_request", "expected a path"),
    "url with a query": (request(url="/v1/x?y"), "url", "invalid_request", "expected a path"),
    "url with a fragment": (request(url="/v1/x#y"), "url", "invalid_request", "expected a path"),
    "url with a line break": (request(url="/v1/x\r\nHost: y"), "url", "invalid_request", "expected a path"),
    "url with a last line break": (request(url="/v1/x\n"), "url", "invalid_request", "expected a path"),
    "url with a backslash": (request(url="/\\a.b"), "url", "invalid_request", "expected a path"),
    "url empty": (request(url=""), "url", "invalid_request", "expected a path"),
    "url too long": (request(url="/" + "x" * 2000), "url", "invalid_request", "2,001 characters"),
    "body a string": (request(body='"{}"'), "body", "invalid_request", "found a string"),
    "body null": (request(body="null"), "body", "invalid_request", "found null"),
    "body an array": (request(body="[]"), "body", "invalid_request", "found an array"),
    "model a number": (request(body='{"model": 4}'), "body.model", "invalid_request", "found a number"),
    "model null": (request(body='{"model": null}'), "body.model", "invalid_request", "found null"),
    "model empty": (request(body='{"model": ""}'), "body.model", "invalid_request", "empty"),
    "model with NUL": (request(body='{"model": "\\u0000"}'), "body.model", "invalid_request", "control"),
    "model too long": (request(body='{"model": "%s"}' % ("m" * 600)), "body.model", "invalid_request", "600"),
    "custom_id twice": (
        b'{"custom_id":"a","custom_id":"b","url":"/x","body":{}}',
        "custom_id",
        "invalid_request",
        "the key is there twice",
    ),
    "url twice": (b'{"url":"/y","custom_id":"b","url":"/x","body":{}}', "url", "invalid_request", "twice"),
    "body twice": (b'{"custom_id":"a","url":"/x","body":{},"body":{}}', "body", "invalid_request", "twice"),
    "body twice, in disguise": (
        b'{"b\\u006fdy":{"k":"v"},"custom_id":"a","url":"/x","body":{}}',
        "body",
        "invalid_request",
        "twice",
    ),
    "an unknown key twice": (
        b'{"custom_id":"a","url":"/x","q":1,"q":2,"body":{}}',
        "q",
        "invalid_request",
        "twice",
    ),
    "5,000 digits": (request("a", '{"n": %s}' % ("7" * 5000)), "", "invalid_request", "thousands of digits"),
    "200 levels": (request("a", '{"n": %s}' % ("[" * 200 + "]" * 200)), "", "invalid_request", "nested"),
    "100,000 levels": (
        request("a", '{"n": %s}' % ("[" * 100_000 + "]" * 100_000)),
        "",
        "invalid_request",
        "nested deeper than 128 levels",
    ),
}


@pytest.mark.parametrize(("line", "field", "code", "text"), BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_bad_line_is_named_with_its_field_and_reason(line: bytes, field: str, code: str, text: str) -> None:
    before = request("first", '{"model": "m"}') + request("second", '{"model": "m"}')
    bad = only_bad(before + b"\n" + line.rstrip(b"\n") + b"\n" + request("last"))
    assert (bad.line, bad.field, bad.code) == (4, field, code)
    assert text in bad.reason


@pytest.mark.parametrize(
    "body",
    [
        '{"n": %s}' % ("7" * 4000),
        '{"digits in a string": "%s"}' % ("7" * 9000),
        '{"n": %s}' % ("[" * 126 + "]" * 126),
        '{"brackets in a string": "%s"}' % ("[" * 1000),
        json.dumps({"wide": [[]] * 1000}),
        '{"t": "\\ud83d\\ude00 😀"}',
        '{"n": [1e-400, -0, 123456789012345678901234567890]}',
        '{"a": 1, "a": 2}',
        '{"body": {"custom_id": "\\"}"}}',
    ],
)
def test_unusual_bodies_pass_byte_for_byte(body: str) -> None:
    assert parse(request("a", body)).rows == [Row(0, 0, 1, "a", body.encode())]


@pytest.mark.parametrize("chunk", [7, 1 << 20])
def test_blocks_of_blank_lines_are_counted(chunk: int) -> None:
    data = b"\n" * 999 + request("a") + b" \r\n" * 999 + b"oops\n" + b"\n" * 99 + request("a")
    assert [bad.line for bad in refusal(data, chunk=chunk).bad_lines] == [2000, 2100]


def test_a_repeated_custom_id_names_both_lines() -> None:
    bad = only_bad(request("a") + request("b") + b"\n" + request("a"))
    assert (bad.line, bad.field, bad.code) == (4, "custom_id", "duplicate_custom_id")
    assert bad.reason == '"a" is already used on line 1; expected once in the file'


def test_the_same_id_spelled_differently_is_the_same_id() -> None:
    bad = only_bad(request("\u00e9") + b'{"custom_id": "\xc3\xa9", "url": "/x", "body": {}}')
    assert bad.code == "duplicate_custom_id"


def test_all_kinds_of_faults_are_reported_together_in_line_order() -> None:
    error = refusal(request("a") + request("a") + b"oops\n" + request("a", url="no"))
    assert [(bad.line, bad.field) for bad in error.bad_lines] == [(2, "custom_id"), (3, ""), (4, "url")]
    assert not error.more
    assert error.message.splitlines() == [
        "in.jsonl: 3 lines are not valid; nothing was stored",
        '  line 2, custom_id: "a" is already used on line 1; expected once in the file',
        '  line 3: not valid JSON: Expecting value at column 1, found "oops"',
        '  line 4, url: found "no"; expected a path such as /v1/chat/completions, '
        "without host, query, escapes or dot segments",
    ]


def test_nothing_is_passed_on_after_the_first_bad_line() -> None:
    blocks: list[bytes] = []
    parser = JsonlParser("in.jsonl", 7, LIMITS, lambda rows, _: blocks.append(rows))
    for line in (request("a"), b"oops\n", request("b")):
        parser.feed(line)
    assert [row.custom_id for row in unpack(b"".join(blocks))] == ["a"]


def test_the_list_of_bad_lines_is_capped_and_says_so() -> None:
    limits = IntakeLimits(max_reported_lines=3)
    error = refusal(b"oops\n" * 1000, limits=limits)
    assert [bad.line for bad in error.bad_lines] == [1, 2, 3]
    assert error.more
    assert error.message.startswith("in.jsonl: more than 3 lines are not valid")
    assert not refusal(b"oops\n" * 3, limits=limits).more
    assert refusal(request("a") * 5, limits=limits).more


@pytest.mark.parametrize("data", [b"", b"\n\r\n  \n", b"\xef\xbb\xbf"])
def test_a_file_without_requests_is_refused(data: bytes) -> None:
    error = refusal(data)
    assert error.code == "empty_file"
    assert error.message == "in.jsonl: holds no requests"


@pytest.mark.parametrize("chunk", [10, 64, 100_000])
def test_a_line_too_long_is_refused_and_the_next_ones_are_still_checked(chunk: int) -> None:
    limits = IntakeLimits(max_line_bytes=100)
    long = request("a", '{"t": "%s"}' % ("x" * 500))
    data = request("b") + long + b"oops\n" + long.strip()
    error = refusal(data, limits=limits, chunk=chunk)
    assert [bad.line for bad in error.bad_lines] == [2, 3, 4]
    assert error.bad_lines[0].reason == "longer than 100 bytes (max_line_bytes)"
    assert error.bad_lines[2].reason == "longer than 100 bytes (max_line_bytes)"
    assert "--set max_line_bytes=" in str(error.hint)
    assert "max_line_bytes" not in str(refusal(b"oops\n").hint)


def test_a_line_too_long_is_not_held() -> None:
    parser = JsonlParser("in.jsonl", 7, IntakeLimits(max_line_bytes=1000), lambda *_: None)
    for _ in range(100):
        parser.feed(b"x" * 100)
    assert sum(map(len, parser._held)) <= 1000


def test_too_many_requests_and_too_many_routes() -> None:
    data = b"".join(request(str(n), json.dumps({"model": f"m{n}"})) for n in range(5))
    assert refusal(data, limits=IntakeLimits(max_lines=4)).code == "too_many_tasks"
    assert len(parse(data, limits=IntakeLimits(max_lines=5)).rows) == 5
    bad = only_bad(data, limits=IntakeLimits(max_routes_per_file=4))
    assert (bad.line, bad.field) == (5, "body.model")
    assert "max_routes_per_file" in bad.reason


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@st.composite
def written_lines(draw: st.DrawFn) -> tuple[bytes, Row | None]:
    """A line as some program may write it, and the row it must become (lane and ordinal aside)."""
    if draw(st.booleans()) and draw(st.booleans()):
        return draw(st.sampled_from([b"", b" ", b"\t"])), None
    encoder = json.JSONEncoder(
        ensure_ascii=draw(st.booleans()),
        separators=draw(st.sampled_from([(",", ":"), (", ", ": "), (" , ", " : ")])),
    )
    keys = st.text().filter(lambda key: key not in ("model", "stream"))  # these two mean something
    body = encoder.encode(draw(st.dictionaries(keys, json_values)))
    custom_id = draw(
        st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=20)
    )
    fields = {"custom_id": encoder.encode(custom_id), "url": encoder.encode(URL), "body": body}
    if draw(st.booleans()):
        fields["method"] = '"POST"'
    if draw(st.booleans()):
        fields["note"] = encoder.encode(draw(json_values))
    names = draw(st.permutations(list(fields)))
    text = encoder.item_separator.join(f'"{name}"{encoder.key_separator}{fields[name]}' for name in names)
    return f"{{{text}}}".encode(), Row(0, 0, 0, custom_id, body.encode())


@given(
    st.lists(written_lines(), max_size=8),
    st.sampled_from([b"\n", b"\r\n"]),
    st.integers(min_value=1, max_value=64),
)
def test_any_writing_and_any_cutting_give_the_same_rows(
    written: list[tuple[bytes, Row | None]], newline: bytes, chunk: int
) -> None:
    expected: list[Row] = []
    seen: set[str] = set()
    lines: list[bytes] = []
    for line, row in written:
        if row is not None and row.custom_id in seen:
            continue
        lines.append(line)
        if row is not None:
            seen.add(row.custom_id)
            expected.append(row._replace(line=len(lines), ordinal=len(expected)))
    data = newline.join(lines)
    if not expected:
        assert refusal(data, chunk=chunk).code == "empty_file"
    else:
        assert parse(data, chunk=chunk).rows == expected


@given(st.lists(st.binary(max_size=40) | st.sampled_from([request("a"), request("b")]), max_size=8), st.data())
def test_any_bytes_are_taken_or_refused_alike_however_they_are_cut(lines: list[bytes], data: st.DataObject) -> None:
    whole = b"\n".join(lines)

    def outcome(chunk: int) -> object:
        try:
            return parse(whole, chunk=chunk)
        except IntakeRefused as error:
            return str(error)

    assert outcome(1 << 20) == outcome(data.draw(st.integers(min_value=1, max_value=50)))


@pytest.mark.parametrize(
    ("tail", "body"),
    [
        (b'{"x": 1}}', b'{"x": 1}'),
        (b'{"x": 1} }', b'{"x": 1}'),
        (b'{"x": 1}, "later": {}}', b'{"x": 1}'),
        (b'{"x": 1}, "body": {}}', None),
        (b'{"x": 1}, "custom_id": {}}', None),
        (b'{"x": 1}}}', None),
        (b'{"x": 1}', None),
        (b'{"x": 1}} {}', None),
        (b'{"x": 1]}', None),
        (b"{}, {}}", None),
        (b"[{}]}", None),
    ],
)
def test_a_line_that_starts_like_the_one_before_is_not_taken_for_it(tail: bytes, body: bytes | None) -> None:
    data = request("y") + request("z") + request("b").removesuffix(b"{}}\n") + tail + b"\n" + request("c")
    if body is None:
        assert only_bad(data).line == 3
    else:
        assert [row.body for row in parse(data).rows] == [b"{}", b"{}", body, b"{}"]


@pytest.mark.parametrize("custom_id", ["POST", "url", ":", ", ", "custom_id", URL, "~", "a\\b", 'a"b', "é"])
def test_ids_that_look_like_other_parts_of_the_line(custom_id: str) -> None:
    others = [f"{custom_id}{number}" for number in range(3)]
    for ids in ([custom_id, *others], [*others, custom_id]):
        for form in (
            '{{"x": "~", {id}, {url}, {body}}}',
            "{{{id}, {method}, {url}, {body}}}",
            "{{{method}, {url}, {id}, {body}}}",
        ):
            data = "\n".join(
                form.format(
                    id=f'"custom_id": {json.dumps(name)}',
                    method='"method": "POST"',
                    url=f'"url": {json.dumps(URL)}',
                    body='"body": {}',
                )
                for name in ids
            )
            assert [row.custom_id for row in parse(data.encode()).rows] == ids


def test_a_shape_is_only_expected_where_it_fits() -> None:
    """Every line is like the one before but for a key that changes, then for the url."""
    lines = [request(f"a{n}", extra=n // 2) for n in range(10)]
    lines += [request(f"b{n}", url=f"/v1/{n // 3}") for n in range(10)]
    rows, lanes = parse(b"".join(lines))
    assert [row.line for row in rows] == list(range(1, 21))
    assert [(lane.endpoint, lane.total) for lane in lanes] == [
        (URL, 10),
        ("/v1/0", 3),
        ("/v1/1", 3),
        ("/v1/2", 3),
        ("/v1/3", 1),
    ]


@st.composite
def damaged_files(draw: st.DrawFn) -> list[bytes]:
    """Lines one program wrote, some of them changed in one place."""
    method = {"method": "POST"} if draw(st.booleans()) else {}
    bodies = draw(st.lists(st.dictionaries(st.sampled_from(["model", "a", "é"]), json_values), min_size=2, max_size=6))
    lines = []
    for number, body in enumerate(bodies):
        line = request(f"id-{number}", json.dumps(body, ensure_ascii=False), **method).rstrip(b"\n")
        if draw(st.booleans()):
            at = draw(st.integers(min_value=0, max_value=len(line)))
            replaced = draw(st.integers(min_value=0, max_value=2))
            line = line[:at] + draw(st.sampled_from(DAMAGE)) + line[at + replaced :]
        lines.append(line)
    return lines


DAMAGE = [
    b"",
    b" ",
    b'"',
    b"\\",
    b"{",
    b"}",
    b"}}",
    b",",
    b"\x00",
    b"\x1f",
    b"\xff",
    b"\xc3\xa9",
    b"\\u0000",
    b"/",
    b"x",
]


@given(damaged_files())
def test_a_line_is_judged_alike_alone_and_among_lines_of_its_shape(lines: list[bytes]) -> None:
    limits = IntakeLimits(max_reported_lines=100)
    alone: dict[int, bytes | str] = {}
    for number, line in enumerate(lines, 1):
        try:
            alone[number] = parse(line, limits=limits).rows[0].body
        except IntakeRefused as error:
            alone[number] = error.bad_lines[0].reason
    # Two untouched lines first, so that their shape is expected of all the others.
    data = request("y") + request("z") + b"\n".join(lines)
    try:
        together = {row.line - 2: row.body for row in parse(data, limits=limits).rows[2:]}
    except IntakeRefused as error:
        refused = {bad.line - 2: bad.reason for bad in error.bad_lines if bad.code != "duplicate_custom_id"}
        assert refused == {number: found for number, found in alone.items() if isinstance(found, str)}
    else:
        assert together == alone

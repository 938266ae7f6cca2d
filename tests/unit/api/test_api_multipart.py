"""Forms taken as they arrive: however they are cut, in whatever order their fields come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.errors import ApiError
from penstock.api.multipart import Form, clean_filename, clean_path

FIELDS = frozenset({"purpose", "note"})
TYPE = "multipart/form-data; boundary=edge"


def body(parts: list[tuple[str, bytes]]) -> bytes:
    content = b"".join(
        b"--edge\r\nContent-Disposition: form-data; " + head.encode() + b"\r\n\r\n" + value + b"\r\n"
        for head, value in parts
    )
    return content + b"--edge--\r\n"


# What looks like the boundary, or the beginning of it, is what a parser trips over.
contents = st.lists(
    st.sampled_from(
        [b"\r", b"\n", b"\r\n", b"--", b"\r\n--", b"\r\n--edg", b"edge", b"\r\n--edges", b"{}", b"\x00\xff"]
    )
    | st.binary(max_size=20)
).map(b"".join)


@given(contents, st.text(st.characters(exclude_categories=["Cs"]), max_size=20), st.booleans(), st.data())
def test_a_form_is_the_same_however_it_is_cut(content: bytes, note: str, file_first: bool, data: st.DataObject) -> None:
    if b"\r\n--edge" in b"\r\n" + content:
        content = content.replace(b"edge", b"")
    parts = [('name="purpose"', b"batch"), ('name="note"', note.encode()), ('name="file"; filename="a.jsonl"', content)]
    if "\r\n--edge" in f"\r\n{note}":
        parts[1] = ('name="note"', b"")
        note = ""
    whole = body(parts[::-1] if file_first else parts)
    form = Form(TYPE, "file", FIELDS)
    found = b""
    while whole:
        size = data.draw(st.integers(1, len(whole)))
        found += b"".join(form.write(whole[:size]))
        whole = whole[size:]
    form.finish()
    assert found == content
    assert form.fields == {"purpose": "batch", "note": note}
    assert form.filename == "a.jsonl"


@given(st.lists(contents, min_size=1, max_size=3), st.data())
def test_several_files_come_one_after_the_other(files: list[bytes], data: st.DataObject) -> None:
    files = [content.replace(b"edge", b"") for content in files]
    whole = body([(f'name="file"; filename="a/{n}.png"', content) for n, content in enumerate(files)])
    form = Form(TYPE, "file", FIELDS, max_files=3)
    found = b""
    while whole:
        size = data.draw(st.integers(1, len(whole)))
        found += b"".join(form.write(whole[:size]))
        whole = whole[size:]
    form.finish()
    assert found == b"".join(files)
    assert form.files == [(f"a/{n}.png", len(content)) for n, content in enumerate(files)]
    assert form.filename == "0.png"


@pytest.mark.parametrize(("most", "words"), [(1, "'file' is given twice"), (2, "'file' is given more than 2 times")])
def test_more_files_than_are_taken_are_refused(most: int, words: str) -> None:
    form = Form(TYPE, "file", FIELDS, max_files=most)
    with pytest.raises(ApiError, match=words):
        form.write(body([('name="file"; filename="a"', b"x")] * (most + 1)))


@given(st.binary(max_size=200))
def test_nothing_but_a_form_is_taken_for_one(junk: bytes) -> None:
    form = Form(TYPE, "file", FIELDS)
    with pytest.raises(ApiError) as error:  # noqa: PT012 -- either may refuse
        form.write(junk)
        form.finish()
    assert error.value.status == 400


def test_what_comes_after_the_end_is_bounded() -> None:
    form = Form(TYPE, "file", FIELDS)
    form.write(body([('name="file"; filename="a"', b"x")]) + b"a little more")
    with pytest.raises(ApiError, match="goes on after"):  # noqa: PT012
        for _ in range(1000):
            form.write(b"x" * 1000)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("a.jsonl", "a.jsonl"),
        ("/etc/passwd", "passwd"),
        ("..\\..\\boot.ini", "boot.ini"),
        ("näme 1.jsonl", "näme 1.jsonl"),
        ("a\x00b\r\nc", "abc"),
        ("", "upload"),
        ("..", "upload"),
        ("x" * 300, "x" * 255),
    ],
)
def test_names_are_cleaned(name: str, kept: str) -> None:
    assert clean_filename(name) == kept


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        ("a.png", "a.png"),
        ("photos/2024/a.png", "photos/2024/a.png"),
        ("C:\\photos\\a.png", "C:/photos/a.png"),
        ("/etc/../passwd", "etc/passwd"),
        ("a\x00/\n/b", "a/b"),
        ("../..", "upload"),
    ],
)
def test_paths_are_cleaned(path: str, kept: str) -> None:
    assert clean_path(path) == kept

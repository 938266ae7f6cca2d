"""`[[sinks]]` read from a file: what is wrong is said with its file, entry and field."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from penstock import config_sources
from penstock.deliver.sink_config import TYPES, Sink, any_wants, parse
from penstock.errors import UsageError

GOOD: dict[str, Any] = {"name": "crm", "url": "https://crm.internal:9443/events?x=1", "secret_env": "CRM"}


def _one(**changed: Any) -> Sink:
    entry = {name: value for name, value in {**GOOD, **changed}.items() if value is not None}
    (sink,) = parse([entry], "penstock.toml")
    return sink


def test_a_file_of_sinks(tmp_path: Path) -> None:
    toml = tmp_path / "penstock.toml"
    toml.write_text(
        '[[sinks]]\nname = "a"\nurl = "http://10.0.0.1/x"\nsecret_file = "/run/s"\nmode = "binary"\nrequests = "all"\n'
        f'types = ["{TYPES[0]}"]\nowners = ["ann"]\nsource = "urn:here"\n'
        '[[sinks]]\nname = "b"\nurl = "http://localhost:8000"\nsecret_env = "S"\n'
    )
    first, second = config_sources.load(toml_path=toml, environ={}).sinks
    assert first == Sink("a", "http://10.0.0.1/x", None, "/run/s", "binary", "all", (TYPES[0],), ("ann",), "urn:here")
    assert second == Sink("b", "http://localhost:8000", "S")
    assert (second.mode, second.requests, second.types, second.owners) == ("structured", "events", TYPES, ())


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"name": ""}, "entry 1 (): name: is missing"),
        ({"name": "a b"}, "name: 'a b' is not a name"),
        ({"url": "ftp://x"}, "entry 1 (crm): url: must be http"),
        ({"url": None}, "url: is missing"),
        ({"secret_env": None}, "neither secret_env nor secret_file"),
        ({"secret_file": "/x"}, "secret_env is given too"),
        ({"mode": "batched"}, "mode: 'batched' is not one of structured, binary"),
        ({"requests": "some"}, "requests: 'some' is not one of events, all"),
        ({"types": ["x"]}, "types: 'x' is none"),
        ({"owners": "ann"}, "owners: is not a list of texts"),
        ({"source": "not a uri"}, "source: 'not a uri'"),
        ({"colour": "red"}, "colour: unknown field"),
        ({"url": 5}, "url: is not text"),
    ],
)
def test_what_is_wrong_is_named(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as refusal:
        _one(**changed)
    assert "penstock.toml: sinks: " in refusal.value.message
    assert words in refusal.value.message
    assert refusal.value.hint


def test_names_are_taken_once_and_entries_are_tables() -> None:
    with pytest.raises(UsageError, match="'crm' is taken by entry 1"):
        parse([GOOD, GOOD], "f")
    wrongs: list[Any] = [{}, ["x"], "x"]
    for wrong in wrongs:
        with pytest.raises(UsageError, match="list of tables"):
            parse(wrong, "f")


def test_secrets_are_read_where_they_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = bytes(range(24))
    monkeypatch.setenv("CRM", f"whsec_{base64.b64encode(key).decode()}")
    assert _one().secret() == key
    monkeypatch.setenv("CRM", "plain words, long enough")
    assert _one().secret() == b"plain words, long enough"
    for text, words in (("", "is not set"), ("short", "shorter than 16"), ("whsec_!!!", "not base64")):
        monkeypatch.setenv("CRM", text)
        with pytest.raises(UsageError, match=words):
            _one().secret()
    place = tmp_path / "secret"
    sink = _one(secret_env=None, secret_file=str(place))
    with pytest.raises(UsageError, match="cannot be read"):
        sink.secret()
    place.write_text("sixteen bytes at least\n")
    assert sink.secret() == b"sixteen bytes at least"


def test_who_is_told() -> None:
    everybody, ann = _one(), _one(owners=["ann"], requests="all")
    assert any_wants([everybody], "bob", from_event=True)
    assert not any_wants([everybody], "bob", from_event=False)
    assert any_wants([everybody, ann], "ann", from_event=False)
    assert not any_wants([ann], "bob", from_event=True)
    assert not any_wants([], "bob", from_event=True)

"""`[[adapters]]` read from a file: what is wrong is said with its file, entry and field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock import config_sources
from penstock.adapters.config import Adapter, FolderPlace, FtpPlace, S3Place, parse
from penstock.errors import UsageError

FOLDER: dict[str, Any] = {"name": "drop", "kind": "folder", "root": "/srv/drop", "owner": "ann"}
S3: dict[str, Any] = {
    **{"name": "drop", "kind": "s3", "owner": "ann", "bucket": "drop"},
    **{"access_key_env": "KEY", "secret_key_env": "SECRET"},
}
FTP: dict[str, Any] = {
    **{"name": "drop", "kind": "ftp", "owner": "ann", "host": "ftp.example.net"},
    **{"user": "ann", "password_env": "PASSWORD"},
}


def _one(entry: dict[str, Any], **changed: Any) -> Adapter:
    fields = {name: value for name, value in {**entry, **changed}.items() if value is not None}
    (adapter,) = parse([fields], "penstock.toml")
    return adapter


def test_a_file_of_adapters(tmp_path: Path) -> None:
    toml = tmp_path / "penstock.toml"
    toml.write_text(
        '[[adapters]]\nname = "a"\nkind = "folder"\nroot = "/srv/a"\nowner = "ann"\npattern = "*.csv"\n'
        "scan_every_s = 5\nsettled_s = 0\n"
        '[adapters.spec]\nprocessor = "price"\njobType = "prices"\ncolumns = { keep = ["sku"] }\n'
        '[[adapters]]\nname = "b"\nkind = "s3"\nbucket = "drop"\nprefix = "/in/"\nowner = "ann"\n'
        'endpoint = "http://127.0.0.1:9000/"\naccess_key_env = "K"\nsecret_key_env = "S"\n'
        '[[adapters]]\nname = "c"\nkind = "ftp"\nhost = "10.0.0.1"\nuser = "u"\npassword_env = "P"\nowner = "bob"\n'
    )
    a, b, c = config_sources.load(toml_path=toml, environ={}).adapters
    assert (a.place, a.pattern.text, a.scan_every_s, a.settled_s) == (FolderPlace(Path("/srv/a")), "*.csv", 5, 0)
    assert a.spec is not None
    assert (a.spec.processor, a.spec.job_type, a.spec.columns.keep) == ("price", "prices", ["sku"])
    assert b.place == S3Place("drop", "in/", "http://127.0.0.1:9000", "us-east-1", "K", "S")
    assert c.place == FtpPlace("10.0.0.1", 21, "u", "P", "/")
    assert (c.owner, c.spec, c.pattern.text, c.scan_every_s, c.settled_s) == ("bob", None, "**/*", 60, 10)


@pytest.mark.parametrize(
    ("entry", "changed", "words"),
    [
        (FOLDER, {"kind": None}, "entry 1 (drop): kind: is missing"),
        (FOLDER, {"kind": "smb"}, "kind: 'smb' is not one of folder, s3, ftp"),
        (FOLDER, {"owner": None}, "owner: is missing"),
        (FOLDER, {"root": "drop"}, "root: 'drop' is not an absolute path"),
        (FOLDER, {"bucket": "x"}, "bucket: is not a field of kind = 'folder'"),
        (FOLDER, {"colour": "red"}, "colour: unknown field"),
        (FOLDER, {"pattern": "../*"}, "pattern: it is not a relative path"),
        (FOLDER, {"spec": {}}, "spec: Object missing required field `processor`"),
        (FOLDER, {"spec": {"processor": "p", "rows": 1}}, "spec: Object contains unknown field `rows`"),
        (FOLDER, {"settled_s": -1}, "settled_s: -1 is not a number from 0"),
        (S3, {"settled_s": 1}, "settled_s: is not a field of kind = 's3'"),
        (S3, {"bucket": "../x"}, "bucket: '../x' is not the name of a bucket"),
        (S3, {"prefix": "a/../b"}, "prefix: has a control character, or '..'"),
        (S3, {"endpoint": "http://key:secret@store"}, "must not carry credentials"),
        (S3, {"secret_key_env": None}, "secret_key_env: is missing"),
        (FTP, {"host": "a b"}, "host: 'a b' is not the name"),
        (FTP, {"port": 0}, "port: 0 is not a whole number"),
        (FTP, {"user": "a\r\nDELE x"}, "user: has a control character"),
        (FTP, {"password_env": None}, "password_env: is missing"),
    ],
)
def test_what_is_wrong_is_named(entry: dict[str, Any], changed: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as refusal:
        _one(entry, **changed)
    assert "penstock.toml: adapters: " in refusal.value.message
    assert words in refusal.value.message
    assert refusal.value.hint

"""Adapters as the operator configures them: where files arrive, whose they are, and what is done with each.

[[adapters]]
name = "drop"
kind = "folder"
root = "/srv/drop"
pattern = "**/*.csv"
owner = "sales"
spec = { processor = "price", jobType = "prices" }
scan_every_s = 60
settled_s = 10

A store (`kind = "s3"`) has bucket, prefix, endpoint, region, access_key_env and secret_key_env in place of root, and no
settled_s: its objects are whole. An FTP server (`kind = "ftp"`) has host, port, user, password_env and directory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from penstock.adapters.paths import Pattern
from penstock.config_tables import TableEntry, read_entries
from penstock.errors import UsageError
from penstock.server.job_spec import JobSpec
from penstock.validators import checked_url, read_secret_variable

_COMMON = ("name", "kind", "pattern", "owner", "spec", "scan_every_s")
_PLACES = {
    "folder": ("root", "settled_s"),
    "s3": ("bucket", "prefix", "endpoint", "region", "access_key_env", "secret_key_env"),
    "ftp": ("host", "port", "user", "password_env", "directory", "settled_s"),
}
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{1,62}")
_HOST = re.compile(r"[A-Za-z0-9.:-]+")
_UNSAFE = re.compile(r"[\x00-\x1f\x7f]")
_SCAN_EVERY_S = 60.0
_SETTLED_S = 10.0
_MAX_S = 86_400.0


@dataclass(frozen=True, slots=True)
class FolderPlace:
    """Folder that all servers see, such as a shared mount."""

    root: Path

    def __str__(self) -> str:
        return str(self.root)


@dataclass(frozen=True, slots=True)
class S3Place:
    """Bucket of an S3-compatible store. Its keys are named here, never held."""

    bucket: str
    prefix: str
    """Beginning of the keys, which ends with a slash; or nothing."""
    endpoint: str
    """URL of the store; empty for AWS."""
    region: str
    access_key_env: str
    secret_key_env: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"

    def access_key(self) -> str:
        return read_secret_variable(self.access_key_env, f"the variable {self.access_key_env} (access_key_env)")

    def secret_key(self) -> str:
        return read_secret_variable(self.secret_key_env, f"the variable {self.secret_key_env} (secret_key_env)")


@dataclass(frozen=True, slots=True)
class FtpPlace:
    """Directory of an FTP server. Its password is named here, never held."""

    host: str
    port: int
    user: str
    password_env: str
    directory: str

    def __str__(self) -> str:
        return f"ftp://{self.host}:{self.port}{self.directory}"

    def password(self) -> str:
        return read_secret_variable(self.password_env, f"the variable {self.password_env} (password_env)")


Place = FolderPlace | S3Place | FtpPlace


@dataclass(frozen=True, slots=True)
class Adapter:
    """Place where files arrive."""

    name: str
    place: Place
    pattern: Pattern
    owner: str
    """Owner of the jobs; besides admins, the only one who may refer to the files."""
    spec: JobSpec | None
    """Job that is made of each file; without it nothing is scanned, and files are only referred to."""
    scan_every_s: float
    settled_s: float
    """How long a file must stay the same before it is taken, where it may be seen before it is whole."""


def parse(entries: Any, file: str) -> tuple[Adapter, ...]:
    """The `[[adapters]]` of a configuration file. Errors name the file, the entry and the field."""
    return read_entries("adapters", entries, file, lambda *entry: _Entry(*entry).parse(), "the adapters' files")


class _Entry(TableEntry):
    kind = "adapters"
    fields = (*_COMMON, *dict.fromkeys(name for names in _PLACES.values() for name in names))
    hint = "docs/jobs.md shows an adapter of each kind."

    def parse(self) -> Adapter:
        name, kind = self.name(), self.text("kind", required=True)
        if kind not in _PLACES:
            raise self.wrong("kind", f"'{kind}' is not one of {', '.join(_PLACES)}")
        for field in self.table:
            if field not in (*_COMMON, *_PLACES[kind]):
                raise self.wrong(
                    field, f"is not a field of kind = '{kind}'", f"Its own are {', '.join(_PLACES[kind])}."
                )
        return Adapter(
            name,
            self._place(kind),
            self._pattern(),
            self.text("owner", required=True),
            self._spec(),
            self.any_number("scan_every_s", 0.1, _MAX_S) or _SCAN_EVERY_S,
            _SETTLED_S if (settled_s := self.any_number("settled_s", 0, _MAX_S)) is None else settled_s,
        )

    def _place(self, kind: str) -> Place:
        if kind == "folder":
            return self._folder()
        return self._s3() if kind == "s3" else self._ftp()

    def _folder(self) -> FolderPlace:
        root = Path(self.text("root", required=True))
        if not root.is_absolute():
            raise self.wrong("root", f"'{root}' is not an absolute path", "For example /srv/drop")
        return FolderPlace(root)

    def _s3(self) -> S3Place:
        bucket, endpoint = self.text("bucket", required=True), self.text("endpoint")
        if not _BUCKET.fullmatch(bucket):
            raise self.wrong("bucket", f"'{bucket}' is not the name of a bucket")
        if endpoint:
            try:
                endpoint = checked_url(
                    "endpoint", endpoint, "For example https://s3.example.net", "Name their variables."
                )
            except UsageError as error:
                raise self.wrong("endpoint", error.message, error.hint) from None
        prefix = self._plain("prefix").strip("/")
        return S3Place(
            bucket,
            f"{prefix}/" if prefix else "",
            endpoint,
            self.text("region") or "us-east-1",
            self.text("access_key_env", required=True),
            self.text("secret_key_env", required=True),
        )

    def _ftp(self) -> FtpPlace:
        host = self.text("host", required=True)
        if not _HOST.fullmatch(host):
            raise self.wrong("host", f"'{host}' is not the name or address of a host")
        return FtpPlace(
            host,
            self.whole_number("port", 1, 65_535) or 21,
            self._plain("user", required=True),
            self.text("password_env", required=True),
            self._plain("directory") or "/",
        )

    def _plain(self, name: str, *, required: bool = False) -> str:
        text = self.text(name, required=required)
        if _UNSAFE.search(text) or ".." in text.split("/"):
            raise self.wrong(name, "has a control character, or '..'")
        return text

    def _pattern(self) -> Pattern:
        try:
            return Pattern(self.text("pattern") or "**/*")
        except ValueError as error:
            raise self.wrong("pattern", str(error), "For example *.csv or **/*.xlsx") from None

    def _spec(self) -> JobSpec | None:
        if "spec" not in self.table:
            return None
        try:
            return msgspec.convert(self.table["spec"], JobSpec)
        except msgspec.ValidationError as error:
            raise self.wrong(
                "spec", str(error), "It is the spec of POST /api/jobs: docs/jobs.md lists its fields."
            ) from None

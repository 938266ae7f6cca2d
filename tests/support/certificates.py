"""Certificates of the tests' own, made with openssl."""

from __future__ import annotations

import functools
import ssl
import subprocess
import tempfile
from pathlib import Path

_LOCAL = ("DNS:localhost", "IP:127.0.0.1", "IP:::1")
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def make_certificate(directory: Path, name: str) -> tuple[Path, Path]:
    """A certificate for a host name, signed by itself: (certificate, key)."""
    return _make(directory, name, "-addext", f"subjectAltName=DNS:{name}")


class Authority:
    """Signs certificates for this machine, or for other names."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.file, self._key = _make(directory, "authority")

    def issue(self, name: str, *names: str, expired: bool = False) -> tuple[Path, Path]:
        """(certificate, key) for `names` such as DNS:host, by default those of this machine."""
        signed = ("-CA", str(self.file), "-CAkey", str(self._key))
        return _make(
            self._directory, name, *signed, "-addext", f"subjectAltName={','.join(names or _LOCAL)}", expired=expired
        )


@functools.cache
def authority() -> Authority:
    """The one of this process, whose certificates are made once."""
    _kept.append(directory := tempfile.TemporaryDirectory(prefix="penstock-certificates-"))
    return Authority(Path(directory.name))


_kept: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def local_tls() -> ssl.SSLContext:
    """For a server that clients who trust `authority()` believe to be this machine."""
    return server_tls(*authority().issue("local"))


def server_tls(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context


def _make(directory: Path, name: str, *options: str, expired: bool = False) -> tuple[Path, Path]:
    certificate, key = directory / f"{name}.pem", directory / f"{name}.key"
    then = ("faketime", "10 days ago") if expired else ()
    output = ("-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", f"/CN={name}")
    subprocess.run([*then, "openssl", "req", "-x509", *_KEY, *output, *options], check=True, capture_output=True)
    return certificate, key

"""Secrets that the database keeps for others are sealed with a key that is not in the database.

A secret is sealed by AES-256-GCM for its owner and its row: moved to another row, or changed, it does not open. The
keys come from the variable PENSTOCK_SECRETS_KEY or the file `secrets_key_file`, one a line. The first seals, all of
them open: a new key is put before the old one, `penstock db seal` seals everything with it, and then the old one can
go. With neither of the two, a key is made in the data directory when it is first needed. See
docs/adr/0021-sealed-secrets.md.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from uuid import UUID

from penstock.config import Config
from penstock.errors import PenstockError, UsageError
from penstock.validators import read_secret_file

KEY_VARIABLE = "PENSTOCK_SECRETS_KEY"
_KEY_FILE = "secrets.key"
_KEY_BYTES = 32
_HINT = "A key is 32 random bytes in base64: openssl rand -base64 32"

# How a sealed value begins, which no random secret of an older version does: then come the key's id, a nonce, and the
# ciphertext with its tag.
_MAGIC = b"\x00sealed1"
_ID_BYTES = 8
_NONCE_BYTES = 12


class SecretNotOpened(PenstockError):  # noqa: N818 - a finding about the value
    """A sealed secret cannot be opened here."""


class SecretBox:
    """Seals and opens secrets. Its keys are read when it first meets one."""

    def __init__(self, read_keys: Callable[[], Sequence[bytes]]) -> None:
        self._read_keys = read_keys
        self._known: dict[bytes, bytes] | None = None

    @property
    def _keys(self) -> dict[bytes, bytes]:
        """Keys by their ids; the first one seals."""
        if self._known is None:
            self._known = {hashlib.sha256(key).digest()[:_ID_BYTES]: key for key in self._read_keys()}
        return self._known

    @property
    def prefix(self) -> bytes:
        """How every value begins that is sealed with the first key."""
        return _MAGIC + next(iter(self._keys))

    def seal(self, secret: bytes, owner: str, row_id: UUID) -> bytes:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # slow to import, and rarely needed

        nonce = secrets.token_bytes(_NONCE_BYTES)
        key = next(iter(self._keys.values()))
        return self.prefix + nonce + AESGCM(key).encrypt(nonce, secret, _bound_to(owner, row_id))

    def open(self, stored: bytes, owner: str, row_id: UUID) -> bytes:
        """The secret of this owner's row. Raises SecretNotOpened."""
        if not stored.startswith(_MAGIC):
            return stored  # from before secrets were sealed
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        at = len(_MAGIC) + _ID_BYTES
        key = self._keys.get(stored[len(_MAGIC) : at])
        if key is None:
            raise SecretNotOpened(
                "the secret is sealed with a key that this process does not have",
                hint=f"Give every server the same keys ({KEY_VARIABLE} or secrets_key_file), old ones too.",
            )
        nonce, sealed = stored[at : at + _NONCE_BYTES], stored[at + _NONCE_BYTES :]
        try:
            return AESGCM(key).decrypt(nonce, sealed, _bound_to(owner, row_id))
        except (InvalidTag, ValueError):
            raise SecretNotOpened(
                "the secret was changed, or belongs to another row", hint="Rotate it: that makes a new one."
            ) from None


def _bound_to(owner: str, row_id: UUID) -> bytes:
    return b"%b\0%b" % (row_id.bytes, owner.encode())


def secret_box(config: Config) -> SecretBox:
    """The box of this installation."""
    return _box(config.secrets_key_file, config.data_dir / _KEY_FILE)


@lru_cache(maxsize=16)
def _box(named: Path | None, own: Path) -> SecretBox:
    return SecretBox(lambda: _read_keys(named, own))


def check_sealing_keys(config: Config) -> None:
    """Refuse keys that cannot be read at the start, and not when the first webhook is made. Where there is none, one is
    made when it is first needed. Raises PenstockError."""
    own = config.data_dir / _KEY_FILE
    if config.secrets_key_file is None and not os.environ.get(KEY_VARIABLE, "").strip():
        try:
            if not own.exists():
                return
        except OSError as error:  # the directory is another user's
            raise UsageError(f"{own}: cannot be read: {error.strerror}", hint=_HINT) from error
    _read_keys(config.secrets_key_file, own)


def _read_keys(named: Path | None, own: Path) -> list[bytes]:
    if text := os.environ.get(KEY_VARIABLE, "").strip():
        return parse_keys(text, KEY_VARIABLE)
    if named is not None:
        return parse_keys(read_secret_file(str(named), f"secrets_key_file {named}", _HINT), f"secrets_key_file {named}")
    _make_key_file(own)
    return parse_keys(read_secret_file(str(own), str(own), _HINT), str(own))


def parse_keys(text: str, place: str) -> list[bytes]:
    """Keys, one a line or separated by commas. The error names `place`, never a key."""
    keys: list[bytes] = []
    for word in text.replace(",", " ").split():
        try:
            key = base64.b64decode(word, validate=True)
        except binascii.Error:
            key = b""
        if len(key) != _KEY_BYTES:
            raise UsageError(f"{place}: key {len(keys) + 1} is not 32 bytes in base64", hint=_HINT)
        keys.append(key)
    if not keys:
        raise UsageError(f"{place}: holds no key", hint=_HINT)
    return keys


def _make_key_file(path: Path) -> None:
    """Make a key that only this user can read, unless there is one: of two processes at once, one makes it."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(base64.b64encode(secrets.token_bytes(_KEY_BYTES)).decode() + "\n")
        file.flush()
        os.fsync(file.fileno())
    with suppress(FileExistsError):
        os.link(draft, path)
    draft.unlink()

"""S16: sealed secrets open for their owner and row alone, with any of the keys that are kept."""

from __future__ import annotations

import base64
import stat
from pathlib import Path
from uuid import UUID

import pytest

from penstock.config import Config
from penstock.deliver.sealing import (
    KEY_VARIABLE,
    SecretBox,
    SecretNotOpened,
    check_sealing_keys,
    parse_keys,
    secret_box,
)
from penstock.errors import UsageError

OLD, NEW = b"o" * 32, b"n" * 32
ROW, OTHER_ROW = UUID(int=1), UUID(int=2)
SECRET = b"a secret of 24 bytes ..."


def box(*keys: bytes) -> SecretBox:
    return SecretBox(lambda: keys)


def test_what_is_sealed_opens_again_and_shows_nothing() -> None:
    sealed = box(NEW).seal(SECRET, "alice", ROW)
    assert SECRET not in sealed
    assert box(NEW).open(sealed, "alice", ROW) == SECRET
    assert box(NEW).seal(SECRET, "alice", ROW) != sealed


@pytest.mark.parametrize(("owner", "row"), [("bob", ROW), ("alice", OTHER_ROW), ("", ROW)])
def test_moved_to_another_row_it_does_not_open(owner: str, row: UUID) -> None:
    sealed = box(NEW).seal(SECRET, "alice", ROW)
    with pytest.raises(SecretNotOpened, match="another row"):
        box(NEW).open(sealed, owner, row)


def test_changed_or_cut_it_does_not_open() -> None:
    sealed = box(NEW).seal(SECRET, "alice", ROW)
    for at in range(16, len(sealed)):
        with pytest.raises(SecretNotOpened):
            box(NEW).open(sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :], "alice", ROW)
        with pytest.raises(SecretNotOpened):
            box(NEW).open(sealed[:at], "alice", ROW)


def test_keys_are_rotated() -> None:
    sealed = box(OLD).seal(SECRET, "alice", ROW)
    both = box(NEW, OLD)
    assert both.open(sealed, "alice", ROW) == SECRET
    assert not sealed.startswith(both.prefix)
    anew = both.seal(SECRET, "alice", ROW)
    assert anew.startswith(both.prefix)
    assert box(NEW).open(anew, "alice", ROW) == SECRET
    with pytest.raises(SecretNotOpened, match="does not have"):
        box(NEW).open(sealed, "alice", ROW)


def test_what_older_versions_stored_is_still_read() -> None:
    assert box(NEW).open(SECRET, "alice", ROW) == SECRET


@pytest.mark.parametrize("text", ["", "c2hvcnQ=", "not base64!", base64.b64encode(NEW).decode() + "\nx"])
def test_a_key_that_is_none_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(UsageError, match="here: ") as refused:
        parse_keys(text, "here")
    assert "openssl" in (refused.value.hint or "")
    assert base64.b64encode(NEW).decode() not in refused.value.message


def test_the_environment_wins_over_the_file_and_the_file_over_the_data_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sealer(config: Config) -> bytes:
        """The key that a configuration seals with: of these, the one that opens it."""
        sealed = secret_box(config).seal(SECRET, "alice", ROW)
        return next(key for key in (OLD, NEW, made) if sealed.startswith(box(key).prefix))

    own = Config(data_dir=tmp_path / "one")
    secret_box(own).seal(SECRET, "alice", ROW)
    made_file = tmp_path / "one" / "secrets.key"
    made = base64.b64decode(made_file.read_text())
    assert stat.S_IMODE(made_file.stat().st_mode) == 0o600
    assert sealer(own) == made
    assert list((tmp_path / "one").iterdir()) == [made_file]
    named = tmp_path / "keys"
    named.write_text(f"{base64.b64encode(OLD).decode()}\n{base64.b64encode(NEW).decode()}\n")
    assert sealer(Config(data_dir=tmp_path / "two", secrets_key_file=named)) == OLD
    monkeypatch.setenv(KEY_VARIABLE, base64.b64encode(NEW).decode())
    assert sealer(Config(data_dir=tmp_path / "three", secrets_key_file=named)) == NEW
    assert not (tmp_path / "three").exists()


def test_a_place_that_cannot_be_looked_at_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a directory that is another user's."""
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(UsageError, match=r"secrets\.key: cannot be read: "):
        check_sealing_keys(Config(data_dir=tmp_path / ("x" * 300)))

"""Every kind of erasure has a name for what it erased."""

from __future__ import annotations

from typing import get_args

from penstock.api.erasures import ID_KINDS
from penstock.erase.purge import Kind
from penstock.model import ID_PREFIX


def test_every_kind_of_erasure_has_an_id_that_clients_know() -> None:
    assert set(ID_KINDS) == set(get_args(Kind))
    assert set(ID_KINDS.values()) <= set(ID_PREFIX)

from __future__ import annotations

from penstock.pools import pools_beside, provider_in


def test_a_provider_has_its_gates_in_both_of_its_pools() -> None:
    assert pools_beside("session:a") == pools_beside("serve:a") == ["serve:a", "session:a"]
    assert pools_beside("run:c") == ["run:c"]


def test_pools_name_their_provider() -> None:
    assert [provider_in(pool) for pool in ("serve:a", "session:b", "serve", "run:c")] == ["a", "b", None, None]

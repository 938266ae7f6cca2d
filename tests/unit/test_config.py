from __future__ import annotations

from pathlib import Path

import pytest

from penstock import config, config_sources
from penstock.errors import UsageError


def test_defaults_are_within_their_ranges() -> None:
    for knob in config.knobs():
        if knob.choices:
            assert knob.default in knob.choices, knob.name
        else:
            assert knob.low <= knob.default <= knob.high, knob.name


def test_names_are_unique_and_end_in_a_unit_or_a_count() -> None:
    names = [knob.name for knob in config.knobs()]
    assert len(names) == len(set(names))
    for knob in config.knobs():
        if knob.kind is float:
            assert knob.name.endswith(("_s", "_safety")), knob.name


def test_command_line_wins_over_environment_over_file(tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text("max_attempts = 2\nclaim_max = 10\nretry_base_s = 0.5\n")
    environ = {"PENSTOCK_MAX_ATTEMPTS": "3", "PENSTOCK_CLAIM_MAX": "20"}
    loaded = config_sources.load(toml_path=path, environ=environ, overrides=[("max_attempts", "4")])
    assert loaded.retry.max_attempts == 4
    assert loaded.claim.claim_max == 20
    assert loaded.retry.retry_base_s == 0.5


def test_database_and_directory_come_from_every_place(tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text('database_url = "postgresql://file/db"\ndata_dir = "/from/file"\n')
    assert config_sources.load(toml_path=path, environ={}).database_url == "postgresql://file/db"
    environ = {"PENSTOCK_DATABASE_URL": "postgresql://env/db"}
    assert config_sources.load(toml_path=path, environ=environ).database_url == "postgresql://env/db"
    chosen = config_sources.load(
        toml_path=path, environ=environ, database_url="postgresql://flag/db", data_dir=Path("here")
    )
    assert chosen.database_url == "postgresql://flag/db"
    assert chosen.data_dir == Path("here")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("max_attempts", "many", "not a whole number"),
        ("max_attempts", "2.5", "not a whole number"),
        ("max_attempts", "0", "out of range"),
        ("retry_base_s", "soon", "not a number"),
        ("retry_base_s", "nan", "out of range"),
        ("max_attempt", "3", "unknown setting"),
        ("reclaim_action", "panic", "not one of requeue, fail"),
        ("pending_dashboard", "perhaps", "not one of true, false"),
    ],
)
def test_bad_values_name_the_place_and_the_reason(name: str, value: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        config_sources.load(environ={}, overrides=[(name, value)])
    assert f"--set {name}" in caught.value.message
    assert caught.value.hint


def test_an_option_that_names_a_setting_is_named_as_the_option() -> None:
    with pytest.raises(UsageError, match="--concurrency: -1 is out of range"):
        config_sources.load(environ={}, flags={"concurrency": -1})
    assert config_sources.load(environ={}, flags={"concurrency": None}).dispatch.concurrency == 0


def test_without_a_concurrency_functions_have_a_few_slots_and_endpoints_as_many_as_pay() -> None:
    dispatch = config_sources.load(environ={}).dispatch
    assert (dispatch.most_functions, dispatch.most_calls) == (64, 1_000)
    dispatch = config_sources.load(environ={}, flags={"concurrency": 7}).dispatch
    assert (dispatch.most_functions, dispatch.most_calls) == (7, 7)


def test_a_misspelt_setting_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError) as caught:
        config_sources.load(environ={}, overrides=[("heartbeat_grace", "3")])
    assert caught.value.hint is not None
    assert "heartbeat_grace_s" in caught.value.hint


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(UsageError, match="twice"):
        config_sources.load(environ={}, overrides=[("heartbeat_grace_s", "20"), ("heartbeat_interval_s", "15")])
    with pytest.raises(UsageError, match="claim_min"):
        config_sources.load(environ={}, overrides=[("claim_min", "50"), ("claim_max", "20")])


@pytest.mark.parametrize(("text", "words"), [("max_attempts = ", "not valid TOML"), ("colour = 3", "unknown setting")])
def test_a_bad_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=words) as caught:
        config_sources.load(toml_path=path, environ={})
    assert str(path) in caught.value.message
    with pytest.raises(UsageError, match="cannot read"):
        config_sources.load(toml_path=tmp_path / "missing.toml", environ={})


def test_a_data_directory_that_cannot_be_looked_into_is_refused() -> None:
    with pytest.raises(UsageError, match=r"cannot use the data directory x+: File name too long") as refused:
        config_sources.find_toml(Path("x" * 300))
    assert refused.value.hint in refused.value.__notes__, "also where it is not caught"

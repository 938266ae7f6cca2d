"""What makes two runs the same, and the commands that are told to a person."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from penstock.cli import entry
from penstock.cli.client import CommandContext
from penstock.cli.main import main
from penstock.cli.options import DatabaseOptions
from penstock.cli.plan import Plan, host_of
from penstock.client.api import Api
from penstock.dispatch.target import Target
from penstock.observe import catalogue
from penstock.observe.metrics import ProcessMetrics

CONTENT = b"\x01" * 32


def plan(url: str = "http://127.0.0.1:8000/v1", **other: Any) -> Plan:
    return Plan(Path("in.jsonl"), Path("out.jsonl"), Target(base_url=url), **other)


def test_a_host_has_one_name() -> None:
    for url in ("http://localhost:1/v1", "http://127.0.0.1:8000", "http://[::1]:9/v1", "https://LOCALHOST"):
        assert host_of(url) == "localhost"
    assert host_of("https://api.Example.org:443/v1") == "api.example.org"


def test_what_is_asked_and_the_content_are_the_key_and_nothing_else() -> None:
    key = plan().key(CONTENT)
    assert plan("http://localhost:9000/other").key(CONTENT) == key
    assert plan(workers=4, start_anew=True, retry_failed=True).key(CONTENT) == key
    moved = Plan(Path("copy.jsonl"), Path("-"), Target(base_url="http://127.0.0.1:1", api_key_env="KEY"))
    assert moved.key(CONTENT) == key
    assert plan("https://api.example.org/v1").key(CONTENT) != key
    assert plan().key(b"\x02" * 32) != key
    function = Plan(Path("in.jsonl"), Path("out.jsonl"), Target(processor="rows:work"))
    assert function.key(CONTENT) != key


def test_a_command_that_goes_on_asks_for_nothing_that_was_done_once() -> None:
    typed = ("run", "my file.jsonl", "--new", "-o", "out.jsonl", "--continue", "--retry-failed")
    told = plan(command=typed, place=("--data-dir", "d"))
    assert told.command_with() == "penstock run 'my file.jsonl' -o out.jsonl"
    assert told.command_with("--retry-failed").endswith(" --retry-failed")
    assert told.other_command("export", "batch_1") == "penstock export batch_1 --data-dir d"


def test_commands_that_are_told_name_the_same_place() -> None:
    api = Api.__new__(Api)
    assert CommandContext(api, False, ("--server", "http://h:1")).command("watch", "b") == (
        "penstock watch b --server http://h:1"
    )
    secret = DatabaseOptions("postgresql://u:p@h/d", Path("x"), None, ())
    assert secret.as_words() == ("--data-dir", "x", "--database-url", "URL"), "a password is not told"


def test_an_interrupt_while_the_program_is_imported_has_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "penstock.cli.main", Interrupted("penstock.cli.main"))
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "penstock: interrupted\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    ended = CliRunner().invoke(main, ["completion", shell])
    assert ended.exit_code == 0
    assert "_PENSTOCK_COMPLETE" in ended.output


def test_calls_in_flight_are_those_that_the_processes_tell() -> None:
    metrics = ProcessMetrics()
    for process, calls in ((1, 5.0), (2, 7.0), (2, 6.0)):
        metrics.take(process, {catalogue.IN_FLIGHT.name: [(("batch", "p"), [calls])]})
    assert metrics.sum_gauge(catalogue.IN_FLIGHT) == 11
    metrics.end(1)
    assert metrics.sum_gauge(catalogue.IN_FLIGHT) == 6

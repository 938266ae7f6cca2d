"""`[[processors]]` of the configuration file, and processors of installed packages."""

from __future__ import annotations

import pickle
import sys
import tomllib
from pathlib import Path

import pytest

from penstock import config_sources
from penstock.config import DispatchLimits, RetryLimits
from penstock.dispatch.loading import load_processor
from penstock.dispatch.processors import ProcessorConfig, parse
from penstock.errors import UsageError

WHOLE = """
[[processors]]
name = "clean"
function = "my_rows:clean"

[[processors]]
name = "match"
function = "offered"
concurrency = 8
attempt_timeout_s = 60
chunk = 50
strategies = ["exact", "fuzzy"]
"""


def parsed(text: str) -> tuple[ProcessorConfig, ...]:
    return parse(tomllib.loads(text)["processors"], "penstock.toml")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory, with a module and an installed package that offers it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "installed"), *sys.path])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    (tmp_path / "my_rows.py").write_text(
        "def clean(item): return 7\ndef match(items: 'list[Item]'): return items\nclass Hollow: pass\n"
    )
    package = tmp_path / "installed" / "offers-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: offers\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[penstock.processors]\noffered = my_rows:match\nbroken = my_rows:none\n")


def test_fields() -> None:
    clean, match = parsed(WHOLE)
    assert clean == ProcessorConfig("clean", "my_rows:clean")
    assert match == ProcessorConfig("match", "offered", 8, 60.0, 50, ("exact", "fuzzy"))


def test_what_is_told_to_a_worker_process_is_the_same_processor() -> None:
    processors = parsed(WHOLE)
    assert parse([processor.as_dict() for processor in processors], "orders") == processors
    assert pickle.loads(pickle.dumps(processors)) == processors


def test_the_configuration_file_holds_them_beside_settings(tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text("max_attempts = 2\n" + WHOLE)
    assert config_sources.load(toml_path=path, environ={}).processors == parsed(WHOLE)


def test_limits_that_are_not_given_are_the_workers() -> None:
    clean, match = parsed(WHOLE)
    assert clean.limits(DispatchLimits()) == DispatchLimits()
    assert match.limits(DispatchLimits()) == DispatchLimits(concurrency=8, attempt_timeout_s=60)


@pytest.mark.usefixtures("folder")
def test_functions_are_found_by_module_or_entry_point() -> None:
    clean, match = parsed(WHOLE)
    assert clean.load()(None) == 7
    processor = match.processor(DispatchLimits(), RetryLimits())
    assert (processor.name, processor.chunk_size) == ("match", 50)


@pytest.mark.parametrize(
    ("entry", "message", "hint"),
    [
        (
            ProcessorConfig("a", "missing"),
            "processor 'a': function missing: there is no entry point of this name in penstock.processors",
            "Installed packages offer broken, offered. A function of your own is named as module:function.",
        ),
        (
            ProcessorConfig("a", "broken"),
            "processor 'a': function my_rows:none: my_rows has no 'none'",
            "Its functions: Hollow, clean, match.",
        ),
        (
            ProcessorConfig("a", "my_rows.py:clean"),
            "processor 'a': function my_rows.py:clean: 'my_rows.py' is a path, not a module name",
            "Write processor 'a': function my_rows:clean from the folder that holds it.",
        ),
        (
            ProcessorConfig("a", "my_rows:Hollow"),
            "processor 'a': function my_rows:Hollow: the class 'Hollow' has no __call__",
            "Give it a method __call__(self, item) that returns the item's answer.",
        ),
        (
            ProcessorConfig("a", "my_rows:clean", chunk=5),
            "processor 'a': clean takes one item, not chunks of 5",
            "Leave chunk out, or annotate the first parameter as list[Item].",
        ),
    ],
)
@pytest.mark.usefixtures("folder")
def test_what_cannot_be_loaded(entry: ProcessorConfig, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        entry.processor(DispatchLimits(), RetryLimits())
    assert (caught.value.message, caught.value.hint) == (message, hint)


@pytest.mark.usefixtures("folder")
def test_a_class_on_the_command_line_needs_a_call_too() -> None:
    with pytest.raises(UsageError, match="--processor my_rows:Hollow: the class 'Hollow' has no __call__"):
        load_processor("my_rows:Hollow")


FIRST = '[[processors]]\nname = "a"\nfunction = "m:f"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[processors]\n", "penstock.toml: processors: is not a list of tables"),
        ('[[processors]]\nfunction = "m:f"\n', "penstock.toml: processors: entry 1: name: is missing"),
        ('[[processors]]\nname = "a b"\n', "penstock.toml: processors: entry 1 (a b): name: 'a b' is not a name"),
        ('[[processors]]\nname = "a"\n', "penstock.toml: processors: entry 1 (a): function: is missing"),
        (f"{FIRST}fn = 1\n", "penstock.toml: processors: entry 1 (a): fn: unknown field"),
        (FIRST + FIRST, "penstock.toml: processors: entry 2: name: 'a' is taken by entry 1"),
        (
            f"{FIRST}concurrency = 0\n",
            "penstock.toml: processors: entry 1 (a): concurrency: 0 is not a whole number from 1 to 10,000",
        ),
        (
            f"{FIRST}concurrency = true\n",
            "penstock.toml: processors: entry 1 (a): concurrency: True is not a whole number from 1 to 10,000",
        ),
        (
            f"{FIRST}attempt_timeout_s = 0\n",
            "penstock.toml: processors: entry 1 (a): attempt_timeout_s: 0 is not a number from 0.1 to 7200",
        ),
        (
            f"{FIRST}chunk = 1.5\n",
            "penstock.toml: processors: entry 1 (a): chunk: 1.5 is not a whole number from 1 to 10,000",
        ),
        (f"{FIRST}strategies = 'x'\n", "penstock.toml: processors: entry 1 (a): strategies: is not a list of names"),
        (
            f"{FIRST}strategies = ['x', '']\n",
            "penstock.toml: processors: entry 1 (a): strategies: is not a list of names",
        ),
        (
            f"{FIRST}strategies = ['x', 'x']\n",
            "penstock.toml: processors: entry 1 (a): strategies: has a name twice, or too many",
        ),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parsed(text)
    assert caught.value.message == message
    assert caught.value.hint

from __future__ import annotations

import asyncio
import logging
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar
from uuid import UUID

import pytest

from penstock import config, config_sources
from penstock.config import DispatchLimits, RetryLimits
from penstock.dispatch.http.answer import Answer
from penstock.dispatch.http.client import HttpClient
from penstock.dispatch.http.connect import ConnectOptions
from penstock.dispatch.http.processor import HttpProcessor
from penstock.dispatch.processors import ProcessorConfig
from penstock.dispatch.providers import (
    KeyInUse,
    Provider,
    Providers,
    longest_attempt_s,
    parse,
    single,
    with_longest_timeout,
)
from penstock.errors import UsageError
from penstock.model import Item, Lease
from tests.support.items import make_item

WHOLE = """
[[providers]]
name = "local"
base_url = "http://127.0.0.1:8000/v1/"
models = ["llama-*", "qwen3-32b"]
api_key_env = "LOCAL_KEY"
max_concurrency = 7
max_rpm = 600
max_tpm = 90000
attempt_timeout_s = 600
headers = { "x-team" = "search" }
rows_paths = ["GET /prices/", "/search"]

[[providers]]
name = "rest"
base_url = "https://api.example.org/v1"
models = ["*"]
ca_file = "/etc/ca.pem"
client_cert_file = "/etc/client.pem"
client_key_file = "/etc/client.key"
proxy = "http://user:pass-word@proxy:3128"
"""


def parsed(text: str) -> tuple[Provider, ...]:
    return parse(tomllib.loads(text)["providers"], "penstock.toml")


def test_the_first_that_serves_a_model_gets_it() -> None:
    providers = Providers(parsed(WHOLE))
    assert providers.pool_of("llama-3-70b") == "serve:local"
    assert providers.pool_of("qwen3-32b") == "serve:local"
    assert providers.pool_of("qwen3-32B") == "serve:rest"
    assert Providers(parsed(WHOLE)[:1]).pool_of("gpt-5") is None


def test_only_models_named_outright_are_listed() -> None:
    assert Providers(parsed(WHOLE)).models == [("qwen3-32b", "local")]


def test_no_lease_is_stuck_before_the_longest_call() -> None:
    """A worker judges every worker's leases: those of other providers too, and of processors."""
    slow = ProcessorConfig("slow", "rows:slow", attempt_timeout_s=900)
    assert longest_attempt_s(config.Config(), ()) == DispatchLimits().attempt_timeout_s
    assert longest_attempt_s(config.Config(), parsed(WHOLE)) == 600
    settings = config.Config(processors=(slow, ProcessorConfig("usual", "rows:usual")))
    assert longest_attempt_s(settings, parsed(WHOLE)) == 900
    judging = with_longest_timeout(settings, 900)
    assert (judging.dispatch.attempt_timeout_s, settings.dispatch.attempt_timeout_s) == (900, 120)


def test_what_is_told_to_a_worker_process_is_the_same_provider() -> None:
    providers = parsed(WHOLE)
    assert parse([provider.as_dict() for provider in providers], "orders") == providers


def test_the_configuration_file_holds_providers_beside_settings(tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text("max_attempts = 2\n" + WHOLE)
    loaded = config_sources.load(toml_path=path, environ={})
    assert [provider.name for provider in loaded.providers] == ["local", "rest"]
    assert loaded.retry.max_attempts == 2


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("", "entry 1: name: is missing"),
        ('name = "a"', "entry 1 (a): base_url: is missing"),
        ('name = "a"\nbase_url = "ftp://x"\nmodels = ["*"]', "entry 1 (a): base_url: 'ftp://x' is not"),
        ('name = "a"\nbase_url = "http://u:p@x/v1"\nmodels = ["*"]', "base_url: the base URL contains a user name"),
        ('name = "a"\nbase_url = "http://x/v1"', "models: is missing"),
        ('name = "a"\nbase_url = "http://x/v1"\nmodels = []', "models: is not a list"),
        (
            'name = "a"\nbase_url = "http://x/v1"\nmodels = ["*"]\nrows_paths = "/"',
            "rows_paths: is not a list of texts",
        ),
        ('name = "a"\nbase_url = "http://x/v1"\nmodels = ["*"]\nrows_paths = ["x"]', "rows_paths: 'x' is not a path"),
        ('name = "a"\nbase_url = "http://x/v1"\nmodels = "gpt"', "models: is not a list"),
        ('name = "a b"\nbase_url = "http://x/v1"\nmodels = ["*"]', "name: 'a b' is not a name"),
        ('name = "a"\nbase_url = "http://x/v1"\nmodels = ["*"]\nmax_concurrency = 0', "max_concurrency: 0 is not"),
        ('name = "a"\nbase_url = "http://x/v1"\nmodels = ["*"]\nattempt_timeout_s = "9"', "attempt_timeout_s: '9'"),
        ('name = "a"\nbase_url = "http://x/v1"\nmodels = ["*"]\nheaders = { host = "b" }', "headers: the header host"),
        ('name = "a"\nbase_url = "http://x/v1"\nmodels = ["*"]\ncolour = 3', "colour: unknown field"),
        (
            'name = "a"\nbase_url = "http://x/v1"\nmodels = ["*"]\napi_key_env = "A"\napi_key_file = "b"',
            "api_key_file: api_key_env is given too",
        ),
        *(
            (f'name = "a"\nbase_url = "https://x/v1"\nmodels = ["*"]\n{setting}', words)
            for setting, words in (
                ("ca_file = 3", "entry 1 (a): ca_file: is not text"),
                ('client_key_file = "k"', "entry 1 (a): client_key_file: client_cert_file is missing"),
                ('proxy = "proxy:3128"', "entry 1 (a): proxy: the proxy's URL is not http://host:port"),
                ('proxy = "socks5://proxy"', "entry 1 (a): proxy: the proxy's URL is not http://host:port"),
                ('proxy = ["http://proxy"]', "entry 1 (a): proxy: is not text"),
            )
        ),
        ('name = "a"\nbase_url = "http://x/v1"\nmodels = ["*"]\nca_file = "f"', "(a): ca_file: base_url is http://"),
        (
            'name = "a"\nbase_url = "http://x/v1"\nmodels = ["*"]\nclient_cert_file = "f"',
            "(a): client_cert_file: base_url is http://",
        ),
    ],
)
def test_errors_name_file_entry_and_field(entry: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parsed(f"[[providers]]\n{entry}\n")
    assert caught.value.message.startswith("penstock.toml: providers: entry 1")
    assert words in caught.value.message
    assert caught.value.hint


def test_a_name_is_used_once() -> None:
    with pytest.raises(UsageError, match=r"entry 3: name: 'local' is taken by entry 1"):
        parsed(WHOLE + '[[providers]]\nname = "local"\nbase_url = "http://x/v1"\nmodels = ["*"]\n')


def test_providers_must_be_tables() -> None:
    with pytest.raises(UsageError, match="is not a list of tables"):
        parse({"name": "a"}, "penstock.toml")


def test_a_secret_header_is_not_shown() -> None:
    with pytest.raises(UsageError) as caught:
        parsed('[[providers]]\nname = "a"\nbase_url = "http://x/v1"\nmodels = ["*"]\nheaders = { x = "canary\\n" }')
    assert "canary" not in caught.value.message + str(caught.value.hint)
    assert "canary" not in repr(
        Provider("a", "http://x/v1", ("*",), headers={"authorization": "Bearer canary-of-a-header"})
    )


def test_how_a_provider_is_reached() -> None:
    local, rest = parsed(WHOLE)
    assert local.options == ConnectOptions()
    assert rest.options == ConnectOptions(
        "/etc/ca.pem", "/etc/client.pem", "/etc/client.key", "http://user:pass-word@proxy:3128"
    )
    assert "pass-word" not in repr(rest)


def test_files_of_a_provider_are_checked_before_the_first_call(tmp_path: Path) -> None:
    missing = tmp_path / "ca.pem"
    provider = Provider("main", "https://x/v1", ("*",), options=ConnectOptions(ca_file=str(missing)))
    with pytest.raises(UsageError) as caught:
        provider.check()
    assert caught.value.message == f"provider 'main': {missing} cannot be read: No such file or directory (ca_file)"
    assert caught.value.hint


def test_a_key_that_is_named_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = parsed(WHOLE)[0]
    monkeypatch.delenv("LOCAL_KEY", raising=False)
    with pytest.raises(UsageError, match="LOCAL_KEY"):
        local.api_key()
    monkeypatch.setenv("LOCAL_KEY", " k-123\n")
    assert local.api_key() == "k-123"
    path = tmp_path / "key"
    held = Provider("a", "http://x/v1", ("*",), api_key_file=str(path))
    with pytest.raises(UsageError, match="cannot be read"):
        held.api_key()
    path.write_text("two\nlines")
    with pytest.raises(UsageError, match="usable API key"):
        held.api_key()
    path.write_text("k-456\n")
    assert held.api_key() == "k-456"


def test_a_base_url_alone_serves_every_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    provider = single("http://127.0.0.1:8000/v1/", None)
    assert provider.base_url == "http://127.0.0.1:8000/v1"
    assert provider.serves("anything/at:all")
    assert provider.api_key() is None
    assert provider.pool == "serve:default"


class _Recorder(HttpClient):
    """Answers everything, and keeps what was sent."""

    made: ClassVar[list[_Recorder]] = []

    def __init__(self, limits: DispatchLimits, default_headers: Mapping[str, str], options: ConnectOptions) -> None:
        super().__init__(limits, default_headers, options)
        self.default_headers = default_headers
        self.sent: list[Mapping[str, str]] = []
        self.made.append(self)

    async def request(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Answer:
        assert (method, body) == ("POST", b"{}")
        self.sent.append({"url": url, **headers})
        return Answer(200, b"{}", {}, 1)


@pytest.mark.parametrize(("own", "version"), [({}, "2023-06-01"), ({"Anthropic-Version": "2026-10-21"}, None)])
def test_messages_carry_what_anthropics_servers_look_for(own: dict[str, str], version: str | None) -> None:
    async def scenario() -> None:
        base = "http://127.0.0.1:9/v1"
        async with HttpProcessor(base, "k-123", DispatchLimits(), RetryLimits(), own, client=_Recorder) as processor:
            for endpoint in ("/v1/messages", "/v1/chat/completions"):
                lease = Lease(1, 1, 1, UUID(int=1), "m", endpoint, 1, 0, 1, ((0, 1),))
                await processor.call(Item(lease, 0, 1, "a", b"{}"))

    asyncio.run(scenario())
    recorder = _Recorder.made[-1]
    messages, chat = recorder.sent
    assert messages["url"] == "http://127.0.0.1:9/v1/messages"
    assert (messages.get("x-api-key"), messages.get("anthropic-version")) == ("k-123", version)
    assert recorder.default_headers["authorization"] == "Bearer k-123"
    assert recorder.default_headers.get("anthropic-version") == own.get("Anthropic-Version")
    assert set(chat) == {"url", "Idempotency-Key"}


def test_a_key_is_read_again_when_its_file_has_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "key"
    file.write_text("sk-first-key")
    provider = Provider("main", "http://127.0.0.1:9/v1", ("*",), api_key_file=str(file))

    async def scenario() -> None:
        key = KeyInUse(provider)
        async with HttpProcessor(
            provider.base_url, key(), DispatchLimits(), RetryLimits(), current_key=key, client=_Recorder
        ) as processor:
            for content in ("sk-first-key", "sk-second-key", ""):
                file.write_text(content)
                await processor.call(make_item(b"{}", url="/v1/messages"))
            assert processor.redacted(Answer(401, b"sk-second-key")).body == b"[redacted]"

    asyncio.run(scenario())
    sent_headers = _Recorder.made[-1].sent
    assert [sent.get("authorization") for sent in sent_headers] == [None, *["Bearer sk-second-key"] * 2]
    assert [sent["x-api-key"] for sent in sent_headers] == ["sk-first-key", *["sk-second-key"] * 2]
    assert "going on with the key it had before" in caplog.text
    assert "sk-" not in caplog.text


def test_an_endpoint_that_refuses_connections_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        provider = Provider("main", "http://127.0.0.1:9/v1", ("*",))
        async with provider.processor(DispatchLimits(), RetryLimits()) as processor:
            for _ in range(3):
                await processor.call(make_item(b"{}"))

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    (warning,) = caplog.messages
    assert (
        warning
        == "provider main cannot be reached at http://127.0.0.1:9/v1: connect_failed: Connection refused; trying again"
    )


def test_work_of_a_provider_that_is_gone_goes_to_the_same_kind_of_pool() -> None:
    (local,) = parsed(WHOLE)[:1]
    providers = Providers([local])
    assert providers.pools == ["serve:local", "session:local"]
    assert providers.pool_instead("serve:gone", "llama-3") == "serve:local"
    assert providers.pool_instead("session:gone", "llama-3") == "session:local"
    assert providers.pool_instead("serve:gone", "other") is None

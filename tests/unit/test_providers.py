from __future__ import annotations

import asyncio
import logging
import tomllib
from collections.abc import Mapping
from pathlib import Path
from uuid import UUID

import pytest

from penstock import config
from penstock.config import DispatchLimits, RetryLimits
from penstock.dispatch.answer import Answer
from penstock.dispatch.http import HttpProcessor
from penstock.errors import UsageError
from penstock.model import Item, Lease
from penstock.providers import KeyInUse, Provider, Providers, name_in, parse, single
from tests.support.items import make_item

WHOLE = """
[[providers]]
name = "local"
base_url = "http://127.0.0.1:8000/v1/"
models = ["llama-*", "qwen3-32b"]
api_key_env = "LOCAL_KEY"
max_concurrency = 7
attempt_timeout_s = 600
headers = { "x-team" = "search" }

[[providers]]
name = "rest"
base_url = "https://api.example.org/v1"
models = ["*"]
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


def test_timeouts_and_shares_bound_its_calls() -> None:
    local, rest = parsed(WHOLE)
    assert [local.share(DispatchLimits(), index, 3) for index in range(3)] == [2, 2, 3]
    assert [local.share(DispatchLimits(), index, 9) for index in range(9)].count(1) == 7
    assert rest.share(DispatchLimits(), 0, 3) == DispatchLimits().concurrency
    assert local.limits(DispatchLimits(), 2).attempt_timeout_s == 600
    assert local.limits(DispatchLimits(), 2).concurrency == 2
    assert Providers((local, rest)).longest_attempt_s == 600


def test_what_is_told_to_a_worker_process_is_the_same_provider() -> None:
    providers = parsed(WHOLE)
    assert parse([provider.as_dict() for provider in providers], "orders") == providers


def test_the_configuration_file_holds_providers_beside_settings(tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text("max_attempts = 2\n" + WHOLE)
    loaded = config.load(toml_path=path, environ={})
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


class _Recorder:
    """Answers everything, and keeps what was sent."""

    def __init__(self, _: DispatchLimits, default_headers: Mapping[str, str]) -> None:
        self.default_headers = default_headers
        self.sent: list[Mapping[str, str]] = []

    async def request(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Answer:
        assert (method, body) == ("POST", b"{}")
        self.sent.append({"url": url, **headers})
        return Answer(200, b"{}", {}, 1)

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(("own", "version"), [({}, "2023-06-01"), ({"Anthropic-Version": "2026-10-21"}, None)])
def test_messages_carry_what_anthropics_servers_look_for(own: dict[str, str], version: str | None) -> None:
    made: list[_Recorder] = []

    def transport(limits: DispatchLimits, headers: Mapping[str, str]) -> _Recorder:
        made.append(_Recorder(limits, headers))
        return made[-1]

    async def scenario() -> None:
        base = "http://127.0.0.1:9/v1"
        async with HttpProcessor(base, "k-123", DispatchLimits(), RetryLimits(), own, transport=transport) as processor:
            for endpoint in ("/v1/messages", "/v1/chat/completions"):
                lease = Lease(1, 1, 1, UUID(int=1), "m", endpoint, 1, 0, 1, ((0, 1),))
                await processor.call(Item(lease, 0, 1, "a", b"{}"))

    asyncio.run(scenario())
    messages, chat = made[0].sent
    assert messages["url"] == "http://127.0.0.1:9/v1/messages"
    assert (messages.get("x-api-key"), messages.get("anthropic-version")) == ("k-123", version)
    assert made[0].default_headers["authorization"] == "Bearer k-123"
    assert made[0].default_headers.get("anthropic-version") == own.get("Anthropic-Version")
    assert set(chat) == {"url", "Idempotency-Key"}


def test_a_key_is_read_again_when_its_file_has_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "key"
    file.write_text("sk-first-key")
    provider = Provider("main", "http://127.0.0.1:9/v1", ("*",), api_key_file=str(file))
    made: list[_Recorder] = []

    def transport(limits: DispatchLimits, headers: Mapping[str, str]) -> _Recorder:
        made.append(_Recorder(limits, headers))
        return made[-1]

    async def scenario() -> None:
        key = KeyInUse(provider)
        async with HttpProcessor(
            provider.base_url, key(), DispatchLimits(), RetryLimits(), current_key=key, transport=transport
        ) as processor:
            for content in ("sk-first-key", "sk-second-key", ""):
                file.write_text(content)
                await processor.call(make_item(b"{}", url="/v1/messages"))
            assert processor.redacted(b"sk-second-key") == b"[redacted]"

    asyncio.run(scenario())
    assert [sent.get("authorization") for sent in made[0].sent] == [None, *["Bearer sk-second-key"] * 2]
    assert [sent["x-api-key"] for sent in made[0].sent] == ["sk-first-key", *["sk-second-key"] * 2]
    assert "going on with the key it had before" in caplog.text
    assert "sk-" not in caplog.text


def test_an_endpoint_that_refuses_connections_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        provider = Provider("main", "http://127.0.0.1:9/v1", ("*",))
        async with provider.processor(DispatchLimits(), RetryLimits(), 1) as processor:
            for _ in range(3):
                await processor.call(make_item(b"{}"))

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    (warning,) = caplog.messages
    assert warning == "provider main cannot be reached at http://127.0.0.1:9/v1: connect_failed; trying again"


def test_pools_name_their_provider() -> None:
    assert [name_in(pool) for pool in ("serve:a", "session:b", "serve", "run:c")] == ["a", "b", None, None]


def test_work_of_a_provider_that_is_gone_goes_to_the_same_kind_of_pool() -> None:
    (local,) = parsed(WHOLE)[:1]
    providers = Providers([local])
    assert providers.pools == ["serve:local", "session:local"]
    assert providers.pool_instead("serve:gone", "llama-3") == "serve:local"
    assert providers.pool_instead("session:gone", "llama-3") == "session:local"
    assert providers.pool_instead("serve:gone", "other") is None


@pytest.mark.parametrize("processes", [1, 2, 3, 5])
@pytest.mark.parametrize("limit", [1, 2, 3, 4, 7, 64, 255])
def test_the_desk_and_the_workers_share_the_limit(limit: int, processes: int) -> None:
    provider = Provider("p", "http://127.0.0.1:1/v1", ("*",), max_concurrency=limit)
    dispatch = DispatchLimits()
    shares = [provider.share(dispatch, index, processes, desk=True) for index in range(processes)]
    assert sum(shares) + provider.desk_share(dispatch) == limit
    assert max(shares) - min(shares) <= 1
    assert sum(shares) >= limit * 3 / 4

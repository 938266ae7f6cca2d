"""`penstock mock`: a fake upstream on a local port."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click


class _Parsed(click.ParamType[Any]):
    """Option parsed by a function of `penstock.mock.behaviour`, imported only when the option is used."""

    def __init__(self, name: str, parser: Callable[[Any], Callable[[str], Any]]) -> None:
        self.name = name
        self._parser = parser

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from penstock.errors import UsageError
        from penstock.mock import behaviour

        if not isinstance(value, str):
            return value
        try:
            return self._parser(behaviour)(value)
        except UsageError as error:
            self.fail(f"{error.message}. {error.hint or ''}".rstrip(), param, ctx)


_LATENCY = _Parsed("latency", lambda behaviour: behaviour.Latency.parse)
_RATE = _Parsed("rate", lambda behaviour: behaviour.RateLimit.parse)
_TOKENS = _Parsed("tokens", lambda behaviour: behaviour.Tokens.parse)
_DURATION = _Parsed("duration", lambda behaviour: behaviour.parse_duration)
_CHANGES = _Parsed("changes", lambda behaviour: behaviour.Change.parse_all)
_SHARE = _Parsed("fraction", lambda behaviour: behaviour.parse_share)


@click.command(short_help="Serve a fake OpenAI-compatible upstream.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=0, type=click.IntRange(0, 65_535), help="Port to listen on; 0 takes a free one.")
@click.option("--json", "as_json", is_flag=True, help="Announce the base URL as a line of JSON.")
@click.option(
    "--latency",
    default="0",
    type=_LATENCY,
    help="How long a call takes (to its first token, with --token-time): 50ms, 50ms..200ms, or ~50ms (lognormal).",
)
@click.option("--tokens", type=_TOKENS, help="Output tokens of an answer: 100 or 20..200. By default, its text's.")
@click.option("--token-time", "token_time_s", default="0", type=_DURATION, help="Time per output token: 2ms.")
@click.option(
    "--slowdown",
    default=1.0,
    metavar="FACTOR",
    help="Time per token with every slot taken, as a multiple of --token-time; linear in between.",
)
@click.option("--capacity", type=click.IntRange(min=1), help="Calls worked on at once; the others queue.")
@click.option("--queue-limit", type=click.IntRange(min=0), help="Queued calls beyond which the answer is 503.")
@click.option("--error-rate", default="0", type=_SHARE, help="Fraction of calls answered 500.")
@click.option("--reject-rate", default="0", type=_SHARE, help="Fraction of inputs answered 400, every time.")
@click.option("--drop-rate", default="0", type=_SHARE, help="Fraction of calls hung up on without an answer.")
@click.option("--hang-rate", default="0", type=_SHARE, help="Fraction of calls never answered.")
@click.option("--slow-rate", default="0", type=_SHARE, help="Fraction of calls that take --slow-latency.")
@click.option("--slow-latency", default="5s", show_default=True, type=_LATENCY, help="How long a slow call takes.")
@click.option("--rate-limit", type=_RATE, help="Calls let through: 100/s, 600/m or 100. Over it, 429.")
@click.option("--token-limit", type=_RATE, help="Tokens let through, in and out: 90000/m. Over it, 429.")
@click.option("--burst", "burst_s", type=_DURATION, help="Allowance a limit saves up: 1s, 1m; by default one period.")
@click.option(
    "--limit-headers",
    default="full",
    show_default=True,
    type=click.Choice(["full", "retry-after", "none"]),
    help="Headers that tell of limits: all, retry-after in seconds alone, or none.",
)
@click.option(
    "--retry-after",
    "retry_after_s",
    type=_DURATION,
    help="Wait that every 429 of a limit announces; until it is over, all calls get 429.",
)
@click.option("--quota", type=click.IntRange(min=0), help="Calls served before 429 insufficient_quota.")
@click.option(
    "--change",
    "changes",
    default=(),
    type=_CHANGES,
    metavar="TIME:NAME=VALUE,...",
    help="Change options while serving: 30s:capacity=75,60s:error-rate=20%,90s:quota=none.",
)
@click.option("--require-key", metavar="VALUE", help="API key that callers must present; otherwise 401.")
@click.option("--response-bytes", default=0, type=click.IntRange(min=0), help="Pad the answer's text to this size.")
@click.option("--vllm-metrics", is_flag=True, help="Serve the load at /metrics, under vLLM's names.")
@click.option("--seed", default=0, type=click.IntRange(0, 2**64 - 1), help="Seed of every random choice.")
@click.option("--track/--no-track", default=True, help="Count calls per key (or not, to save memory).")
@click.option("--max-seconds", type=click.FloatRange(min=0), help="Stop by itself after this time.")
@click.option("--verbose", is_flag=True, help="Show the rate on stderr every few seconds.")
def mock(
    host: str,
    port: int,
    as_json: bool,
    max_seconds: float | None,
    verbose: bool,
    limit_headers: str,
    **chosen: Any,
) -> None:
    """Serve a fake OpenAI-compatible upstream whose latency, capacity and failures you choose.

    Prints the base URL once it listens, then serves until interrupted. GET /mock/stats, /mock/rate and
    /mock/calls on the same port show the calls it got; POST /mock/set changes options.
    """
    import uvloop

    from penstock.errors import ExitCode, PenstockError
    from penstock.mock.behaviour import Behaviour, LimitHeaders
    from penstock.mock.main import serve

    try:
        behaviour = Behaviour(limit_headers=LimitHeaders(limit_headers), **chosen)
        uvloop.run(serve(behaviour, host, port, as_json=as_json, max_seconds=max_seconds, verbose=verbose))
    except PenstockError as error:
        kind = click.UsageError if error.exit_code == ExitCode.USAGE else click.ClickException
        raise kind(f"{error.message}. {error.hint or ''}".rstrip()) from error

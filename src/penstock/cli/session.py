"""`penstock session`: send to a session, list sessions and their requests, let them go on, erase them."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import quote

import click

from penstock.cli.client import CommandContext, Json, client_command, print_json
from penstock.cli.figures import age, error_text, moment, print_row
from penstock.errors import ExitCode, PenstockError, UsageError, plain

if TYPE_CHECKING:
    from penstock.client.api import Api


_PAGE = 100
_LIMIT = 20
_LISTED = 5
_LOOK_S = 20
_CHAT = "/v1/chat/completions"
_DECIDED = ("completed", "failed", "cancelled")
_ID_CHARS = len("sreq_") + 32

_KEY = click.argument("key", metavar="SESSION")


@click.group(short_help="Send to sessions, and look at them.")
def session() -> None:
    """Conversations whose requests are answered one at a time, in their order."""


# -- send


@session.command(short_help="Send a request to a session and wait for its answer.")
@_KEY
@click.argument("text", required=False)
@click.option("--model", help="Model that TEXT is for.")
@click.option("--body", type=click.File("rb"), help="File with the request's body, JSON; - is standard input.")
@click.option("--endpoint", default=_CHAT, show_default=True, help="Endpoint that the body is for.")
@click.option("--async", "at_once", is_flag=True, help="Do not wait for the answer.")
@click.option(
    "--wait", "wait_s", type=click.FloatRange(0), metavar="SECONDS", help="Longest wait.  [default: no limit]"
)
@click.option("--idempotency-key", "repeat_key", metavar="KEY", help="The same key sends the same request only once.")
@client_command()
async def send(
    context: CommandContext,
    key: str,
    text: str | None,
    model: str | None,
    body: BinaryIO | None,
    endpoint: str,
    at_once: bool,
    wait_s: float | None,
    repeat_key: str | None,
) -> ExitCode | None:
    """Send TEXT, or a whole body, to SESSION, and print the answer. The session is made if there is none.

    The request keeps its place when this command is interrupted: `penstock session show` finds it.
    With --json, the request as the API shows it.
    """
    from uuid import uuid4

    content = {"endpoint": endpoint, "body": _body(text, model, body, endpoint)}
    # A generated key, so that a call whose answer is lost can be repeated.
    with _explain_refusals(context, key):
        found = await context.api.post(
            f"{_path(key)}/requests",
            content,
            key=repeat_key or f"cli-{uuid4().hex}",
            headers={"prefer": "respond-async"},
        )
        if not at_once:
            if found["status"] not in _DECIDED and not await context.api.is_served():
                context.say("Nothing works it off until a server runs on this data: penstock serve")
            found = await _wait_until_decided(context.api, key, found, wait_s)
    if context.as_json:
        print_json(found)
    elif found["status"] in _DECIDED:
        click.echo(_answer_text(found))
    if found["status"] not in _DECIDED:
        context.say(
            f"{found['id']}  {found['status']}\nTo look again: penstock session show {_shell(key)} {found['id']}"
        )
        return None if at_once else ExitCode.OPERATIONAL
    return ExitCode.OK if found["status"] == "completed" else ExitCode.FAILED_ROWS


def _body(text: str | None, model: str | None, body: BinaryIO | None, endpoint: str) -> Json:
    import json

    if (text is None) == (body is None):
        raise UsageError(
            "give either TEXT or --body",
            hint='penstock session send chat-1 "Hello" --model MODEL, or --body request.json',
        )
    if body is not None:
        if model is not None:
            raise UsageError("--model and --body at once", hint="A body names its model itself.")
        try:
            found = json.loads(body.read())
        except ValueError as error:
            raise UsageError(
                f"--body: not valid JSON: {error}", hint='For example {"model": ..., "messages": [...]}.'
            ) from error
        if not isinstance(found, dict):
            raise UsageError("--body: not a JSON object", hint='For example {"model": ..., "messages": [...]}.')
        return found
    if model is None:
        raise UsageError("TEXT without --model", hint="Name the model that shall answer.")
    if endpoint != _CHAT:
        raise UsageError(f"TEXT is for {_CHAT}", hint="Give --body for another endpoint.")
    return {"model": model, "messages": [{"role": "user", "content": text}]}


async def _wait_until_decided(api: Api, key: str, found: Json, wait_s: float | None) -> Json:
    """Wait until a request has ended; returns it as it is when the time is up."""
    from time import monotonic

    until = None if wait_s is None else monotonic() + wait_s
    while found["status"] not in _DECIDED:
        left_s = _LOOK_S if until is None else min(_LOOK_S, until - monotonic())
        if left_s <= 0:
            break
        found = await api.get(f"{_path(key)}/requests/{found['id']}", {"wait": f"{left_s:.3f}"})
    return found


# -- ls


@session.command(short_help="List sessions, newest first.")
@click.option("--limit", type=click.IntRange(min=1), help=f"How many at most.  [default: {_LIMIT}]")
@click.option("--all", "everything", is_flag=True, help="Every one.")
@client_command()
async def ls(context: CommandContext, limit: int | None, everything: bool) -> None:
    """List sessions, newest first: state, requests that wait and that are being answered, age and key.

    With --json, one object: {"data": [sessions as the API shows them], "has_more": whether there are others}.
    """
    most = limit or (None if everything else _LIMIT)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    kept: list[Json] = []
    shown, more = 0, False
    async for entry in context.api.walk("/v1/sessions", page=_PAGE if most is None else min(_PAGE, most + 1)):
        if most is not None and shown >= most:
            more = True
            break
        if context.as_json:
            kept.append(entry)
        else:
            _print_row(entry, headed=shown > 0, width=width)
        shown += 1
    if context.as_json:
        print_json({"object": "list", "data": kept, "has_more": more})
    elif not shown:
        context.say("no sessions yet: `penstock session send SESSION TEXT --model MODEL` makes one")
    elif more:
        context.say(f"(the newest {shown:,}; --all shows every one)")


def _print_row(entry: Json, *, headed: bool, width: int | None) -> None:
    row = "{:<7}  {:>9}  {:>9}  {:>4}  {}"
    if not headed:
        click.echo(row.format("STATE", "WAITING", "IN FLIGHT", "AGE", "SESSION")[:width])
    figures = (f"{entry['queued']:,}", f"{entry['in_flight']:,}", age(entry["created_at"]))
    click.echo(row.format(entry["status"], *figures, plain(entry["key"]))[:width].rstrip())


# -- show


@session.command(short_help="Show a session, or one of its requests.")
@_KEY
@click.argument("request", required=False)
@client_command()
async def show(context: CommandContext, key: str, request: str | None) -> None:
    """Show SESSION: its figures and settings, its next and failed requests; or its request REQUEST, with the answer.

    REQUEST is an id, which may be cut short as long as it is unique, or the request's number in the session.
    With --json, the session as the API shows it with `next` and `failures` added, or the request.
    """
    with _explain_refusals(context, key):
        if request is not None:
            found = await _find(context.api, key, request)
            if context.as_json:
                print_json(found)
            else:
                _print_request(found)
            return
        found = await context.api.get(_path(key))
        heads = await _list_first(context.api, key, "processing") + await _list_first(context.api, key, "pending")
        failures = await _list_first(context.api, key, "failed")
    if context.as_json:
        print_json({**found, "next": heads[:_LISTED], "failures": failures})
        return
    _print_session(found, heads[:_LISTED], failures)
    if found["status"] == "blocked":
        context.say(f"It waits for a decision: penstock session resume {_shell(key)} [--retry-head]")
    elif found["queued"] and not await context.api.is_served():
        context.say("Nothing works it off until a server runs on this data: penstock serve")


async def _list_first(api: Api, key: str, status: str) -> list[Json]:
    found: list[Json] = (await api.get(f"{_path(key)}/requests", {"status": status, "limit": _LISTED}))["data"]
    return found


def _print_session(found: Json, heads: list[Json], failures: list[Json]) -> None:
    click.echo(f"{plain(found['key'])}  {found['status']}")
    print_row("requests", f"{found['queued']:,} waiting, {found['in_flight']:,} being answered")
    print_row(
        "failing", "goes on with the next" if found["on_dead_head"] == "continue" else "blocks until a person decides"
    )
    for label, name in (("at most", "max_queued"), ("wait", "wait_timeout_s"), ("priority", "priority")):
        if found[name]:
            print_row(label, f"{found[name]:g}" + (" s" if name.endswith("_s") else ""))
    print_row("created", f"{moment(found['created_at'])}  ({age(found['created_at'])} ago)")
    for label, requests in (("next", heads), ("failed", failures)):
        for number, request in enumerate(requests):
            said = f"  {plain(error_text(request), 160)}" if label == "failed" else ""
            print_row("" if number else label, f"{request['sequence']:>6,}  {request['id']}  {request['status']}{said}")


def _print_request(found: Json) -> None:
    click.echo(f"{found['id']}  {found['status']}")
    print_row("session", f"{plain(found['session'])}, number {found['sequence']:,}")
    print_row("attempts", f"{found['attempts']:,}")
    print_row("created", f"{moment(found['created_at'])}  ({age(found['created_at'])} ago)")
    if found["completed_at"]:
        print_row("ended", moment(found["completed_at"]))
    if found["status"] in _DECIDED:
        click.echo(_answer_text(found))


# -- cancel


@session.command(short_help="Cancel requests that wait in a session.")
@_KEY
@click.argument("requests", nargs=-1, metavar="[REQUEST]...")
@click.option("--all", "everything", is_flag=True, help="Everything that waits.")
@client_command()
async def cancel(context: CommandContext, key: str, requests: tuple[str, ...], everything: bool) -> ExitCode | None:
    """Cancel the REQUESTs of SESSION that wait for their turn. A request that is being answered is not cut off.

    With --json, one object: {"cancelled": [requests], "refused": [{"id", "message"}]}.
    """
    if bool(requests) == everything:
        raise UsageError("give either REQUESTs or --all", hint="`penstock session show` lists the next requests.")
    cancelled: list[Json] = []
    refused: list[Json] = []
    with _explain_refusals(context, key):
        if everything:
            await context.api.get(_path(key))
        async for found in _list_wanted(context.api, key, requests):
            await _cancel(context.api, key, found, cancelled, refused)
    if context.as_json:
        print_json({"cancelled": cancelled, "refused": refused})
    else:
        for found in cancelled:
            click.echo(f"{found['id']}  cancelled")
        for entry in refused:
            click.echo(f"{entry['id']}  {entry['message']}", err=True)
        if everything and not cancelled and not refused:
            context.say("nothing waits")
    return ExitCode.OPERATIONAL if refused and not everything else None


async def _list_wanted(api: Api, key: str, requests: tuple[str, ...]) -> AsyncIterator[Json]:
    for text in requests:
        yield await _find(api, key, text)
    if not requests:
        # From the last to the first: otherwise later ones would be answered while the first are being cancelled.
        waiting = [found async for found in api.walk(f"{_path(key)}/requests", page=_PAGE, status="pending")]
        for found in reversed(waiting):
            yield found


async def _cancel(api: Api, key: str, found: Json, cancelled: list[Json], refused: list[Json]) -> None:
    from penstock.client.api import Refused

    try:
        cancelled.append(await api.delete(f"{_path(key)}/requests/{found['id']}"))
    except Refused as refusal:
        if refusal.status not in (404, 409):
            raise
        refused.append({"id": found["id"], "message": refusal.message})


# -- resume, delete


@session.command(short_help="Let a session go on that a failed request blocks.")
@_KEY
@click.option(
    "--retry-head", is_flag=True, help="Run the request that failed once more.  [default: go on with the next]"
)
@client_command()
async def resume(context: CommandContext, key: str, retry_head: bool) -> None:
    """Let SESSION go on, which stopped at a request that failed for good.

    With --json, the session as the API shows it.
    """
    with _explain_refusals(context, key):
        found = await context.api.post(f"{_path(key)}/resume", {"retry_head": retry_head})
    _print_state(context, key, found, found["status"])


@session.command(short_help="Erase a session with everything in it.")
@_KEY
@client_command()
async def delete(context: CommandContext, key: str) -> None:
    """Cancel the waiting requests of SESSION and erase it, requests and answers. There is no way back.

    With --json, {"id": ..., "object": "session", "deleted": true}.
    """
    with _explain_refusals(context, key):
        found = await context.api.delete(_path(key))
    _print_state(context, key, found, "deleted")


def _print_state(context: CommandContext, key: str, found: Json, state: str) -> None:
    if context.as_json:
        print_json(found)
    else:
        click.echo(f"{plain(key)}  {state}")


# -- common parts


def _path(key: str) -> str:
    return f"/v1/sessions/{quote(key, safe='')}"


def _shell(key: str) -> str:
    import shlex

    return shlex.quote(key)


async def _find(api: Api, key: str, text: str) -> Json:
    """A request by its id, by an end of it that is unique, or by its number."""
    if text.startswith("sreq_") and len(text) == _ID_CHARS:
        return await api.get(f"{_path(key)}/requests/{text}")
    found = []
    async for entry in api.walk(f"{_path(key)}/requests", page=_PAGE):
        if str(entry["sequence"]) == text:
            return entry
        if entry["id"].startswith(text) or (len(text) >= 4 and entry["id"].endswith(text)):
            found.append(entry)
    if not found:
        raise UsageError(
            f"no request of the session is '{text}'", hint=f"`penstock session show {_shell(key)}` lists the next ones."
        )
    if len(found) > 1:
        listed = "".join(f"\n  {entry['id']}  number {entry['sequence']:,}" for entry in found[:_LISTED])
        raise UsageError(f"'{text}' may mean any of these requests:{listed}", hint="Give more digits, or the number.")
    return found[0]


@contextlib.contextmanager
def _explain_refusals(context: CommandContext, key: str) -> Iterator[None]:
    """Add hints for these commands to the server's refusals."""
    from penstock.client.api import Refused

    try:
        yield
    except Refused as refusal:
        hint = {
            404: "`penstock session ls` lists the sessions of this key on this server.",
            409: f"`penstock session show {_shell(key)}` shows its state.",
        }.get(refusal.status)
        if refusal.code == "model_not_found" and context.api.local:
            hint = (
                "The models are those of [[providers]] in penstock.toml; a running server knows its own: --server URL."
            )
        if hint is None:
            raise
        raise PenstockError(refusal.message, hint=hint) from refusal


def _answer_text(found: Json) -> str:
    """Answer as text: a chat's message, else the body."""
    import json

    if found["status"] != "completed":
        return f"{found['status']}: {error_text(found)}"
    body: Any = (found["response"] or {}).get("body")
    try:
        words = body["choices"][0]["message"]["content"]
        if isinstance(words, str):
            return words
    except (TypeError, KeyError, IndexError):
        pass
    return json.dumps(body, ensure_ascii=False)

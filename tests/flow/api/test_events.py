"""CloudEvents in and out, with the official SDK as client and as sink: a real server and a real receiver."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from cloudevents.core.base import BaseCloudEvent
from cloudevents.core.bindings import http as sdk
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent
from openai import OpenAI
from psycopg.conninfo import make_conninfo

from penstock.api import keys
from penstock.db.pool import Connection
from tests.support.db import with_connection
from tests.support.mock_process import MockProcess, start_mock_process
from tests.support.receiver import OK, Message, Receiver, background_receiver, status
from tests.support.server import Answered, ServerProcess, served
from tests.support.wait import wait_until

SECRET = "whsec_" + base64.b64encode(b"s" * 24).decode()
ASKED = "com.penstock.session.request"
DEADLINE_S = 30.0
# Retries come at once.
FAST = {"PENSTOCK_WEBHOOK_RETRY_BASE_S": "0.01", "PENSTOCK_WEBHOOK_RETRY_CAP_S": "1", "SINK_SECRET": SECRET}


@dataclass
class Rig:
    server: ServerProcess
    receiver: Receiver
    everything: Receiver
    database: str

    def told(self, receiver: Receiver | None = None) -> list[BaseCloudEvent]:
        """What the sink has taken, read by the SDK."""
        got = (receiver or self.receiver).messages
        return [sdk.from_http_event(sdk.HTTPMessage(message.headers, message.body)) for message in list(got)]

    def told_of(self, request_id: str, receiver: Receiver | None = None) -> list[BaseCloudEvent]:
        return [event for event in self.told(receiver) if event.get_data()["id"] == request_id]  # type: ignore[index,call-overload]

    def wait_told(self, request_id: str, receiver: Receiver | None = None) -> BaseCloudEvent:
        wait_until(lambda: self.told_of(request_id, receiver), DEADLINE_S)
        return self.told_of(request_id, receiver)[0]


@pytest.fixture(scope="module")
def mock() -> Iterator[MockProcess]:
    with start_mock_process() as process:
        yield process


@contextmanager
def rigged(
    database: str, mock: MockProcess, directory: Path, *, mode: str = "structured", more: str = ""
) -> Iterator[Rig]:
    with background_receiver() as receiver, background_receiver() as everything:
        directory.mkdir(parents=True, exist_ok=True)
        toml = directory / "penstock.toml"
        toml.write_text(
            f'[[providers]]\nname = "mock"\nbase_url = "{mock.base_url}"\nmodels = ["*"]\n'
            f'[[sinks]]\nname = "events"\nurl = "{receiver.url}"\nsecret_env = "SINK_SECRET"\nmode = "{mode}"\n'
            f'source = "https://penstock.example.org"\n{more}'
            f'[[sinks]]\nname = "all"\nurl = "{everything.url}"\nsecret_env = "SINK_SECRET"\nrequests = "all"\n'
        )
        with served(directory, "--config", toml, database=database, env=FAST) as server:
            yield Rig(server, receiver, everything, database)


@pytest.fixture(scope="module")
def rig(server_18: str, mock: MockProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with psycopg.connect(server_18, autocommit=True) as connection:
        connection.execute("CREATE DATABASE events TEMPLATE template_penstock")
    with rigged(make_conninfo(server_18, dbname="events"), mock, tmp_path_factory.mktemp("events")) as made:
        yield made


def _body(text: str = "hello", **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


def _event(session: str | None = None, *, data: Any = None, **attributes: Any) -> CloudEvent:
    named = {"type": ASKED, "source": "/tests", "id": uuid4().hex, "datacontenttype": "application/json", **attributes}
    if session is not None:
        named["subject"] = session
    return CloudEvent(named, data or {"endpoint": "/v1/chat/completions", "body": _body()})


def _send(server: ServerProcess, event: CloudEvent, *, binary: bool = False) -> Answered:
    message = sdk.to_binary_event(event) if binary else sdk.to_structured_event(event)
    return server.ask("POST", "/v1/events", message.body, headers=message.headers)


def _send_batch(server: ServerProcess, batch: list[CloudEvent]) -> Answered:
    body = b"[" + b",".join(JSONFormat().write(event) for event in batch) + b"]"
    return server.ask("POST", "/v1/events", body, headers={"content-type": "application/cloudevents-batch+json"})


def _key() -> str:
    return f"session {uuid4().hex}"


@pytest.mark.parametrize("binary", [False, True])
def test_an_event_is_answered_by_an_event(rig: Rig, binary: bool) -> None:
    key = _key()
    event = _event(key)
    answer = _send(rig.server, event, binary=binary)
    assert answer.status == 202, answer.content
    accepted = answer.json
    assert accepted["session"] == key
    assert accepted["event_id"] == event.get_id()
    assert answer.headers["location"] == accepted["url"]
    told = rig.wait_told(accepted["id"])
    assert told.get_type() == f"{ASKED}.completed"
    assert told.get_source() == "https://penstock.example.org"
    assert told.get_subject() == key
    assert told.get_id().startswith("evt_")
    assert told.get_id() != event.get_id()
    assert told.get_extension("causeid") == event.get_id()
    assert told.get_extension("causesource") == "/tests"
    shown = rig.server.ask("GET", accepted["url"])
    assert told.get_data() == shown.json
    assert shown.json["response"]["status_code"] == 200
    assert shown.json["sequence"] == 1


def test_the_session_may_be_named_in_the_data(rig: Rig) -> None:
    key = _key()
    data = {"session": key, "endpoint": "/v1/chat/completions", "body": _body()}
    for event in (_event(data=data), _event(key, data=data)):
        assert _send(rig.server, event).json["session"] == key
    refused = _send(rig.server, _event("another", data=data))
    assert (refused.status, refused.json["error"]["param"]) == (400, "subject")


def test_deliveries_are_signed(rig: Rig) -> None:
    accepted = _send(rig.server, _event(_key())).json
    told = rig.wait_told(accepted["id"])
    (message,) = [m for m in rig.receiver.messages if m.headers["webhook-id"] == told.get_id()]
    client = OpenAI(api_key="none", webhook_secret=SECRET)
    client.webhooks.verify_signature(message.body, message.headers)


def test_the_same_event_is_the_same_request(rig: Rig) -> None:
    event = _event(_key())
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda n: _send(rig.server, event, binary=bool(n % 2)), range(8)))
    assert {answer.status for answer in answers} == {202}
    assert len({answer.json["id"] for answer in answers}) == 1
    rig.wait_told(answers[0].json["id"])
    listed = rig.server.ask("GET", f"/v1/sessions/{answers[0].json['session'].replace(' ', '%20')}/requests").json
    assert len(listed["data"]) == 1
    # The id of another source is another event; the same event asking for something else is a mistake.
    other = _event(event.get_subject(), id=event.get_id(), source="/elsewhere")
    assert _send(rig.server, other).json["id"] != answers[0].json["id"]
    changed = _event(
        event.get_subject(), id=event.get_id(), data={"endpoint": "/v1/chat/completions", "body": _body("else")}
    )
    refused = _send(rig.server, changed)
    assert (refused.status, refused.json["error"]["code"]) == (409, "event_conflict")


def test_a_batch_is_taken_in_order_and_whole_or_not_at_all(rig: Rig) -> None:
    key = _key()
    batch = [_event(key, id=f"{key}-{n}") for n in range(5)]
    answer = _send_batch(rig.server, [*batch, batch[0]])
    assert answer.status == 202, answer.content
    ids = [entry["id"] for entry in answer.json]
    assert ids[5] == ids[0]
    assert len(set(ids)) == 5
    place = f"/v1/sessions/{key.replace(' ', '%20')}/requests"
    assert [entry["id"] for entry in rig.server.ask("GET", place).json["data"]] == ids[:5]
    # One that is wrong, here its last, and nothing of it is taken.
    other = _key()
    wrong = _send_batch(rig.server, [_event(other), _event(other, type="com.example.other")])
    assert (wrong.status, wrong.json["error"]["param"]) == (400, "[1].type")
    conflicting = _event(other, id=batch[0].get_id(), data={"endpoint": "/v1/embeddings", "body": _body()})
    assert _send_batch(rig.server, [_event(other), conflicting]).status == 409
    assert rig.server.ask("GET", f"/v1/sessions/{other.replace(' ', '%20')}").status == 404
    assert _send_batch(rig.server, []).json == []


def test_a_full_session_takes_nothing_of_a_batch(rig: Rig) -> None:
    key = uuid4().hex
    assert rig.server.ask("PUT", f"/v1/sessions/{key}", {"max_queued": 2}).status == 200
    elsewhere = uuid4().hex
    answer = _send_batch(rig.server, [_event(elsewhere), *(_event(key) for _ in range(5))])
    assert (answer.status, answer.json["error"]["code"]) == (429, "session_queue_full")
    assert "retry-after" in answer.headers
    assert rig.server.ask("GET", f"/v1/sessions/{elsewhere}").status == 404
    with psycopg.connect(rig.database) as connection:
        known = connection.execute(
            "SELECT count(*) FROM penstock.incoming_events WHERE session_key = ANY (%s)", [[key, elsewhere]]
        ).fetchone()
    assert known == (0,)


def test_failures_are_told_too(rig: Rig) -> None:
    data = {"endpoint": "/v1/chat/completions", "body": {"model": "m", "messages": "not a list"}}
    accepted = _send(rig.server, _event(_key(), data=data)).json
    told = rig.wait_told(accepted["id"])
    assert told.get_type() == f"{ASKED}.failed"
    assert told.get_data()["status"] == "failed"  # type: ignore[index,call-overload]


def test_who_wants_all_gets_all(rig: Rig) -> None:
    key = uuid4().hex
    asked = {"endpoint": "/v1/chat/completions", "body": _body()}
    answer = rig.server.ask("POST", f"/v1/sessions/{key}/requests", asked)
    assert answer.status == 200, answer.content
    told = rig.wait_told(answer.json["id"], rig.everything)
    assert told.get_source() == "urn:penstock"
    assert told.get_extension("causeid") is None
    accepted = _send(rig.server, _event(key)).json
    rig.wait_told(accepted["id"], rig.everything)
    rig.wait_told(accepted["id"])
    assert not rig.told_of(answer.json["id"])


@pytest.mark.parametrize(
    ("headers", "body", "code", "param"),
    [
        ({"content-type": "application/json"}, b"{}", 415, None),
        ({"content-type": "application/cloudevents+json"}, b"{}", 400, "specversion"),
        ({"content-type": "application/cloudevents+json"}, b"{", 400, None),
        ({"ce-specversion": "1.0", "ce-id": "1", "ce-source": "/s"}, b"", 400, "type"),
    ],
)
def test_what_is_no_event_is_refused(
    rig: Rig, headers: dict[str, str], body: bytes, code: int, param: str | None
) -> None:
    answer = rig.server.ask("POST", "/v1/events", body, headers=headers)
    assert (answer.status, answer.json["error"]["param"]) == (code, param)


@pytest.mark.parametrize(
    ("event", "param"),
    [
        (_event("s", type="com.example.other"), "type"),
        (_event(), "subject"),
        (_event("s", data={"endpoint": "/v1/chat/completions"}), "data"),
        (_event("s", data={"endpoint": "/v1/files", "body": _body()}), "data.endpoint"),
        (_event("s", data={"endpoint": "/v1/chat/completions", "body": {}}), "data.body.model"),
        (_event("s", data={"endpoint": "/v1/chat/completions", "body": _body(), "more": 1}), "data"),
        (_event("a/b"), "subject"),
        (_event("s", datacontenttype="text/plain"), "data"),
    ],
)
def test_what_an_event_asks_for_is_checked(rig: Rig, event: CloudEvent, param: str) -> None:
    answer = _send(rig.server, event)
    assert (answer.status, answer.json["error"]["param"]) == (400, param), answer.content


def test_a_sink_that_fails_gets_the_same_event_again(database_18: str, mock: MockProcess, tmp_path: Path) -> None:
    with rigged(database_18, mock, tmp_path, mode="binary") as rig:
        refusals: list[Message] = []

        def grudging(message: Message) -> bytes:
            if len(refusals) < 3:
                refusals.append(message)
                return status(500)
            return OK

        rig.receiver.answer = grudging
        accepted = _send(rig.server, _event("patience")).json
        wait_until(lambda: len(rig.told_of(accepted["id"])) == 4, DEADLINE_S)
        seen = rig.told_of(accepted["id"])
        assert len({event.get_id() for event in seen}) == 1
        assert rig.receiver.messages[0].headers["content-type"] == "application/json"
        assert rig.receiver.messages[0].headers["ce-subject"] == "patience"
        with psycopg.connect(database_18, autocommit=True) as connection:
            query = "SELECT attempts FROM penstock.sink_deliveries WHERE sink = 'events' AND delivered_at IS NOT NULL"
            wait_until(lambda: connection.execute(query).fetchall() == [(4,)], DEADLINE_S)


def test_a_killed_server_loses_no_answer(database_18: str, mock: MockProcess, tmp_path: Path) -> None:
    """What was accepted, answered or taken for delivery when the server died is told by the next one."""
    with rigged(database_18, mock, tmp_path / "first") as rig:
        rig.receiver.answer = lambda _: status(503)
        keys = [f"s{n}" for n in range(4)]
        batch = _send_batch(rig.server, [_event(key) for key in keys for _ in range(5)]).json
        wait_until(lambda: rig.receiver.messages, DEADLINE_S)
        rig.server.process.kill()
    with psycopg.connect(database_18, autocommit=True) as connection:
        # What the dead one had taken comes due by itself, in half a minute; time is passed here by hand.
        connection.execute("UPDATE penstock.sink_deliveries SET due_at = now() WHERE delivered_at IS NULL")
    with rigged(database_18, mock, tmp_path / "second") as rig:
        wanted = {entry["id"] for entry in batch}
        wait_until(lambda: {e.get_data()["id"] for e in rig.told()} == wanted, DEADLINE_S)  # type: ignore[index,call-overload]


def test_events_are_their_owners_and_so_are_sinks(database_18: str, mock: MockProcess, tmp_path: Path) -> None:
    async def make_keys(connection: Connection) -> dict[str, str]:
        return {
            owner: (await keys.create_key(connection, owner=owner, name="k", role="user"))[1]
            for owner in ("ann", "bob")
        }

    secrets = with_connection(database_18, make_keys)
    message = sdk.to_structured_event(_event("private"))
    with rigged(database_18, mock, tmp_path, more='owners = ["ann"]\n') as rig:
        ids = {}
        for owner, secret in secrets.items():
            answer = rig.server.ask("POST", "/v1/events", message.body, headers=message.headers, key=secret)
            assert answer.status == 202
            ids[owner] = answer.json["id"]
        assert rig.server.ask("POST", "/v1/events", message.body, headers=message.headers).status == 401
        assert ids["ann"] != ids["bob"]
        rig.wait_told(ids["ann"], rig.everything)
        rig.wait_told(ids["bob"], rig.everything)
        rig.wait_told(ids["ann"])
        assert not rig.told_of(ids["bob"])

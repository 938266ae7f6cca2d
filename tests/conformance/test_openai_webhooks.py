"""Webhooks with the official OpenAI client: whatever it has for them, from making an endpoint to reading an event."""

from __future__ import annotations

import base64
import hashlib
import hmac
import inspect
import json
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from queue import Queue
from threading import Thread
from typing import Any

import openai
import pytest

from tests.conformance.conftest import Driver, Place
from tests.conformance.test_openai import ended, requests, submit
from tests.support.thorough import some

Received = Queue[tuple[dict[str, str], bytes]]
EVENTS = ["batch.completed", "batch.failed", "batch.expired", "batch.cancelled"]
# The calls that clients before 3.x do not have.
MANAGES = hasattr(openai.OpenAI(api_key="none").webhooks, "create")


@pytest.fixture(params=some(["sync", "async"], 1))
def driver(request: pytest.FixtureRequest, place: Place) -> Iterator[Driver]:
    make: Callable[..., Any] = openai.OpenAI if request.param == "sync" else openai.AsyncOpenAI
    made = Driver(make(base_url=f"{place.url}/v1", api_key=place.key, max_retries=0))
    yield made
    made.close()


@pytest.fixture
def receiver() -> Iterator[tuple[str, Received]]:
    """A real HTTP server that keeps what it is sent."""
    received: Received = Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.put(({name.lower(): value for name, value in self.headers.items()}, body))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/hook", received
        server.shutdown()
        thread.join()


def test_a_signed_payload_is_accepted(driver: Driver) -> None:
    secret = b"0123456789abcdef01234567"
    key = f"whsec_{base64.b64encode(secret).decode()}"
    body = json.dumps(
        {"id": "evt_1", "object": "event", "created_at": 1, "type": "batch.completed", "data": {"id": "batch_1"}}
    )
    stamp = str(int(time.time()))
    signature = base64.b64encode(hmac.digest(secret, f"evt_1.{stamp}.{body}".encode(), hashlib.sha256)).decode()
    headers = {"webhook-id": "evt_1", "webhook-timestamp": stamp, "webhook-signature": f"v1,{signature}"}
    driver.do("webhooks.verify_signature", body, headers, secret=key)
    assert driver.do("webhooks.unwrap", body, headers, secret=key).type == "batch.completed"


if MANAGES:

    def test_an_endpoint_from_first_to_last(driver: Driver, receiver: tuple[str, Received]) -> None:
        url, received = receiver
        made = driver.do("webhooks.create", name="mine", url=url, event_types=EVENTS)
        assert (made.object, made.name, made.url, made.event_types) == ("webhook_endpoint", "mine", url, EVENTS)
        assert made.signing_secret.startswith("whsec_")
        found = driver.do("webhooks.retrieve", made.id)
        assert (found.id, getattr(found, "signing_secret", None)) == (made.id, None)
        assert made.signing_secret.endswith(found.signing_secret_hint[-4:])
        assert driver.do("webhooks.update", made.id, name="renamed").name == "renamed"
        assert made.id in {entry.id for entry in driver.walk("webhooks.list", limit=1)}

        batch = ended(driver, submit(driver, requests(2)))
        headers, body = received.get(timeout=60)
        event = driver.do("webhooks.unwrap", body.decode(), headers, secret=made.signing_secret)
        assert (event.type, event.data.id, event.id) == ("batch.completed", batch.id, headers["webhook-id"])

        turned = driver.do("webhooks.rotate_secret", made.id, keep_old_secret_active_for_24_hours=True)
        assert turned.signing_secret != made.signing_secret
        _test_event(driver, made.id)
        headers, body = received.get(timeout=60)
        for secret in (turned.signing_secret, made.signing_secret):
            driver.do("webhooks.verify_signature", body.decode(), headers, secret=secret)

        gone = driver.do("webhooks.delete", made.id)
        assert (gone.id, gone.deleted, gone.object) == (made.id, True, "webhook_endpoint.deleted")
        with pytest.raises(openai.NotFoundError):
            driver.do("webhooks.retrieve", made.id)

    def _test_event(driver: Driver, endpoint_id: str) -> None:
        wanted = inspect.signature(driver.client.webhooks.test).parameters
        options = {"event_type": "batch.completed"} if "event_type" in wanted else {}
        driver.do("webhooks.test", endpoint_id, **options)

    def test_event_types(driver: Driver) -> None:
        types = driver.do("webhooks.event_types.list")
        assert set(EVENTS) <= {getattr(entry, "id", None) or getattr(entry, "name", entry) for entry in types.data}

    @pytest.mark.parametrize(
        "url", ["http://169.254.169.254/latest", "http://10.0.0.1/x", "file:///etc/passwd", "nonsense"]
    )
    def test_forbidden_addresses(driver: Driver, url: str) -> None:
        with pytest.raises((openai.BadRequestError, openai.UnprocessableEntityError)):
            driver.do("webhooks.create", name="mine", url=url, event_types=EVENTS)

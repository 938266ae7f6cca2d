"""Workers, providers and webhooks in the console."""

from __future__ import annotations

import re
from collections.abc import Callable

from playwright.sync_api import Page, expect

from tests.support.browser import WatchedPage, serious_issues
from tests.support.jobs import start_job, until_state
from tests.support.mock_process import MockProcess
from tests.support.receiver import background_receiver
from tests.support.server import ServerProcess


def test_workers_that_are_alive(show: Callable[[str], Page], server: ServerProcess) -> None:
    page = show("/workers")
    ours = re.compile(rf"pid ({'|'.join(map(str, server.worker_pids))})(?!\d)")
    # A process that stood still for too long has another row, of the worker that it was.
    expect(page.get_by_role("row").filter(has_text=ours).filter(has_text="Idle").first).to_be_visible()
    assert serious_issues(page) == []


def test_a_halted_provider_is_called_again(
    show: Callable[[str], Page], server: ServerProcess, upstream: MockProcess
) -> None:
    upstream.set(quota=0)
    try:
        spec = {"processor": {"type": "chat", "provider": "default", "model": "exhausted", "prompt": "{{ a }}"}}
        job = start_job(server, b"a\n1\n2\n", spec)
        page = show("/providers")
        card = page.get_by_label("Provider default")
        expect(card.get_by_text("exhausted is not called: insufficient_quota")).to_be_visible()
        expect(card).to_contain_text("Halted")
        assert serious_issues(page) == []
    finally:
        upstream.set(quota=None)
    card.get_by_role("button", name="Call again").click()
    page.get_by_role("dialog").get_by_role("button", name="Call again").click()
    expect(card).to_contain_text("Open")
    until_state(server, job, "DONE")
    limit = card.get_by_role("row").filter(has_text="exhausted")
    expect(limit).to_contain_text("of 16")
    expect(limit).to_contain_text("the start")


def test_a_webhook_is_made_tried_changed_and_deleted(
    show: Callable[[str], Page], watched: WatchedPage, server: ServerProcess
) -> None:
    watched.allow("status of 422")
    with background_receiver() as receiver:
        page = show("/webhooks")
        expect(page.get_by_text("No webhooks")).to_be_visible()
        page.get_by_role("button", name="New webhook").first.click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("Name").fill("pipeline")
        dialog.get_by_label("Address").fill("ftp://127.0.0.1/hook")
        dialog.get_by_role("button", name="Make the webhook").click()
        expect(dialog.get_by_role("alert")).to_be_visible()
        dialog.get_by_label("Address").fill(receiver.url)
        assert serious_issues(page) == []
        dialog.get_by_role("button", name="Make the webhook").click()
        secret = page.locator("[data-secret]").inner_text()
        assert secret.startswith("whsec_")
        page.get_by_role("button", name="I have kept it").click()

        row = page.get_by_role("row").filter(has_text="pipeline")
        page.set_viewport_size({"width": 390, "height": 844})
        cells = row.locator("[data-label=Events], [data-label=Created]")
        expect(cells).to_have_count(2)
        for cell in cells.all():
            box = cell.bounding_box()
            assert box is not None
            assert box["height"] < 30, "its label stands above it"
        page.set_viewport_size({"width": 1280, "height": 800})
        row.get_by_role("button", name="Test").click()
        expect(page.get_by_text("pipeline answered 200.")).to_be_visible()
        assert len(receiver.messages) == 1
        row.get_by_role("button", name="Change pipeline").click()
        dialog.get_by_label("Name").fill("warehouse")
        dialog.get_by_role("button", name="Save").click()
        row = page.get_by_role("row").filter(has_text="warehouse")
        row.get_by_role("button", name="New secret for warehouse").click()
        dialog.get_by_role("button", name="Make a new secret").click()
        expect(page.locator("[data-secret]")).not_to_have_text(secret)
        page.get_by_role("button", name="I have kept it").click()

        row.get_by_role("button", name="Deliveries").click()
        expect(page.get_by_text("Nothing was sent yet")).to_be_visible()
        page.keyboard.press("Escape")
        row.get_by_role("button", name="Delete warehouse").click()
        dialog.get_by_role("button", name="Delete").click()
        expect(page.get_by_text("No webhooks")).to_be_visible()
    assert server.ask("GET", "/v1/webhook_endpoints").json["data"] == []


def test_updates_that_rest_say_so_on_every_page(show: Callable[[str], Page]) -> None:
    page = show("/workers")
    expect(page.get_by_role("table", name="Workers")).to_be_visible()
    expect(page.locator(".live")).to_have_count(0)
    page.keyboard.press("p")
    page.get_by_role("button", name="Paused").click()
    expect(page.locator(".live")).to_have_count(0)


def test_an_address_that_refuses_events_is_told_as_a_failure_and_its_deliveries_lead_to_the_job(
    show: Callable[[str], Page], server: ServerProcess
) -> None:
    job = start_job(server, b"sku\n1\n", {"processor": "price"}, filename="told.csv")
    # Events of jobs, too, have the id of a batch.
    delivery = {
        "id": "whd_1",
        "event_type": "batch.completed",
        "batch_id": job.replace("job_", "batch_"),
        "created_at": 1_790_000_000,
        "status": "pending",
        "attempts": 2,
        "next_attempt_at": 1_790_000_060,
        "status_code": 404,
        "error": "answered 404",
    }
    hook = {"name": "refusing", "url": "http://127.0.0.1:9/hook", "event_types": ["batch.completed"]}
    made = server.ask("POST", "/v1/webhook_endpoints", hook).json["id"]
    page = show("/webhooks")
    page.route("**/test", lambda route: route.fulfill(json={"status_code": 404}))
    page.route("**/deliveries?*", lambda route: route.fulfill(json={"data": [delivery], "has_more": False}))
    page.get_by_role("button", name="Test").click()
    expect(page.get_by_role("alert")).to_contain_text("refusing answered 404.")
    page.get_by_role("button", name="Deliveries").click()
    lines = page.get_by_role("complementary", name="Deliveries").locator("li")
    expect(lines).to_contain_text("2 attempts · answered 404 · next")
    lines.get_by_role("link").click()
    expect(page.locator(".work-name a")).to_have_text(["told.csv"])
    server.ask("DELETE", f"/v1/webhook_endpoints/{made}")

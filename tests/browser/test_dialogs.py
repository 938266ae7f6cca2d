"""Dialogs: nothing in them is lost by a stray click, a drag or a key."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Locator, Page, Route, expect

from tests.support.browser import WatchedPage
from tests.support.server import ServerProcess

GROUND = (20, 400)
"""A place outside of every dialog."""


@pytest.fixture
def hook(server: ServerProcess) -> Iterator[str]:
    """Id of a webhook that no other test knows."""
    asked = {"event_types": ["batch.failed"], "name": "dialogs", "url": "http://127.0.0.1:9/"}
    made = server.ask("POST", "/v1/webhook_endpoints", asked)
    assert made.status == 200, made.content
    yield made.json["id"]
    server.ask("DELETE", f"/v1/webhook_endpoints/{made.json['id']}")


def drag_out(page: Page, of: Locator) -> None:
    """Select from the middle of something to a place outside of the dialog, as one selects text."""
    box = of.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(*GROUND, steps=3)
    page.mouse.up()


@pytest.mark.usefixtures("hook")
def test_a_secret_is_shown_until_it_is_kept(show: Callable[[str], Page]) -> None:
    page = show("/webhooks")
    page.get_by_role("button", name="New secret for dialogs").click()
    page.get_by_role("dialog").get_by_role("button", name="Make a new secret").click()
    secret = page.locator("[data-secret]")
    expect(secret).to_contain_text("whsec_")
    expect(secret).to_be_visible()  # its dialog opens a moment after it is there
    dialog = page.get_by_role("dialog")
    drag_out(page, secret)
    page.mouse.click(*GROUND)
    for _ in range(3):  # a browser lets a page refuse the first only
        page.keyboard.press("Escape")
        expect(dialog).to_have_attribute("open", "")
    expect(dialog.get_by_role("button", name="Close")).to_have_count(0)
    expect(secret).to_contain_text("whsec_")
    page.get_by_role("button", name="I have kept it").click()
    expect(dialog).to_have_count(0)


def test_a_drag_out_of_a_form_keeps_what_was_written(show: Callable[[str], Page]) -> None:
    page = show("/webhooks")
    page.get_by_role("button", name="New webhook").first.click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name").fill("half-written")
    drag_out(page, dialog.get_by_label("Name"))
    expect(dialog.get_by_label("Name")).to_have_value("half-written")
    page.mouse.click(*GROUND)
    expect(dialog).to_have_count(0)


def test_a_question_stays_until_what_it_asked_for_is_done(
    show: Callable[[str], Page], watched: WatchedPage, hook: str
) -> None:
    watched.allow("status of 503")
    page = show("/webhooks")
    held: list[Route] = []
    page.route(f"**/v1/webhook_endpoints/{hook}", lambda route: held.append(route))
    page.get_by_role("button", name="Delete dialogs").click()
    dialog = page.get_by_role("dialog")
    with page.expect_request(f"**/v1/webhook_endpoints/{hook}"):
        dialog.get_by_role("button", name="Delete", exact=True).click()
    expect(dialog.get_by_role("button", name="Back")).to_be_disabled()
    for _ in range(3):
        page.keyboard.press("Escape")
    page.mouse.click(*GROUND)
    expect(dialog).to_contain_text("Delete this webhook?")
    held[0].fulfill(status=503, json={"error": {"message": "The database is away."}})
    expect(dialog.get_by_role("alert")).to_have_text("The database is away.")
    dialog.get_by_role("button", name="Close").click()
    expect(dialog).to_have_count(0)


def test_a_form_stays_until_it_is_answered(show: Callable[[str], Page], watched: WatchedPage) -> None:
    watched.allow("status of 503")
    page = show("/webhooks")
    held: list[Route] = []
    page.get_by_role("button", name="New webhook").first.click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name").fill("slow")
    dialog.get_by_label("Address").fill("http://127.0.0.1:9/")
    page.route("**/v1/webhook_endpoints", lambda route: held.append(route))
    with page.expect_request("**/v1/webhook_endpoints"):
        dialog.get_by_role("button", name="Make the webhook").click()
    expect(dialog.get_by_role("button", name="Back")).to_be_disabled()
    page.keyboard.press("Escape")
    page.mouse.click(*GROUND)
    held[0].fulfill(status=503, json={"error": {"message": "The database is away."}})
    expect(dialog.get_by_role("alert")).to_have_text("The database is away.")
    expect(dialog.get_by_label("Name")).to_have_value("slow")

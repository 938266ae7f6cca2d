"""`make screenshots`: every page of the console, light and dark, wide and narrow, into docs/console/.

A server with keys, two workers and a mock upstream gets some days' worth of work in a minute; a job is under way while
the pictures are taken, so that figures and charts move.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from PIL import Image
from playwright.sync_api import Browser, BrowserContext, Page, expect
from psycopg.conninfo import make_conninfo

from penstock.db.embedded import postgres
from penstock.db.migrate import migrate
from tests.support.batch_api import ENDPOINT
from tests.support.browser import chromium
from tests.support.server import ServerProcess
from tests.support.tenants import TenantGround, form, tenant_ground
from tests.support.wait import wait_until

TARGET = Path(__file__).parents[1] / "docs" / "console"
SIZES = {"1440": {"width": 1440, "height": 900}, "390": {"width": 390, "height": 844}}
SCHEMES = ("light", "dark")
DEADLINE_S = 120.0
EXACT_COLOURS = 128

PROCESSORS = '''
import hashlib, time
import penstock

def price(item):
    """A look-up that takes a moment, finds most, and is told that some are sold out."""
    number = int(hashlib.sha256(str(item.body["sku"]).encode()).hexdigest(), 16)
    time.sleep(0.004)
    if number % 41 == 0:
        raise penstock.NotFound("no offer for this article")
    if number % 29 == 0:
        raise penstock.Fail(f"article {item.body['sku']} is sold out", code="sold_out")
    return {"price": 9 + number % 400 / 4, "currency": "EUR", "seller": ["Nordlicht", "Mare", "Okular"][number % 3]}
'''
CONFIG = """
pending_dashboard = true
[[processors]]
name = "price"
function = "shop_prices:price"
"""
BRANDS = ("Nordlicht", "Ahorn & Co", "Mare", "Linde", "Fjell", "Okular")
THINGS = (
    "Oak chair",
    "Desk lamp",
    "Wool blanket",
    "Shelf, 4 boards",
    "Teapot",
    "Standing desk",
    "Rug 160 × 230",
    "Mirror",
)
COLOURS = ("natural", "black", "sand", "moss", "smoke")


def articles(count: int, seed: int) -> bytes:
    draw = random.Random(seed)
    lines = ["sku,title,brand,weight_kg"]
    for number in range(1, count + 1):
        title = f"{draw.choice(THINGS)} {draw.choice(COLOURS)}".replace(",", "")
        lines.append(f"{10_000 + number},{title},{draw.choice(BRANDS)},{draw.randrange(2, 400) / 10}")
    return "\n".join([*lines, ""]).encode()


def questions(count: int) -> bytes:
    lines = []
    for number in range(count):
        messages = [{"role": "user", "content": f"Summarise review {number} in a sentence."}]
        body = {"model": "qwen-32b", "messages": messages}
        lines.append(json.dumps({"custom_id": f"review-{number:05}", "method": "POST", "url": ENDPOINT, "body": body}))
    return "\n".join([*lines, ""]).encode()


@dataclass
class World:
    """Work to be looked at: ids by what they are."""

    ground: TenantGround
    ids: dict[str, str]

    @property
    def server(self) -> ServerProcess:
        return self.ground.server


def start_job(ground: TenantGround, content: bytes, filename: str, spec: dict[str, Any]) -> str:
    body, kind = form({"spec": json.dumps(spec), "file": content}, filename)
    found: str = ground.ok("ops", "POST", "/api/jobs", body, headers={"content-type": kind})["jobId"]
    return found


CATEGORIES = {
    "type": "chat",
    "provider": "default",
    "model": "qwen-32b",
    "prompt": "Which category is {{ title }} by {{ brand }}?",
    "schema": {
        "type": "object",
        "properties": {
            "category": {"enum": ["Furniture", "Lighting", "Textiles", "Kitchen", "Decoration"]},
            "room": {"enum": ["Living room", "Bedroom", "Study", "Kitchen"]},
            "confidence": {"type": "integer", "minimum": 61, "maximum": 99},
        },
        "required": ["category", "room", "confidence"],
    },
}


def furnish(ground: TenantGround) -> World:
    """Work in every state, finished but for one job that is under way for as long as pictures are taken."""
    prices = start_job(ground, articles(1_200, 1), "articles-november.csv", {"processor": "price", "jobType": "prices"})
    batch = ground.start("ops", questions(800), metadata={"name": "reviews"})
    ground.until("ops", f"/api/jobs/{prices}", "state", "DONE")
    ground.until("ops", f"/v1/batches/{batch}", "status", "completed")
    spec = {"processor": "price", "jobType": "prices"}
    paused = start_job(ground, articles(3_000, 2), "spring-catalogue.csv", spec)
    wait_until(lambda: ground.ok("ops", "GET", f"/api/jobs/{paused}")["processed"] > 300, DEADLINE_S)
    ground.ok("ops", "POST", f"/api/jobs/{paused}/pause")
    cancelled = start_job(ground, articles(900, 3), "samples.csv", spec)
    wait_until(lambda: ground.ok("ops", "GET", f"/api/jobs/{cancelled}")["processed"] > 100, DEADLINE_S)
    ground.ok("ops", "POST", f"/api/jobs/{cancelled}/cancel")
    for session, texts in {
        "support-4711": ("Where is my order?", "It should have come on Monday.", "Thank you!"),
        "support-4712": ("Can I change the colour?", "Moss, please."),
        "onboarding-anna": ("What do I do first?",),
    }.items():
        for text in texts:
            send(ground, session, text)
    for name in ("warehouse", "reporting"):
        hook = {"event_types": ["batch.completed", "batch.failed"], "name": name, "url": f"http://127.0.0.1:9/{name}"}
        ground.ok("ops", "POST", "/v1/webhook_endpoints", hook)
    with psycopg.connect(ground.database, autocommit=True) as connection:
        # Addresses as people have them. They need not resolve here: nothing is sent to them.
        connection.execute("UPDATE penstock.webhook_endpoints SET url = 'https://hooks.example.net/' || name")
    running = start_job(
        ground, articles(200_000, 4), "products.csv", {"processor": CATEGORIES, "jobType": "categories"}
    )
    wait_until(lambda: ground.ok("ops", "GET", f"/api/jobs/{running}")["processed"] > 1_500, DEADLINE_S)
    return World(ground, {"prices": prices, "batch": batch, "paused": paused, "running": running})


def send(ground: TenantGround, session: str, text: str) -> None:
    body = {"model": "qwen-32b", "messages": [{"role": "user", "content": text}]}
    asked = {"endpoint": ENDPOINT, "body": body}
    ground.ok("ops", "POST", f"/v1/sessions/{session}/requests", asked)


@contextmanager
def running_world() -> Iterator[World]:
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        (directory / "shop_prices.py").write_text(PROCESSORS)
        (directory / "penstock.toml").write_text(CONFIG)
        path = os.pathsep.join(filter(None, (scratch, os.environ.get("PYTHONPATH"))))
        mock = ("--latency", "~120ms", "--reject-rate", "0.01", "--seed", "3", "--tokens", "20..90", "--capacity", "40")
        with postgres.acquire(directory / "postgres") as database:
            prepare_template(database.conninfo)
            with tenant_ground(
                directory,
                database.conninfo,
                *("--config", directory / "penstock.toml"),
                mock=mock,
                tenants={"ops": "admin", "catalogue": "user", "reports": "user"},
                env={"PYTHONPATH": path},
                workers=2,
            ) as ground:
                yield furnish(ground)


def prepare_template(conninfo: str) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE DATABASE template_penstock")
    migrate(make_conninfo(conninfo, dbname="template_penstock"))


# -- the pages


def fill_new_job(page: Page) -> None:
    file = {"name": "articles-november.csv", "mimeType": "text/csv", "buffer": articles(400, 1)}
    page.get_by_label("File", exact=True).set_input_files(file)  # type: ignore[arg-type]
    page.get_by_label("Model").fill("qwen-32b")
    page.get_by_label("Prompt", exact=True).fill("Which category is {{ title }} by {{ brand }}?")
    expect(page.locator("[data-first-request]")).to_contain_text("Which category is")
    page.get_by_role("button", name="Try 10 rows").click()
    page.locator("[data-trial=DONE]").wait_for()
    page.evaluate("() => { scrollTo(0, 0); document.activeElement.blur() }")


def open_request(page: Page) -> None:
    page.get_by_role("button", name="Open request 2").click()


def wait_for_rows(page: Page) -> None:
    page.locator(".grid-row[data-index]:not([aria-busy])").first.wait_for()


def wait_for_chart(page: Page) -> None:
    page.locator("canvas").first.wait_for()


Prepare = Callable[[Page], object]


def pages(world: World) -> dict[str, tuple[str, Prepare]]:
    """Name of the picture: route, and what is done before it is taken."""
    running, prices, paused = (f"/work/{world.ids[name]}" for name in ("running", "prices", "paused"))
    table = Page.get_by_role
    return {
        "work": ("/", lambda page: table(page, "table").wait_for()),
        "job": (running, wait_for_rows),
        "job-row": (f"{prices}?row=5", lambda page: page.get_by_role("complementary").wait_for()),
        "job-charts": (f"{running}?tab=charts", wait_for_chart),
        "job-errors": (f"{prices}?tab=errors", lambda page: page.get_by_text("sold_out").first.wait_for()),
        "job-pending": (f"{paused}?tab=pending", wait_for_rows),
        "job-details": (f"{prices}?tab=details", lambda page: page.get_by_role("main").wait_for()),
        "batch": (f"/work/{world.ids['batch']}", wait_for_rows),
        "batch-errors": (
            f"/work/{world.ids['batch']}?tab=errors",
            lambda page: page.get_by_text("HTTP 400").first.wait_for(),
        ),
        "new": ("/new", lambda page: page.get_by_text("Drop a file here").wait_for()),
        "new-job": ("/new", fill_new_job),
        "pending": ("/pending", wait_for_rows),
        "sessions": ("/sessions", lambda page: table(page, "table").wait_for()),
        "session": ("/sessions/support-4711", lambda page: table(page, "table").wait_for()),
        "session-request": ("/sessions/support-4711", open_request),
        "workers": ("/workers", lambda page: table(page, "table").wait_for()),
        "providers": ("/providers", lambda page: table(page, "table").wait_for()),
        "webhooks": ("/webhooks", lambda page: table(page, "table").wait_for()),
        "keys": ("/keys", lambda page: table(page, "table").wait_for()),
    }


def take(page: Page, path: Path) -> None:
    expect(page.get_by_role("status", name="Loading")).to_have_count(0, timeout=1000 * DEADLINE_S)
    page.wait_for_timeout(500)  # for figures, charts and pictures to stand still
    page.screenshot(path=path, animations="disabled")
    with Image.open(path) as picture:
        with_palette(picture.convert("RGB")).save(path, optimize=True)


def with_palette(picture: Image.Image) -> Image.Image:
    """The picture in 256 colours, a third of its bytes: what is painted most is exact, the rest close enough."""
    counted = picture.getcolors(picture.width * picture.height) or []
    most = [colour for _, colour in sorted(counted, key=lambda each: each[0], reverse=True)[:EXACT_COLOURS]]
    rest = picture.quantize(256 - len(most), Image.Quantize.MAXCOVERAGE).getpalette() or []
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for colour in most if isinstance(colour, tuple) for part in colour] + rest)
    return picture.quantize(palette=palette, dither=Image.Dither.NONE)


def take_all(browser: Browser, world: World, wanted: set[str], target: Path) -> None:
    key = world.ground.keys["ops"]
    for scheme in SCHEMES:
        for size, viewport in SIZES.items():
            options: dict[str, Any] = {"viewport": viewport, "color_scheme": scheme, "locale": "en-GB"}
            context = browser.new_context(**options)
            sign_in(context, world.server.url, key, target / f"sign-in-{size}-{scheme}.png", wanted)
            for name, (route, prepare) in pages(world).items():
                if wanted and name not in wanted:
                    continue
                page = context.new_page()
                page.set_default_timeout(20_000)
                page.goto(f"{world.server.url}/console/#{route}")
                prepare(page)
                take(page, target / f"{name}-{size}-{scheme}.png")
                page.close()
            context.close()


def sign_in(context: BrowserContext, url: str, key: str, path: Path, wanted: set[str]) -> None:
    page = context.new_page()
    page.goto(f"{url}/console/")
    page.get_by_label("API key").fill(key)
    if not wanted or "sign-in" in wanted:
        take(page, path)
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("table").wait_for()
    page.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="make screenshots", description=__doc__)
    parser.add_argument("pages", nargs="*", help="names of pages, such as job; all without")
    parser.add_argument("--into", type=Path, default=TARGET)
    chosen = parser.parse_args()
    chosen.into.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with running_world() as world, chromium() as browser:
        take_all(browser, world, set(chosen.pages), chosen.into)
    print(f"{len(list(chosen.into.glob('*.png')))} pictures in {chosen.into}, {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

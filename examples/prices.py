"""A shop's price service, and a function that asks it for the price of each row.

`python prices.py 8091` serves `GET /prices/SKU` until it is interrupted. It knows most articles, and lets six calls a
second through: the rest is answered 429, with the time to come back.
"""

from __future__ import annotations

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from os import environ
from threading import Lock
from urllib.error import HTTPError
from urllib.request import urlopen

import penstock

SHOP = environ.get("SHOP", "http://127.0.0.1:8091")
PRICES = {1001: 89, 1002: 24.5, 1003: 59, 1005: 19.9, 1006: 249, 1007: 45, 1008: 79, 1010: 120}
CALLS_PER_SECOND = 6

_lock = Lock()
_calls: list[float] = []


def look_up(item: penstock.Item) -> dict[str, object]:
    """The price of a row's article: what it returns are the row's result columns."""
    try:
        with urlopen(f"{SHOP}/prices/{item.body['sku']}", timeout=10) as answer:
            return dict(json.load(answer))
    except HTTPError as error:
        if error.code == 404:
            raise penstock.NotFound("the shop has no such article") from None
        if error.code == 429:
            raise penstock.Retry("throttled", after=float(error.headers["Retry-After"])) from None
        raise  # any other failure is tried again


def admitted() -> bool:
    """Whether fewer calls than the limit came in the last second."""
    with _lock:
        now = time.monotonic()
        _calls[:] = [at for at in _calls if now - at < 1]
        if len(_calls) < CALLS_PER_SECOND:
            _calls.append(now)
            return True
        return False


class Shop(BaseHTTPRequestHandler):
    """The service."""

    def do_GET(self) -> None:
        sku = self.path.rpartition("/")[2]
        if not admitted():
            self.answer(429, {"error": "too many calls"}, {"Retry-After": "1"})
        elif sku.isdecimal() and int(sku) in PRICES:
            self.answer(200, {"price": PRICES[int(sku)], "currency": "EUR"})
        else:
            self.answer(404, {"error": "no such article"})

    def answer(self, status: int, body: dict[str, object], headers: dict[str, str] | None = None) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Shop).serve_forever()

"""`scripts/audit.py` against a database that gives made-up answers, and against none."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.tcp_server import bind

ROOT = Path(__file__).parents[3]
DEADLINE_S = 100


def advisory(name: str) -> dict[str, object]:
    """An advisory in the form of OSV: every version of the package is vulnerable, up to one that is not made yet."""
    events = [{"introduced": "0"}, {"fixed": "9999.1"}]
    affected = {"package": {"name": name, "ecosystem": "PyPI"}, "ranges": [{"type": "ECOSYSTEM", "events": events}]}
    return {"id": "PYSEC-0-0", "aliases": ["CVE-0-0"], "summary": "made up", "affected": [affected]}


@contextmanager
def database(*vulnerable: str, silent: bool = False) -> Iterator[str]:
    """The URL of a database in which these packages are vulnerable; if silent, it never answers."""
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))["package"]["name"]
            if silent:
                over.wait()
            answer = json.dumps({"vulns": [advisory(asked)]} if asked in vulnerable else {}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/query"
        finally:
            over.set()
            server.shutdown()
            thread.join()


def audit(url: str) -> tuple[int, str]:
    command = [sys.executable, str(ROOT / "scripts" / "audit.py"), "--vulnerability-service", "osv", "--osv-url", url]
    done = subprocess.run([*command, "--timeout", "2"], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_locked_packages_that_are_vulnerable_fail_the_check() -> None:
    with database("uv", "h11") as url:
        code, said = audit(url)
    assert code == 1
    first, second, total = said.splitlines()
    for name, line in (("uv", first), ("h11", second)):
        assert line.startswith(f"audit: {name} ")
        assert line.endswith("is vulnerable (PYSEC-0-0, CVE-0-0); fixed in 9999.1")
    assert total.endswith("locked packages looked up, 2 vulnerabilities found")


def test_packages_without_a_known_vulnerability_pass() -> None:
    with database() as url:
        code, said = audit(url)
    assert code == 0
    assert said.endswith("locked packages looked up, 0 vulnerabilities found\n")


@pytest.mark.parametrize("reachable", [False, True])
def test_without_an_answer_the_check_is_skipped_and_says_so(reachable: bool) -> None:
    if reachable:
        with database(silent=True) as url:
            code, said = audit(url)
    else:
        with bind() as nobody:
            code, said = audit(f"http://127.0.0.1:{nobody.getsockname()[1]}/v1/query")
    assert code == 0
    assert said.startswith("audit: skipped, as no advisory database answered (")
    assert said.count("\n") == 1

"""The wheel: whole, and described by a page that can be read where there is no repository around it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from email.message import Message
from email.parser import BytesParser
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.support.server import served

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    directory = tmp_path_factory.mktemp("wheel")
    # The build tool looks for its program on the path.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    build = f"import uv_build; uv_build.build_wheel({str(directory)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=ROOT, env=os.environ | {"PATH": path}, check=True)
    (built,) = directory.glob("*.whl")
    return ZipFile(built)


@pytest.fixture(scope="module")
def metadata(wheel: ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return BytesParser().parsebytes(wheel.read(name))


def test_every_file_of_the_package_is_in_the_wheel(wheel: ZipFile) -> None:
    files = [path for path in (ROOT / "src" / "penstock").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert {str(path.relative_to(ROOT / "src")) for path in files} <= set(wheel.namelist())
    assert {path.suffix for path in files} >= {".py", ".sql", ".typed"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel.namelist())


def test_the_description_has_no_link_into_the_repository(metadata: Message) -> None:
    description = metadata.get_payload()
    assert isinstance(description, str)
    assert description.startswith("# Penstock")
    targets = re.findall(r"\]\(([^)]*)\)|\]:\s*(\S+)|(?:href|src)=[\"']([^\"']*)", description)
    assert [target for found in targets for target in found if target and not target.startswith("https://")] == []


@pytest.fixture(scope="module")
def installed(wheel: ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has the wheel, and what it says it depends on."""
    environment = tmp_path_factory.mktemp("installed")
    uv = str(Path(sys.executable).with_name("uv"))
    subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, environment], check=True)
    locked = ("--constraint", ROOT / "requirements.lock")
    to = ("--system-certs", "--python", environment / "bin" / "python")
    subprocess.run((uv, "pip", "install", "--quiet", *to, *locked, str(wheel.filename)), check=True)
    return environment


def test_the_wheel_that_the_readme_names_is_the_one_that_is_built(wheel: ZipFile) -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    assert readme.count(f"install dist/{Path(str(wheel.filename)).name}") == 2


def test_the_library_is_imported_from_the_installed_wheel(installed: Path) -> None:
    command = (installed / "bin" / "python", "-c", "import penstock; print(penstock.map.__module__, penstock.__file__)")
    said = subprocess.run(command, check=True, capture_output=True, text=True, cwd=installed)
    module, path = said.stdout.split()
    assert module == "penstock.library.map"
    assert Path(path).is_relative_to(installed)


def test_the_installed_wheel_serves_every_asset_of_the_console(installed: Path, tmp_path: Path) -> None:
    """With a database that it brings."""
    (static,) = installed.glob("lib/python3*/site-packages/penstock/console/static")
    # A file that differs from the repository's: it is the installed one that is served. What was installed may be a
    # link into uv's cache.
    index = static / "index.html"
    content = index.read_bytes()
    index.unlink()
    index.write_bytes(content + b"<!-- installed -->")
    program = [str(installed / "bin" / "penstock")]
    with served(tmp_path, "--base-url", "http://127.0.0.1:9/v1", workers=0, program=program) as server:
        page = server.ask("GET", "/console/")
        assert page.content.endswith(b"<!-- installed -->")
        for path in static.rglob("*"):
            if path.is_file() and path.suffix != ".toml":
                name = path.relative_to(static).as_posix()
                answer = server.ask("GET", f"/console/static/{name}")
                assert (answer.status, answer.content) == (200, path.read_bytes()), name
        named = re.findall(rb'(?:href|src)="([^"]+)"|"(\./static/[^"]+)"', page.content)
        for reference in {(one or other).decode().removeprefix("./") for one, other in named}:
            assert server.ask("GET", f"/console/{reference.partition('#')[0]}").status == 200, reference


def test_what_the_code_leans_on_is_bounded(metadata: Message) -> None:
    bounded = {re.split(r"[^\w-]", line)[0] for line in metadata.get_all("Requires-Dist", []) if "<" in line}
    assert bounded >= {"httptools", "msgspec", "psycopg", "psycopg-pool", "starlette", "uvicorn"}

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


def test_what_the_code_leans_on_is_bounded(metadata: Message) -> None:
    bounded = {re.split(r"[^\w-]", line)[0] for line in metadata.get_all("Requires-Dist", []) if "<" in line}
    assert bounded >= {"httptools", "msgspec", "psycopg", "psycopg-pool", "starlette", "uvicorn"}

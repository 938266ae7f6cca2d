"""Fetch what the vendor.toml files name from npm, by package name and version, and write it beside them.

A file whose sha256 is recorded must come out the same; one without gets it recorded.
Needs `npm`; nothing else here does.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MANIFESTS = ("src/penstock/console/static/vendor/vendor.toml", "tests/browser/vendor/vendor.toml")
SPRITE = (
    '<svg xmlns="http://www.w3.org/2000/svg">\n'
    "<!-- lucide-static {version}, ISC: licences/lucide-static.txt -->\n"
    "{symbols}</svg>\n"
)
# As the icons of lucide are drawn; colour and size come from the page.
SYMBOL = (
    '<symbol id="{name}" viewBox="0 0 24 24" fill="none" stroke="currentColor" stroke-width="2" stroke-linecap="round"'
    ' stroke-linejoin="round">{shapes}</symbol>\n'
)


def main() -> int:
    for manifest in MANIFESTS:
        path = ROOT / manifest
        text = path.read_text("utf-8")
        for package in tomllib.loads(text)["package"]:
            with tempfile.TemporaryDirectory() as directory:
                for entry, content in contents(package, fetch(package, Path(directory))):
                    text = write(path, text, entry, content)
        path.write_text(text, "utf-8")
    return 0


def fetch(package: dict[str, Any], directory: Path) -> Path:
    """The unpacked package; npm compares it with the integrity that the registry states."""
    wanted = f"{package['name']}@{package['version']}"
    subprocess.run(["npm", "pack", "--silent", wanted], cwd=directory, check=True, stdout=subprocess.DEVNULL)  # noqa: S603, S607
    (packed,) = directory.glob("*.tgz")
    with tarfile.open(packed) as archive:
        archive.extractall(directory, filter="data")
    return directory / "package"


def contents(package: dict[str, Any], unpacked: Path) -> list[tuple[dict[str, str], bytes]]:
    found = [(entry, (unpacked / entry["from"]).read_bytes()) for entry in package["files"]]
    if sprite := package.get("sprite"):
        symbols = "".join(symbol(unpacked / "icons" / f"{name}.svg") for name in sprite["names"])
        found.append((sprite, SPRITE.format(version=package["version"], symbols=symbols).encode()))
    return found


def symbol(icon: Path) -> str:
    match = re.search(r"<svg[^>]*>(.*)</svg>", icon.read_text("utf-8"), re.DOTALL)
    assert match, icon  # noqa: S101
    return SYMBOL.format(name=icon.stem, shapes="".join(line.strip() for line in match[1].splitlines()))


def write(manifest: Path, text: str, entry: dict[str, str], content: bytes) -> str:
    """The manifest's text, with the file's sha256 in it; the file is written beside it."""
    digest = hashlib.sha256(content).hexdigest()
    recorded = entry.get("sha256")
    if recorded and recorded != digest:
        raise SystemExit(f"{entry['to']}: npm has {digest}, {manifest.relative_to(ROOT)} says {recorded}")
    target = manifest.parent / entry["to"]
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(content)
    if recorded:
        return text
    named = f'to = "{entry["to"]}"'
    return text.replace(named, f'{named}{", " if "from" in entry else chr(10)}sha256 = "{digest}"')


if __name__ == "__main__":
    sys.exit(main())

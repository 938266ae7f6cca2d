"""Check the types of the console's pages: TypeScript reads their JSDoc. Only for development, and the only use of it.

The libraries' own types come from npm, in the versions that vendor.toml names. Needs `npm`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

STATIC = Path(__file__).parents[1] / "src/penstock/console/static"
TYPESCRIPT = "typescript@7.0.2"
TYPES = {
    "preact": "preact/src/index.d.ts",
    "preact/hooks": "preact/hooks/src/index.d.ts",
    "@preact/signals": "@preact/signals/dist/signals.d.ts",
    "@preact/signals-core": "@preact/signals-core/dist/signals-core.d.ts",
    "htm": "htm/dist/htm.d.ts",
    "uplot": "uplot/dist/uPlot.d.ts",
}
OPTIONS = {
    "target": "es2024",
    "module": "esnext",
    "moduleResolution": "bundler",
    "lib": ["es2024", "dom", "dom.iterable"],
    "allowJs": True,
    "checkJs": True,
    "noEmit": True,
    "strict": True,
    "skipLibCheck": True,
    "types": [],
    "paths": {name: [f"./node_modules/{path}"] for name, path in TYPES.items()},
}


def main() -> int:
    packages = tomllib.loads((STATIC / "vendor/vendor.toml").read_text("utf-8"))["package"]
    wanted = [f"{package['name']}@{package['version']}" for package in packages if package["name"] in TYPES]
    with tempfile.TemporaryDirectory() as directory:
        config = {"compilerOptions": OPTIONS, "include": [f"{STATIC / 'app'}/**/*.js"]}
        (Path(directory) / "tsconfig.json").write_text(json.dumps(config))
        install = ["npm", "install", "--silent", "--no-save", "--ignore-scripts", TYPESCRIPT, *wanted]
        subprocess.run(install, cwd=directory, check=True, stdout=subprocess.DEVNULL)  # noqa: S603
        return subprocess.run(["node_modules/.bin/tsc", "-p", "."], cwd=directory, check=False).returncode  # noqa: S607


if __name__ == "__main__":
    sys.exit(main())

"""Look the locked packages up in an advisory database: exit code 1 if one of them is known to be vulnerable.

Where no database answers, nothing fails: one line says that the check was skipped. Options go to pip-audit:
`--vulnerability-service osv` asks another database, `--ignore-vuln ID` lets one vulnerability pass.
"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONNECT_TIMEOUT_S = 5
TIMEOUT_S = 60


def main(options: list[str]) -> int:
    command = [sys.executable, "-m", "pip_audit", "--format", "json", "--progress-spinner", "off"]
    command += ["--require-hashes", "--disable-pip", "--desc", "off", "--timeout", str(CONNECT_TIMEOUT_S)]
    for lock in ("bootstrap.lock", "requirements.lock"):
        command += ["--requirement", str(ROOT / lock)]
    certificates = ssl.get_default_verify_paths().cafile  # those of the system, as for the installation
    trust = {"REQUESTS_CA_BUNDLE": certificates} if certificates else {}
    try:
        done = subprocess.run(  # noqa: S603  (its options come from the command line)
            command + options, capture_output=True, text=True, timeout=TIMEOUT_S, env=trust | os.environ, check=False
        )
    except subprocess.TimeoutExpired:
        return skip(f"none within {TIMEOUT_S} s")
    if done.returncode not in (0, 1):
        print(done.stderr, end="", file=sys.stderr)
        return done.returncode
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except ValueError:  # with the exit code of vulnerabilities found
        said = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        return skip(said[0].partition(": ")[0].rpartition(".")[2])
    known = [package for package in packages if "vulns" in package]
    if not known:
        return skip("it knows none of the packages")
    found = [(package, vulnerability) for package in known for vulnerability in package["vulns"]]
    for package, vulnerability in found:
        names = ", ".join([vulnerability["id"], *vulnerability["aliases"]])
        fixed = ", ".join(vulnerability["fix_versions"]) or "no version yet"
        print(f"audit: {package['name']} {package['version']} is vulnerable ({names}); fixed in {fixed}")
    print(f"audit: {len(known)} of {len(packages)} locked packages looked up, {len(found)} vulnerabilities found")
    return 1 if found else 0


def skip(reason: str) -> int:
    print(f"audit: skipped, as no advisory database answered ({reason})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

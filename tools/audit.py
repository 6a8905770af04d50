"""`python -m tools.audit FOLDER`: known vulnerabilities of what is installed beside this Python, by pip-audit, which
`make FOLDER/.ready` puts into a venv there.

Ends with 1 where there is one that EXCEPTIONS does not name, and with 0, within seconds, where the advisories are out
of reach: then it says why nothing was compared.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import sysconfig
import threading
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException

# Advisories that do not concern us, by id, each with its reason.
EXCEPTIONS: Mapping[str, str] = {
    "CVE-2023-48022": "of Ray's dashboard and its jobs, which take no call without the token that Carrel sets",
}
# Our own package, and builds of torch that have no release of that name, are in no database.
OWN = "carrel"
# One of OSV's database: who answers otherwise is a mirror without advisories.
KNOWN = "https://api.osv.dev/v1/vulns/PYSEC-2018-28"
OPTIONS = ("--vulnerability-service", "osv", "--format", "json", "--desc", "off", "--progress-spinner", "off")
REACH_S = 5.0
# of some hundred packages, one request each
AUDIT_S = 600.0
NO_NETWORK = ("ConnectionError", "Max retries", "Temporary failure", "timed out", "Could not connect")


@dataclass(frozen=True)
class Verdict:
    """A text to print, and an exit code."""

    text: str
    exit_code: int


def judge(output: str, errors: str, exceptions: Mapping[str, str] = EXCEPTIONS) -> Verdict:
    """Judge pip-audit's JSON output and its stderr."""
    try:
        found = json.loads(output)["dependencies"]
    except (ValueError, KeyError, TypeError):
        last = (errors.strip().splitlines() or ["it said nothing"])[-1]
        if any(word in errors for word in NO_NETWORK):
            return Verdict(f"skipped: the advisories are out of reach ({last})", 0)
        return Verdict(f"pip-audit failed: {last}", 2)
    audited = [each for each in found if "vulns" in each]
    skipped = [each for each in found if "vulns" not in each and each["name"] != OWN]
    if not audited:
        return Verdict(f"skipped: there are advisories of none of {len(skipped)} packages within reach", 0)
    told = [f"not compared: {each['name']} ({each.get('skip_reason', 'no reason')})" for each in skipped]
    open_ones = 0
    for each in audited:
        for one in each["vulns"]:
            reason = next(
                (exceptions[id] for id in (one["id"], *one.get("aliases", ())) if id in exceptions), None
            )
            open_ones += reason is None
            fixed = ", ".join(one.get("fix_versions", ())) or "no release yet"
            told.append(
                f"{each['name']} {each['version']}: {one['id']}, mended in {fixed}; {reason or 'OPEN'}"
            )
    told.append(f"{len(audited)} packages compared, {open_ones} known vulnerabilities open")
    return Verdict("\n".join(told), int(open_ones > 0))


def out_of_reach(url: str = KNOWN, timeout_s: float = REACH_S) -> str | None:
    """Why no advisories are to be had; None: they are. Takes no longer than that, whatever a name's look-up takes."""
    told: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def look() -> None:
        try:
            with urllib.request.urlopen(url, timeout=timeout_s) as answer:
                found = json.load(answer).get("id")
            told.put(None if found else "who answers has no advisories")
        except (OSError, HTTPException, ValueError, AttributeError) as exc:
            told.put(str(exc) or type(exc).__name__)

    threading.Thread(target=look, daemon=True).start()
    try:
        return told.get(timeout=timeout_s)
    except queue.Empty:
        return f"no answer within {timeout_s:g} s"


def main(argv: Sequence[str]) -> int:
    """argv: the folder of pip-audit's venv."""
    if (reason := out_of_reach()) is not None:
        print(f"audit skipped: the advisories are out of reach ({reason})")
        return 0
    (folder,) = argv
    subprocess.run(["make", "--no-print-directory", f"{folder}/.ready"], check=True)
    command = [f"{folder}/bin/pip-audit", "--path", sysconfig.get_path("purelib"), *OPTIONS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=AUDIT_S)
    except subprocess.TimeoutExpired:
        print(f"audit skipped: the advisories were not all told within {AUDIT_S:g} s")
        return 0
    verdict = judge(done.stdout, done.stderr)
    print(verdict.text)
    return verdict.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

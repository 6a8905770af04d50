"""`python -m tools.audit AUDITOR`: known vulnerabilities of what is installed beside this Python, by pip-audit.

Ends with 1 where there is one that EXCEPTIONS does not name, and with 0 where the advisories are out of reach: then it
says why nothing was compared.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Advisories that do not concern us, by id, each with its reason.
EXCEPTIONS: Mapping[str, str] = {}
# Our own package, and builds of torch that have no release of that name, are no index's.
OWN = "carrel"
NO_NETWORK = ("ConnectionError", "Max retries", "Temporary failure", "timed out", "Could not connect")


@dataclass(frozen=True)
class Verdict:
    """What is told, and the exit code."""

    text: str
    exit_code: int


def judge(output: str, errors: str, exceptions: Mapping[str, str] = EXCEPTIONS) -> Verdict:
    """Of what pip-audit wrote as JSON, and on stderr."""
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
        return Verdict(
            f"skipped: the index within reach has advisories of none of {len(skipped)} packages", 0
        )
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


def main(argv: Sequence[str]) -> int:
    """argv: the path of pip-audit, which lives in an environment of its own."""
    packages = sysconfig.get_path("purelib")
    command = [*argv, "--path", packages, "--format", "json", "--desc", "off", "--progress-spinner", "off"]
    done = subprocess.run(command, capture_output=True, text=True)
    verdict = judge(done.stdout, done.stderr)
    print(verdict.text)
    return verdict.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

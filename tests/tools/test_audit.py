"""An audit fails on what is known and open, and says so where it compared nothing."""

from __future__ import annotations

import json

from tools.audit import Verdict, judge


def report(*dependencies: dict[str, object]) -> str:
    return json.dumps({"dependencies": dependencies, "fixes": []})


CLEAN = {"name": "one", "version": "1.0", "vulns": []}
BAD = {
    "name": "two",
    "version": "2.0",
    "vulns": [{"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["2.1"]}],
}
UNKNOWN = {"name": "three", "skip_reason": "Dependency not found on PyPI"}


def test_what_is_known_and_open_fails() -> None:
    found = judge(report(CLEAN, BAD, UNKNOWN), "")
    assert found.exit_code == 1
    assert "two 2.0: PYSEC-1, mended in 2.1; OPEN" in found.text
    assert "not compared: three" in found.text
    assert judge(report(CLEAN), "").exit_code == 0


def test_an_exception_has_a_reason() -> None:
    found = judge(report(BAD), "", {"CVE-1": "we never call it"})
    assert found.exit_code == 0
    assert "PYSEC-1, mended in 2.1; we never call it" in found.text


def test_what_could_not_be_compared_is_no_success_in_words() -> None:
    assert judge(report(UNKNOWN), "") == Verdict(
        "skipped: the index within reach has advisories of none of 1 packages", 0
    )
    assert judge("", "requests.exceptions.ConnectionError: no route").text.startswith(
        "skipped: the advisories"
    )
    assert judge("", "Traceback\nValueError: x") == Verdict("pip-audit failed: ValueError: x", 2)

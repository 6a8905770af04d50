"""Test which clocks are read: a clock that is set must move no deadline."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("carrel", "gateway", "gpu_worker", "kv_store")
# When something was made or logged, as clients are told; and until when a session is pinned, which is a date.
TELLS = {
    "carrel/evaluation/about.py",
    "carrel/process/log_lines.py",
    "gateway/rest/app.py",
    "gateway/rest/responses/endpoints.py",
    "gateway/plan_runner.py",
    "gpu_worker/store/traces.py",
    "kv_store/sessions.py",
}
WALL = re.compile(r"\btime\.time(_ns)?\b|datetime\.(now|utcnow)\b")


def test_deadlines_read_no_clock_that_can_be_set() -> None:
    found = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if WALL.search(path.read_text(encoding="utf-8"))
    }
    assert found == TELLS

"""The real server of tests/e2e and the scripted one of tests/gateway, which the tests of clients share."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "e2e"), str(TESTS / "gateway")]

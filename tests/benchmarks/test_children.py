"""Processes of a benchmark's own, and their end."""

from __future__ import annotations

import signal
import subprocess
import sys

from benchmarks.children import wait_or_kill


def test_what_does_not_end_is_killed() -> None:
    willing = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    assert willing.stdin is not None
    willing.stdin.close()
    wait_or_kill(willing, 60)
    assert willing.returncode == 0
    unwilling = subprocess.Popen(["sleep", "60"])
    wait_or_kill(unwilling, 0.01)
    assert unwilling.returncode == -signal.SIGKILL

"""The end of a process whose engine hangs: how, and when not."""

import faulthandler
import subprocess
import sys
from pathlib import Path

from waiting import PATIENCE, wait_until

from gpu_worker.service.hang_alarm import HangAlarm

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import time
from gpu_worker.service.hang_alarm import HangAlarm
alarm = HangAlarm({seconds})
# what is not expected to make progress yet
alarm.reset()
time.sleep({seconds} * 2)
alarm.start()
for _ in range(40):
    alarm.reset()
    time.sleep(0.02)
{then}
def hangs_in_a_kernel():
    time.sleep({patience})
hangs_in_a_kernel()
"""


def run(seconds, then=""):
    script = SCRIPT.format(seconds=seconds, then=then, patience=PATIENCE)
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_a_process_without_progress_ends_with_1_and_says_where_it_hung():
    ended = run(0.5)
    assert ended.returncode == 1
    assert "Timeout" in ended.stderr
    assert "hangs_in_a_kernel" in ended.stderr


def test_an_alarm_that_was_closed_or_is_off_ends_nothing():
    for seconds, then in ((0.2, "alarm.close()"), (0, "")):
        ended = run(seconds, f"{then}\ntime.sleep(0.5); raise SystemExit(7)")
        assert (ended.returncode, ended.stderr) == (7, "")


def test_an_alarm_that_finds_no_thread_ends_nothing_and_is_armed_later(monkeypatch, caplog):
    armed, errors = [], [RuntimeError("unable to start watchdog thread")]

    def arm(seconds, exit):
        if errors:
            raise errors.pop()
        armed.append(seconds)

    monkeypatch.setattr(faulthandler, "dump_traceback_later", arm)
    alarm = HangAlarm(0.04)
    alarm.start()
    assert "unable to start watchdog thread" in caplog.text
    wait_until(lambda: alarm.reset() or armed)
    alarm.close()

"""Work in a process of its own: its memory is its own, and free when it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from benchmarks.errors import BenchmarkError
from carrel.process.version import CHECKOUT

LAST_WORDS = 2000


def wait_or_kill(process: subprocess.Popen[Any], seconds: float) -> None:
    """Until a process that was told to end has ended; it is killed if it has not by then."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def answers_of(module: str, arguments: list[str], task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Run `python -m module`, give it `task` as JSON, and yield each line of its stdout, JSON too, as it comes.

    Closing the iterator ends the process. Raises BenchmarkError with its last words when it fails.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile("w+") as words:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=words,
            text=True,
            cwd=CHECKOUT,
            env=environment,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with process.stdin:
                process.stdin.write(json.dumps(task))
            for line in process.stdout:
                yield json.loads(line)
            code = process.wait()
        except BrokenPipeError:
            code = process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            process.stdout.close()
        if code:
            words.seek(0)
            raise BenchmarkError(f"{' '.join(arguments)} ended with {code}: {words.read()[-LAST_WORDS:]}")

"""A process in which grammars are tried before the worker itself compiles them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from gpu_worker.records import Grammar

# Of processor time, for one grammar.
TRIAL_SECONDS = 2.0

TOO_SLOW = "it takes too long to compile"
TOO_DEEP = "it is nested too deeply, or takes too much memory"


class Trial:
    """Started when it is first asked, and again after a grammar that ended it; it ends with this process. For one
    thread; any may close it."""

    def __init__(self, model: Path, eos_token_ids: tuple[int, ...], seconds: float = TRIAL_SECONDS) -> None:
        ids = ",".join(map(str, eos_token_ids))
        # it looks for modules where this process does
        python = [sys.executable, *(["-P"] if sys.flags.safe_path else []), "-m"]
        self._command = [*python, "gpu_worker.grammar.trial_process", str(model), ids, str(seconds)]
        self._process: subprocess.Popen[str] | None = None

    def reason(self, grammar: Grammar) -> str | None:
        """Why a grammar is refused; None: it can be compiled here, within bounds of time and memory."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps([grammar.kind.value, grammar.text]) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if answer:
            reason: str | None = json.loads(answer)
            return reason
        self._process = None
        status = process.wait()
        if status > 0:
            return f"it could not be tried: the process for that ended with {status}"
        return TOO_SLOW if status == -signal.SIGPROF else TOO_DEEP

    def close(self) -> None:
        """End the process, whatever it is at."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )

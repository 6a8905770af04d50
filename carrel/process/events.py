"""What a process tells its supervisor, or a person, while it starts and runs. Read by `carrel.serve.events`."""

from __future__ import annotations

import json
import sys
from typing import TextIO


class ProcessEvents:
    """One JSON object a line on stdout, or lines of text on stderr that begin with the process's name.

    `out` takes the place of stdout or stderr.
    """

    def __init__(self, process: str, is_json: bool, out: TextIO | None = None) -> None:
        self._process = process
        self._is_json = is_json
        self._out = out or (sys.stdout if is_json else sys.stderr)

    def progress(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` units of a stage; as text only the stage's end is told."""
        text = f"{stage}: done" if done >= total else ""
        self._write({"event": "progress", "stage": stage, "done": done, "total": total}, text)

    def ready(self, where: str) -> None:
        """Requests are taken from now on."""
        self._write({"event": "ready"}, f"ready on {where}")

    def status(self, text: str) -> None:
        """One line about what the process does."""
        self._write({"event": "status", "text": text}, text)

    def _write(self, event: dict[str, str | int], text: str) -> None:
        line = json.dumps(event) if self._is_json else text and f"{self._process}: {text}"
        if not line:
            return
        try:
            print(line, file=self._out, flush=True)
        except BrokenPipeError:
            # The reader is gone, and this process ends with its parent; say so where it may still be read.
            print(f"{self._process}: its events are not read", file=sys.stderr)

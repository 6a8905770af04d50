"""What the process tells its supervisor, or a person, while it starts and runs."""

from __future__ import annotations

import json
import sys
from typing import Protocol, TextIO


class ProcessEvents(Protocol):
    """Progress of the start, readiness, and a status line under load."""

    def progress(self, stage: str, done: int, total: int) -> None: ...

    def ready(self, listen: str) -> None: ...

    def status(self, text: str) -> None: ...


class JsonEvents:
    """One JSON object a line, flushed, on stdout by default."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = sys.stdout if out is None else out

    def progress(self, stage: str, done: int, total: int) -> None:
        self._write({"event": "progress", "stage": stage, "done": done, "total": total})

    def ready(self, listen: str) -> None:
        self._write({"event": "ready"})

    def status(self, text: str) -> None:
        self._write({"event": "status", "text": text})

    def _write(self, event: dict[str, str | int]) -> None:
        print(json.dumps(event), file=self._out, flush=True)


class PlainEvents:
    """Lines for a person, on stderr by default; of a stage only its end."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = sys.stderr if out is None else out

    def progress(self, stage: str, done: int, total: int) -> None:
        if done >= total:
            self._write(f"{stage}: done")

    def ready(self, listen: str) -> None:
        self._write(f"ready on {listen}")

    def status(self, text: str) -> None:
        self._write(text)

    def _write(self, text: str) -> None:
        print(f"gpu_worker: {text}", file=self._out, flush=True)

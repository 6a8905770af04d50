"""What the process tells its supervisor: one JSON object a line on stdout, or words on stderr."""

from __future__ import annotations

import json
import sys
from typing import Protocol, TextIO


class Events(Protocol):
    """Where progress goes."""

    def progress(self, stage: str, done: int, total: int) -> None: ...

    def status(self, text: str) -> None: ...

    def ready(self, where: str) -> None: ...


class JsonEvents:
    """For a supervisor; `stream` carries nothing else."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def progress(self, stage: str, done: int, total: int) -> None:
        self._write({"event": "progress", "stage": stage, "done": done, "total": total})

    def status(self, text: str) -> None:
        self._write({"event": "status", "text": text})

    def ready(self, where: str) -> None:
        self._write({"event": "ready"})

    def _write(self, event: dict[str, str | int]) -> None:
        try:
            print(json.dumps(event), file=self._stream, flush=True)
        except BrokenPipeError:
            # The reader is gone and the parent watch ends this process; say it where somebody may still read.
            print("kv_store: nobody reads --json-events", file=sys.stderr)


class TextEvents:
    """For a terminal."""

    def progress(self, stage: str, done: int, total: int) -> None:
        self.status(f"{stage} ({done}/{total})")

    def status(self, text: str) -> None:
        print(f"kv_store: {text}", file=sys.stderr, flush=True)

    def ready(self, where: str) -> None:
        self.status(f"ready on {where}")

"""What the process tells its supervisor, or a person."""

from __future__ import annotations

import json
import sys


class ProcessEvents:
    """One JSON object a line on stdout for a supervisor, or plain lines on stderr."""

    def __init__(self, is_json: bool) -> None:
        self._is_json = is_json

    def ready(self, text: str) -> None:
        """Requests are taken; `text` says where."""
        self._write({"event": "ready"}, text)

    def status(self, text: str) -> None:
        self._write({"event": "status", "text": text}, text)

    def _write(self, event: dict[str, str], text: str) -> None:
        if self._is_json:
            print(json.dumps(event), flush=True)
        else:
            print(f"gateway: {text}", file=sys.stderr, flush=True)

"""A server that speaks just enough of the OpenAI protocol, and remembers what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

USAGE = {
    "prompt_tokens": 30_000,
    "completion_tokens": 3,
    "total_tokens": 30_003,
    "carrel": {
        "policy": "pqcache",
        "budget_tokens": 3000,
        "context_tokens": 30_003,
        "cached_tokens": 0,
        "offloaded_tokens": 27_000,
        "attended_tokens": 3000.3,
        "hit_rate": 0.91,
        "bytes_moved": 1_500_000,
        "window_tokens": 3.0,
    },
}


@dataclass
class FakeServer:
    """Answers every chat with `pieces`; `status` and `error` refuse it; `is_endless` never ends the answer."""

    pieces: tuple[str, ...] = ("Forty", "-two", ".")
    status: int = 200
    error: dict[str, Any] = field(default_factory=dict)
    late_error: str = ""
    is_endless: bool = False
    api_key: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    disconnected: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    @contextmanager
    def running(self) -> Iterator[FakeServer]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                if fake.api_key and self.headers.get("Authorization") != f"Bearer {fake.api_key}":
                    self.reply(401, {"error": {"message": "wrong key", "code": "invalid_api_key"}})
                else:
                    self.reply(200, {"data": [{"id": "carrel-nano", "max_model_len": 32768}]})

            def do_POST(self) -> None:
                fake.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                if fake.status != 200:
                    self.reply(fake.status, {"error": fake.error})
                    return
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                self.wfile.write(b": heartbeat\n\n")
                try:
                    self.stream()
                except OSError:
                    fake.disconnected.set()

            def stream(self) -> None:
                for piece in fake.pieces:
                    self.event({"choices": [{"delta": {"content": piece}}]})
                while fake.is_endless and not fake.disconnected.wait(0.01):
                    self.event({"choices": [{"delta": {"content": "more "}}]})
                if fake.late_error:
                    self.event({"error": {"message": fake.late_error}})
                    return
                self.event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
                self.event({"choices": [], "usage": USAGE})
                self.wfile.write(b"data: [DONE]\n\n")

            def event(self, chunk: dict[str, Any]) -> None:
                self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
                self.wfile.flush()

            def reply(self, status: int, body: dict[str, Any]) -> None:
                payload = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            self.disconnected.set()
            server.shutdown()
            thread.join()
            server.server_close()

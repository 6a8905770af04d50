"""The gateway's own first request to a worker: what a first one loads, connects and caches is there for the user's."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace

from starlette.types import ASGIApp, Message

from gateway.config import GatewayConfig
from gateway.rest.app import create_app
from gateway.service import ChatService
from gateway.tokenizer import Tokenizer
from gateway.worker_client import WorkerClient
from gpu_worker.v1 import gpu_worker_pb2 as pb

# it may take this long; whoever asks meanwhile whether it has ended waits so long
LIMIT_S = 5.0
ASK_S = 0.5
PATH = "/v1/chat/completions"
# shorter than a slab of the store, so that none of it is kept; the salt is shared with nobody, if it were
BODY = {
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 1,
    "stream": True,
    "cache_salt": "carrel-first-request",
}

log = logging.getLogger(__name__)


class FirstRequest:
    """One chat of one token, streamed, through all of the gateway but its listener.

    It goes through a service of its own over the same worker: no metric, place, key or line of the request log (but at
    level debug) is the users'. The worker's counters count it. How it ends is nobody's concern.
    """

    def __init__(
        self, config: GatewayConfig, worker: WorkerClient, tokenizer: Tokenizer, defaults: pb.SamplingParams
    ) -> None:
        # inside the process nobody has a key, and writing the documentation once more takes the loop's time
        self._config = replace(
            config,
            api_keys=(),
            api_keys_file=None,
            allow_open=True,
            ssl_keyfile=None,
            ssl_certfile=None,
            disable_docs=True,
        )
        self._worker = worker
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._task: asyncio.Task[None] | None = None

    async def has_ended(self) -> bool:
        """Return whether the worker has answered it, well or not; the first call sends it."""
        if self._task is None:
            self._task = asyncio.create_task(self._send())
        done, _ = await asyncio.wait({self._task}, timeout=ASK_S)
        return bool(done)

    def forget(self) -> None:
        """The worker was lost; the next one gets its own."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _send(self) -> None:
        try:
            service = ChatService(
                self._config, self._worker, self._tokenizer, self._defaults, log_level=logging.DEBUG
            )
            async with asyncio.timeout(LIMIT_S):
                await _post(create_app(self._config, service), PATH, json.dumps(BODY).encode())
        except Exception:
            log.debug("the gateway's own first request failed", exc_info=True)


async def _post(app: ASGIApp, path: str, body: bytes) -> None:
    """A JSON body, from a client that stays connected and ignores the answer."""
    incoming: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not incoming:
            await asyncio.Event().wait()
        return incoming.pop()

    async def send(message: Message) -> None:
        pass

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": None,
        "server": None,
    }
    await app(scope, receive, send)

"""A deployed application, as its clients see it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from waiting import PATIENCE, wait_until

from carrel.sse import chunks

ROOT = Path(__file__).resolve().parents[3]
SMALL = (
    *("--arena-bytes", "256MiB", "--slot-memory", "512MiB", "--slab-bytes", "64KiB", "--hot-cache", "0.25"),
    "--no-warmup",
)

# More than any block of a test takes, and fewer than the bundled model's context.
ENDLESS = 30_000
RECALL = {"carrel": {"policy": "pqcache", "budget": 0.25}}


@dataclass
class Stream:
    """A completion as it arrives. `error` is the error frame, or "" of a stream that ended well or was left."""

    text: str = ""
    error: str = ""
    ended_at: float = 0.0
    has_begun: threading.Event = field(default_factory=threading.Event)
    is_left: threading.Event = field(default_factory=threading.Event)


class Service:
    """The deployed application."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.url = f"http://{host}:{port}"
        self._pool = ThreadPoolExecutor(32)

    def metrics(self) -> dict[str, float]:
        """Value by name and labels, as Prometheus text spells them."""
        text = httpx.get(f"{self.url}/metrics", timeout=PATIENCE).text
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}

    def num_serving(self) -> float:
        return self.metrics().get('carrel_cluster_replicas{state="serving"}', 0.0)

    def running_by_replica(self) -> list[float]:
        known = self.metrics()
        return [value for name, value in known.items() if name.startswith("carrel_cluster_replica_running")]

    def answer(self, question: str) -> str:
        """The answer of a chat of one message; the code of the error if there is none."""
        body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 16}
        reply = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=PATIENCE)
        if reply.status_code != 200:
            return str(reply.json()["error"]["code"])
        return str(reply.json()["choices"][0]["message"]["content"])

    def usage(self, prompt: str, **fields: Any) -> dict[str, Any]:
        """Return the usage of a completion."""
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 400, "ignore_eos": True, **fields}
        reply = httpx.post(f"{self.url}/v1/completions", json=body, timeout=PATIENCE)
        assert reply.status_code == 200, reply.text
        return dict(reply.json()["usage"])

    def completion(self, prompt: str, **fields: Any) -> tuple[str, int]:
        """Its text under a policy that recalls, and how many tokens of the prompt were not computed."""
        body = {"prompt": prompt, "temperature": 0, **RECALL, **fields}
        reply = httpx.post(f"{self.url}/v1/completions", json=body, timeout=PATIENCE)
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        details = answer["usage"]["prompt_tokens_details"]
        return str(answer["choices"][0]["text"]), int(details["cached_tokens"])

    def start(
        self, prompts: Sequence[str], num_tokens: int, **fields: Any
    ) -> list[tuple[Stream, Future[None]]]:
        """A stream for each prompt, all begun."""
        started = []
        for prompt in prompts:
            stream = Stream()
            body = {"prompt": prompt, "max_tokens": num_tokens, **fields}
            started.append((stream, self._pool.submit(self._read, body, stream)))
        for stream, _ in started:
            assert stream.has_begun.wait(PATIENCE)
        return started

    def run(self, prompts: Sequence[str], num_tokens: int) -> list[Stream]:
        return finish(self.start(prompts, num_tokens))

    @contextmanager
    def busy(self, prompts: Sequence[str], **fields: Any) -> Iterator[None]:
        """A stream for each prompt that goes on until the end of the block, where its client leaves it."""
        started = self.start(prompts, ENDLESS, **fields)
        try:
            yield
            assert not any(future.done() for _, future in started)
        finally:
            streams = leave(started)
        assert [stream.error for stream in streams] == [""] * len(started)
        until(lambda: not any(self.running_by_replica()), "nothing runs")

    def _read(self, body: dict[str, Any], stream: Stream) -> None:
        body = {**body, **RECALL, "temperature": 0, "stream": True, "ignore_eos": True}
        try:
            with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=PATIENCE) as reply:
                if reply.status_code != 200:
                    stream.error = str(json.loads(reply.read())["error"]["code"])
                    return
                for chunk in chunks(reply):
                    if stream.is_left.is_set():
                        return
                    if "error" in chunk:
                        stream.error = str(chunk["error"]["code"])
                    elif chunk["choices"]:
                        stream.text += chunk["choices"][0]["text"]
                        stream.has_begun.set()
        except httpx.HTTPError as exc:
            stream.error = repr(exc)
        finally:
            stream.ended_at = time.monotonic()
            stream.has_begun.set()


def finish(started: Sequence[tuple[Stream, Future[None]]]) -> list[Stream]:
    """The streams, all ended."""
    for _, future in started:
        future.result(PATIENCE)
    return [stream for stream, _ in started]


def leave(started: Sequence[tuple[Stream, Future[None]]]) -> list[Stream]:
    """The same, of streams that their clients leave now."""
    for stream, _ in started:
        stream.is_left.set()
    return finish(started)


def until(is_so: Callable[[], bool], what: str) -> None:
    wait_until(is_so, lambda: f"until {what}", poll=0.2)

"""Ray nodes on this machine with Carrel deployed on them, by the commands that a user would give."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[3]
WAIT_SECONDS = 240.0
SMALL = ("--arena-bytes", "256MiB", "--slot-memory", "512MiB", "--slab-bytes", "64KiB", "--hot-cache", "0.25")


@dataclass
class Stream:
    """A completion as it arrives. `error` is the error frame, or "" of a stream that ended well."""

    text: str = ""
    error: str = ""
    ended_at: float = 0.0
    has_begun: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class Nodes:
    """The Ray nodes, and what a command needs to reach them."""

    process: subprocess.Popen[str]
    address: str
    environment: Mapping[str, str]
    log: Path

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline().strip() == "done"

    def carrel(self, *arguments: str) -> str:
        """Run a command of `carrel`; its output."""
        ended = subprocess.run(
            [sys.executable, "-P", "-m", "carrel", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr + self.log.read_text()[-3000:]
        return ended.stdout

    def processes(self) -> list[psutil.Process]:
        """Everything that the nodes run: Ray's processes end up below others when their parents die."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("RAY_AUTH_TOKEN_PATH") == self.environment["RAY_AUTH_TOKEN_PATH"]:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def running(self, *words: str) -> list[psutil.Process]:
        """Of these, those that live and have all `words` in their command line."""
        found = []
        for process in self.processes():
            try:
                command = " ".join(process.cmdline())
                if process.status() != psutil.STATUS_ZOMBIE and all(word in command for word in words):
                    found.append(process)
            except psutil.Error:
                continue
        return found


@contextmanager
def ray_nodes(number: int) -> Iterator[Nodes]:
    """Nodes until the block ends; nothing of theirs is left then."""
    with tempfile.TemporaryDirectory(prefix="cr-", dir="/tmp") as folder:
        log = Path(folder) / "log"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with log.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tools.ray_nodes", str(number)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                cwd=folder,
            )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, log.read_text()[-3000:]
            about = json.loads(line)
            reach = {
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN_PATH": about["token_path"],
                "RAY_ADDRESS": about["address"],
            }
            nodes = Nodes(process, about["address"], {**environment, **reach}, log)
            yield nodes
        finally:
            process.stdin.close()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
            if "nodes" in locals():
                for left in nodes.processes():
                    left.kill()


class Service:
    """The deployed application."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._pool = ThreadPoolExecutor(32)

    def metrics(self) -> dict[str, float]:
        """Value by name and labels, as Prometheus text spells them."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
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
        reply = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=WAIT_SECONDS)
        if reply.status_code != 200:
            return str(reply.json()["error"]["code"])
        return str(reply.json()["choices"][0]["message"]["content"])

    def start(self, prompts: Sequence[str], num_tokens: int) -> list[tuple[Stream, Future[None]]]:
        """A stream for each prompt, all begun."""
        started = []
        for prompt in prompts:
            stream = Stream()
            started.append((stream, self._pool.submit(self._read, prompt, num_tokens, stream)))
        for stream, _ in started:
            assert stream.has_begun.wait(WAIT_SECONDS)
        return started

    def run(self, prompts: Sequence[str], num_tokens: int) -> list[Stream]:
        return finish(self.start(prompts, num_tokens))

    def _read(self, prompt: str, num_tokens: int, stream: Stream) -> None:
        body = {
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        recall = {"carrel": {"policy": "pqcache", "budget": 0.25}}
        try:
            with httpx.stream(
                "POST", f"{self.url}/v1/completions", json=body | recall, timeout=WAIT_SECONDS
            ) as reply:
                for line in reply.iter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    chunk = json.loads(line.removeprefix("data: "))
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
        future.result(WAIT_SECONDS)
    return [stream for stream, _ in started]


def until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.2)

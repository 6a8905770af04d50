"""A real `carrel serve` for the tests: three processes, CPU, the bundled model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import psutil
from ports import free_ports
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from waiting import PATIENCE, wait_until

from carrel.serve.banner import DOCUMENT
from gateway.v1 import chat_pb2_grpc
from gpu_worker.v1 import gpu_worker_pb2, gpu_worker_pb2_grpc
from kv_store.v1 import kv_store_pb2, kv_store_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
# Words that the questions of the tests have: what is asked is in no log, but for the banner's example.
ASKED = ("secret number", "Once upon a time", "boats came home")
NANO = ROOT / "models" / "carrel-nano"


@dataclass(frozen=True)
class Serving:
    """A running server: its addresses, its processes, and stubs to look behind the gateway."""

    process: subprocess.Popen[bytes]
    url: str
    grpc_target: str
    run: Path
    log: Path

    def store_stats(self) -> kv_store_pb2.StatsResponse:
        with grpc.insecure_channel(f"unix:{self.run}/kv_store.sock") as channel:
            return kv_store_pb2_grpc.KVStoreStub(channel).Stats(kv_store_pb2.StatsRequest(), timeout=10)

    def worker_stats(self) -> gpu_worker_pb2.StatsResponse:
        with grpc.insecure_channel(f"unix:{self.run}/gpu_worker.sock") as channel:
            return gpu_worker_pb2_grpc.GPUWorkerStub(channel).Stats(gpu_worker_pb2.StatsRequest(), timeout=10)

    def samples(self) -> list[Sample]:
        """Return what /metrics has of all three processes."""
        text = httpx.get(f"{self.url}/metrics", timeout=PATIENCE).text
        return [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def metrics(self) -> dict[str, float]:
        return {sample.name: sample.value for sample in self.samples()}

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=600)

    def stream(self, text: str, max_tokens: int, **carrel: Any) -> openai.Stream:
        """Return a chat that goes on for so many tokens, and has begun."""
        stream = self.openai().chat.completions.create(
            model="carrel-nano",
            messages=[{"role": "user", "content": text}],
            max_tokens=max_tokens,
            stream=True,
            extra_body={"ignore_eos": True, "carrel": carrel},
        )
        for _, chunk in zip(range(4), stream, strict=False):
            assert chunk.choices
        return stream

    def chat_stub(self, channel: grpc.Channel) -> chat_pb2_grpc.ChatStub:
        return chat_pb2_grpc.ChatStub(channel)

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, module: str) -> psutil.Process:
        """The process that runs `python -m module`."""
        return next(process for process in self.descendants() if module in process.cmdline())

    def actors(self, kind: str) -> list[psutil.Process]:
        """Return Ray's actors of this class: `StoreActor` or `TrainerActor`."""
        return [each for each in self.descendants() if kind in "".join(each.cmdline())]

    def listening(self) -> set[str]:
        """The addresses at which any of them takes TCP connections."""
        found = set()
        for process in (psutil.Process(self.process.pid), *self.descendants()):
            with suppress(psutil.Error):
                sockets = process.net_connections(kind="tcp")
                found |= {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}
        return found

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)


@contextmanager
def serving(*arguments: str, arena: str = "1GiB", model: Path = NANO) -> Iterator[Serving]:
    """`carrel serve` with the bundled model, or another, until the block ends; killed with all its children if it will
    not stop."""
    base = Path(tempfile.mkdtemp(prefix="ce-", dir="/tmp"))
    port, grpc_port = free_ports(2)
    log = base / "log"
    command = [
        *(sys.executable, "-m", "carrel", "serve", str(model)),
        *("--port", str(port), "--grpc-port", str(grpc_port), "--trainers", "1"),
        *("--arena-bytes", arena, "--slot-memory", "1GiB", "--hot-cache", "0.25", *arguments),
    ]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(base), "CUDA_VISIBLE_DEVICES": ""}
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
    try:
        wait_ready(process, f"http://127.0.0.1:{port}/ready", log)
        run = next(path for path in base.iterdir() if path.is_dir() and path.name.startswith("carrel-"))
        server = Serving(process, f"http://127.0.0.1:{port}", f"127.0.0.1:{grpc_port}", run, log)
        yield server
        said = [line for line in log.read_text().splitlines() if DOCUMENT not in line]
        assert not [line for line in said if any(word in line for word in ASKED)]
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                for child in children:
                    child.kill()
        log.unlink(missing_ok=True)
        leftovers = [path.name for path in base.iterdir()]
        base.rmdir() if not leftovers else None


def wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    def is_ready() -> bool:
        if process.poll() is not None:
            raise AssertionError(f"carrel serve ended with {process.returncode}:\n{log.read_text()[-4000:]}")
        try:
            return httpx.get(url, timeout=PATIENCE).status_code == 200
        except httpx.HTTPError:
            return False

    wait_until(is_ready, lambda: log.read_text()[-4000:], poll=0.2)


def is_left(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def is_healthy(client: httpx.Client) -> bool:
    """Return whether the client's server, or the proxy in front, answers."""
    try:
        return client.get("/health").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False

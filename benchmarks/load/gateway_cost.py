"""Processor time of a real gateway, by what its requests hold: a worker without a model stands behind it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import httpx
import psutil

from benchmarks.children import wait_or_kill
from benchmarks.errors import BenchmarkError
from carrel.process.version import CHECKOUT
from carrel.serve.endpoints import held_port

START_S = 60.0
STOP_S = 10.0
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class GatewayLevel:
    """`num_requests` chats with a prompt of `words` words, answered with `output_tokens`; `concurrency` at once."""

    words: int
    output_tokens: int
    num_requests: int
    concurrency: int


@dataclass(frozen=True)
class GatewayRow:
    """Cost of a level for the gateway: processor time over all its threads. prompt_tokens: of one request."""

    level: GatewayLevel
    prompt_tokens: int
    cpu_s: float
    duration_s: float

    @property
    def cpu_ms(self) -> float:
        """Processor time of one request."""
        return 1000 * self.cpu_s / self.level.num_requests


@dataclass(frozen=True)
class GatewayCost:
    """Processor time in microseconds: of a request by itself, of a token of its prompt, of a token of its answer."""

    request_us: float
    prompt_token_us: float
    output_token_us: float

    @classmethod
    def of(cls, plain: GatewayRow, answered: GatewayRow, prompted: GatewayRow) -> GatewayCost:
        """From three levels: `answered` has longer answers than `plain`, `prompted` longer prompts."""
        output_us = (
            1000
            * (answered.cpu_ms - plain.cpu_ms)
            / (answered.level.output_tokens - plain.level.output_tokens)
        )
        prompt_us = 1000 * (prompted.cpu_ms - plain.cpu_ms) / (prompted.prompt_tokens - plain.prompt_tokens)
        rest = 1000 * plain.cpu_ms - prompt_us * plain.prompt_tokens - output_us * plain.level.output_tokens
        return cls(max(0.0, rest), prompt_us, output_us)

    @property
    def output_tokens_per_s(self) -> float:
        """Tokens that one core streams, without prompts."""
        return 1e6 / self.output_token_us


@dataclass(frozen=True)
class Gateway:
    """A running gateway, and its process."""

    url: str
    process: psutil.Process

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)


@contextmanager
def running_gateway(model: Path, step_ms: float) -> Iterator[Gateway]:
    """Raises BenchmarkError when it does not come up."""
    with (
        held_port("127.0.0.1", 0, "--port") as port,
        tempfile.TemporaryDirectory(prefix="carrel-gateway-") as folder,
    ):
        address = f"unix:{folder}/worker.sock"
        worker = _start("benchmarks.load.paced_worker", address, str(step_ms))
        gateway = None
        try:
            assert worker.stdout is not None
            if not worker.stdout.readline():
                raise BenchmarkError("the worker without a model did not start")
            told = ("--model", str(model), "--worker", address, "--port", str(port), "--grpc-port", "0")
            gateway = _start("gateway", *told, "--log-level", "warning")
            url = f"http://127.0.0.1:{port}"
            _wait_ready(url, gateway)
            yield Gateway(url, psutil.Process(gateway.pid))
        finally:
            for process in filter(None, (gateway, worker)):
                process.terminate()
                wait_or_kill(process, STOP_S)


def measure(
    gateway: Gateway, level: GatewayLevel, words: Sequence[str], seed: str, answered: Callable[[], None]
) -> GatewayRow:
    """Run one level; a few of its requests go first and are not counted. `words`: prompts are drawn from them.

    Raises BenchmarkError.
    """

    async def run() -> GatewayRow:
        async with httpx.AsyncClient(
            base_url=gateway.url,
            timeout=TIMEOUT_S,
            trust_env=False,
            limits=httpx.Limits(max_connections=level.concurrency),
        ) as client:
            prompts = [
                " ".join(Random(f"{seed}:{index}").choices(words, k=level.words))
                for index in range(level.num_requests)
            ]
            counted = await client.post(
                "/tokenize", json={"messages": [{"role": "user", "content": prompts[0]}]}
            )
            counted.raise_for_status()
            await _ask_all(client, prompts[: level.concurrency], level, lambda: None)
            before, begin = gateway.cpu_s(), time.perf_counter()
            await _ask_all(client, prompts, level, answered)
            took_s = time.perf_counter() - begin
            return GatewayRow(level, counted.json()["count"], gateway.cpu_s() - before, took_s)

    try:
        return asyncio.run(run())
    except httpx.HTTPError as exc:
        raise BenchmarkError(f"the gateway failed: {type(exc).__name__}: {exc}") from exc


async def _ask_all(
    client: httpx.AsyncClient, prompts: list[str], level: GatewayLevel, answered: Callable[[], None]
) -> None:
    waiting = iter(prompts)

    async def ask() -> None:
        for prompt in waiting:
            body = {
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": level.output_tokens,
                "ignore_eos": True,
                "stream": True,
            }
            async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                response.raise_for_status()
                async for _ in response.aiter_raw():
                    pass
            answered()

    await asyncio.gather(*(ask() for _ in range(level.concurrency)))


def _start(module: str, *arguments: str) -> subprocess.Popen[str]:
    # the worker ends with its stdin
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=CHECKOUT,
    )


def _wait_ready(url: str, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        try:
            if httpx.get(f"{url}/ready", trust_env=False).status_code == httpx.codes.OK:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise BenchmarkError("the gateway did not come up")

"""`carrel serve` with the three real processes and the bundled model: starts, answers, ends, leaves nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ports import free_port
from waiting import PATIENCE

from carrel.cli import main
from carrel.serve.model import BUNDLED

ROOT = Path(__file__).resolve().parents[2]
KEY = "tell-nobody"

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not (BUNDLED / "model.safetensors").exists(), reason="the bundled model is not here"),
]


class Server:
    """A running `carrel serve`, read line by line."""

    def __init__(self, *arguments: str) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self.lines: list[str] = []
        self._is_ready = threading.Event()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "carrel", "serve", "--port", self.url.rpartition(":")[2], *arguments],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "CARREL_API_KEY": KEY, "OMP_NUM_THREADS": "1"},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if line.startswith("ready "):
                self._is_ready.set()
        # an early end must not be waited for
        self._is_ready.set()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_ready(self) -> None:
        assert self._is_ready.wait(PATIENCE), self.text
        assert self.process.poll() is None, self.text

    def processes(self) -> list[psutil.Process]:
        """All below it."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        code = self.process.wait(PATIENCE)
        self._reader.join(timeout=PATIENCE)
        return code


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server("--hot-cache", "0.25", "--arena-bytes", "256MiB", "--trainers", "1", "--grpc-port", "0")
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()


def test_a_life(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.wait_ready()
    processes = server.processes()
    assert len(processes) >= 3
    words = [word for process in processes for word in process.cmdline()]
    listens = next(word for word in words if word.endswith("kv_store.sock"))
    folder = Path(listens.removeprefix("unix:")).parent
    assert folder.stat().st_mode & 0o777 == 0o700

    book = tmp_path / "book.txt"
    filler = "The library was quiet and the rain went on against the tall windows. " * 150
    book.write_text(f"{filler}The secret number of the amber fox is 48213. {filler}")
    question = "What is the secret number of the amber fox?"
    chat = ["chat", "--url", server.url, "--file", str(book), "--question", question]
    options = ["--policy", "pqcache", "--budget", "0.1", "--max-tokens", "16", "--temperature", "0"]
    assert main([*chat, *options, "--api-key", KEY]) == 0
    answer, cost = capsys.readouterr()
    assert answer.strip()
    assert re.search(r"tokens\s+attended\s+\(\d+%,\s+pqcache\)", cost)

    assert server.stop(signal.SIGTERM) == 0, server.text
    assert not any(process.is_running() for process in processes)
    assert not folder.exists()
    assert KEY not in server.text
    assert "api-key = ***" in server.text
    assert "Traceback" not in server.text

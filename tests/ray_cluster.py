"""Ray nodes on this machine, for benchmarks and tests; Carrel is deployed by its own command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.children import wait_or_kill
from benchmarks.errors import BenchmarkError
from carrel.process.version import CHECKOUT

WAIT_SECONDS = 240.0
STOP_SECONDS = 60.0

PROXY_PATIENCE = ("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S")


def living_with(words: Collection[str], processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the live processes that have all `words` in their command line."""
    found = []
    for process in processes:
        try:
            command = " ".join(process.cmdline())
            if process.status() != psutil.STATUS_ZOMBIE and all(word in command for word in words):
                found.append(process)
        except psutil.Error:
            continue
    return found


@dataclass(frozen=True)
class Nodes:
    """The Ray nodes, and what a command needs to reach them."""

    process: subprocess.Popen[str]
    address: str
    environment: Mapping[str, str]
    log: Path

    def tell(self, command: str) -> None:
        """Give tools/ray_nodes.py a command. Raises BenchmarkError when it did not do it."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(command + "\n")
        stdin.flush()
        if stdout.readline().strip() != "done":
            raise BenchmarkError(f"{command}: {self.log.read_text()[-3000:]}")

    def carrel(self, *arguments: str) -> str:
        """Run a command of `carrel`; its output. Raises BenchmarkError."""
        ended = subprocess.run(
            [sys.executable, "-P", "-m", "carrel", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
            check=False,
        )
        if ended.returncode:
            raise BenchmarkError(f"carrel {arguments[0]}: {ended.stderr}{self.log.read_text()[-3000:]}")
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
        """Return the cluster's live processes that have all `words` in their command line."""
        return living_with(words, self.processes())


@contextmanager
def ray_nodes(number: int, cpus: int = 2) -> Iterator[Nodes]:
    """Nodes of so many cores, as Ray counts, until the block ends; nothing of theirs is left then."""
    with tempfile.TemporaryDirectory(prefix="cr-", dir="/tmp") as folder:
        log = Path(folder) / "log"
        environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
        # On a busy machine a proxy takes longer than the five seconds after which Serve kills it.
        environment |= dict.fromkeys(PROXY_PATIENCE, "60")
        with log.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tools.ray_nodes", str(number), "--cpus", str(cpus)],
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
            if not line:
                raise BenchmarkError(f"Ray did not start: {log.read_text()[-3000:]}")
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
            wait_or_kill(process, STOP_SECONDS)
            if "nodes" in locals():
                for left in nodes.processes():
                    left.kill()

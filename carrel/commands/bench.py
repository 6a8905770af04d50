"""`carrel bench`: starts one of the benchmarks beside this package, in a process of its own.

They import PyTorch and the worker's kernels, which this package never does.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from carrel.errors import CarrelError
from carrel.machine import require
from carrel.process.version import CHECKOUT

BENCHMARKS = {
    "decode": "decode step, throughput, memory and bytes moved, beside the minimal dense loop",
    "prefill": "time to the first and second token of a long prompt",
    "kernels": "every GPU kernel against its bytes and PyTorch",
    "gateway": "processor time that the gateway takes for requests and tokens",
    "serve": "load on a running server",
    "soak": "many mixed streams for minutes: answers as those alone, and nothing grows",
    "siege": "an honest client among thousands that send random bodies, stall, never read or leave",
}
# what each needs beyond this package's own
LIBRARIES = {
    "serve": ("httpx",),
    "siege": ("httpx", "psutil"),
    "soak": ("httpx", "psutil"),
    "gateway": ("httpx", "psutil", "tokenizers"),
}
OTHER_LIBRARIES = ("torch",)


class MissingBenchmarkError(CarrelError):
    """The benchmarks are not installed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    width = max(len(name) for name in BENCHMARKS) + 2
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(
        [
            "benchmarks:",
            *(f"  {name:<{width}}{summary}" for name, summary in BENCHMARKS.items()),
            "",
            "Each has --json FILE; `carrel bench NAME --help` lists its other options.",
        ]
    )
    parser.add_argument("benchmark", choices=list(BENCHMARKS), metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument(
        "options", nargs=argparse.REMAINDER, metavar="...", help="the benchmark's own options"
    )


def run(arguments: argparse.Namespace) -> int:
    """The benchmark's exit code. Raises CarrelError."""
    check(arguments.benchmark, CHECKOUT)
    path = os.pathsep.join(part for part in (str(CHECKOUT), os.environ.get("PYTHONPATH")) if part)
    # -P: a folder of the same name where the user stands is not taken for ours
    command = [sys.executable, "-P", "-m", "benchmarks", arguments.benchmark, *arguments.options]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path})
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            # the terminal told the benchmark too, which ends its own processes first
            continue


def check(benchmark: str, checkout: Path) -> None:
    """Raises MissingBenchmarkError and MissingLibraryError, which say what to install."""
    if not (checkout / "benchmarks" / "__main__.py").is_file():
        raise MissingBenchmarkError(
            f"there is no benchmarks/ folder in {checkout}: they are not part of the installed package, "
            "run `carrel bench` from a checkout of the source"
        )
    require(benchmark, LIBRARIES.get(benchmark, OTHER_LIBRARIES), f"-e '{checkout}[bench]'")

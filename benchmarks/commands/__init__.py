"""The benchmarks of `carrel bench` by name. Each is a module with `add_arguments`, `run` and `render`."""

from __future__ import annotations

COMMANDS = {
    "decode": "decode step and throughput of Carrel and its rivals, with random weights",
    "prefill": "time to first and second token of Carrel and its rivals, with random weights",
    "kernels": "every GPU kernel against its bytes, the copy ceiling and PyTorch",
    "gateway": "processor time of the gateway for a request, a prompt token and a generated token",
    "serve": "load on a running server: latencies and throughput by policy and concurrency",
    "soak": "many mixed streams for minutes: answers as those alone, and nothing grows",
    "siege": "an honest client among thousands that send random bodies, stall, never read or leave",
}


def module_of(name: str) -> str:
    return f"benchmarks.commands.{name}"

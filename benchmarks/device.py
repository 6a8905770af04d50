"""The device of a benchmark: which, how much of it, and giving it back."""

from __future__ import annotations

import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from benchmarks.errors import BenchmarkError


def choose_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one. Raises BenchmarkError for a GPU that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BenchmarkError(f"--device {name}: PyTorch sees no GPU here")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def default_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


@contextmanager
def limited(device: torch.device, num_bytes: int | None) -> Iterator[None]:
    """At most `num_bytes` of the device's memory may be allocated inside; whatever was allocated is freed behind."""
    is_limited = num_bytes is not None and device.type == "cuda"
    release(device)
    if is_limited:
        assert num_bytes is not None
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total), device)
    try:
        yield
    finally:
        release(device)
        if is_limited:
            torch.cuda.set_per_process_memory_fraction(1.0, device)


def release(device: torch.device) -> None:
    """Give freed memory back, and start a new peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """Since the last `release`. On a CPU: of the process since its start."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

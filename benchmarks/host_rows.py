"""A memfd mapped and registered with CUDA, as the arena is: kernels read it where it lies."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.errors import BenchmarkError


@dataclass(frozen=True)
class HostRows:
    """The same bytes twice: uint8 [bytes] as the host sees them, and as the device does (on a CPU: the same tensor)."""

    host: Tensor
    device: Tensor


@contextmanager
def host_rows(num_bytes: int, device: torch.device) -> Iterator[HostRows]:
    """Filled with random bytes; unregistered and unmapped at the end. Raises BenchmarkError if CUDA refuses it."""
    descriptor = os.memfd_create("carrel-bench")
    try:
        os.ftruncate(descriptor, num_bytes)
        mapping = mmap.mmap(descriptor, num_bytes)
    finally:
        os.close(descriptor)
    array = np.frombuffer(mapping, np.uint8)
    pattern = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
    for begin in range(0, num_bytes, len(pattern)):
        array[begin : begin + len(pattern)] = pattern[: num_bytes - begin]
    host = torch.from_numpy(array)
    try:
        if device.type == "cuda":
            with _registered(host) as seen:
                yield HostRows(host, seen)
        else:
            yield HostRows(host, host)
    finally:
        # the mapping closes with the last view of it
        del host, array


def pinned_bytes(num_bytes: int, device: torch.device) -> Tensor:
    """Pinned host memory as the device sees it: uint8 [num_bytes]; on a CPU, plain memory. No two rows are the same."""
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    # of an odd length, so that it stands elsewhere in every row
    pattern = torch.randint(256, ((1 << 20) + 1,), dtype=torch.uint8)
    for begin in range(0, num_bytes, len(pattern)):
        part = host[begin : begin + len(pattern)]
        part.copy_(pattern[: len(part)])
    return torch.as_tensor(_DeviceView(host), device=device) if device.type == "cuda" else host


@contextmanager
def _registered(host: Tensor) -> Iterator[Tensor]:
    runtime = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(host.data_ptr(), host.numel(), 0))
    if code:
        raise BenchmarkError(f"cudaHostRegister of {host.numel()} bytes failed with {code}")
    try:
        yield torch.as_tensor(_DeviceView(host), device="cuda")
    finally:
        torch.cuda.synchronize()
        runtime.cudaHostUnregister(host.data_ptr())


class _DeviceView:
    """Registered memory has one address on both sides. A view of it keeps the host's tensor alive."""

    def __init__(self, host: Tensor) -> None:
        self.host = host
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (host.numel(),),
            "typestr": "|u1",
            "data": (host.data_ptr(), False),
            "version": 3,
        }

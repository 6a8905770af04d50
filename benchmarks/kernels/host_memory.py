"""Pinned host memory that kernels read where it lies, as the arena is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def pinned_bytes(num_bytes: int, device: torch.device) -> Tensor:
    """Pinned memory as the device sees it: uint8 [num_bytes]; on a CPU, plain memory. No two rows are the same."""
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    # of an odd length, so that it stands elsewhere in every row
    pattern = torch.randint(256, ((1 << 20) + 1,), dtype=torch.uint8)
    for begin in range(0, num_bytes, len(pattern)):
        part = host[begin : begin + len(pattern)]
        part.copy_(pattern[: len(part)])
    return torch.as_tensor(_DeviceView(host), device=device) if device.type == "cuda" else host


class _DeviceView:
    """Pinned memory has one address on both sides. A view of it keeps the host's tensor alive."""

    def __init__(self, host: Tensor) -> None:
        self.host = host
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (host.numel(),),
            "typestr": "|u1",
            "data": (host.data_ptr(), False),
            "version": 3,
        }

"""Weights of the slots that H2O keeps, at every step; it must read their keys once and write a weight a slot."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.kernels.base import KernelCase, Operands, Setting, relative_error
from gpu_worker.kernels.attention.reference import BLOCK_SIZE

# of the context, one in so many
KEPT_SHARE = 5


def cases(setting: Setting) -> Iterator[KernelCase]:
    weigh, reference = setting.both("kernels.slot_weights", "slot_weights")
    shape = setting.shape
    for workload in setting.workloads:
        batch, length = workload.batch, max(1, workload.context // KEPT_SHARE)

        def make(batch: int = batch, length: int = length) -> Operands:
            size = (batch, shape.num_kv_heads, -(-length // BLOCK_SIZE))
            num_blocks = size[0] * size[1] * size[2]
            query = setting.normal(batch, shape.num_heads, shape.head_dim)
            pool = setting.normal(num_blocks * BLOCK_SIZE, shape.row_elements)
            tables = torch.randperm(num_blocks, device=setting.device).view(size)
            seats = torch.arange(batch, device=setting.device)
            lengths = torch.full(size[:2], length, device=setting.device)
            wanted = (query, pool, tables, seats, lengths, shape.head_dim**-0.5, length)
            return Operands(
                lambda: weigh(*wanted),
                lambda: reference(*wanted),
                lambda: relative_error(weigh(*wanted), reference(*wanted)),
            )

        rows = batch * shape.num_kv_heads
        num_bytes = rows * length * (shape.head_dim * setting.dtype.itemsize + 4)
        yield KernelCase("slot_weights", f"{rows} x {length}", num_bytes, make, "the same in PyTorch")

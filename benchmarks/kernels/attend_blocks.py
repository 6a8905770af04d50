"""Dense decode attention through block tables; it must read the whole KV cache of a layer once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.base import KernelCase, Operands, Setting, relative_error
from gpu_worker.kernels.attention.reference import BLOCK_SIZE


def filled_blocks(
    setting: Setting, batch: int, length: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float, int]:
    """Queries, a pool, tables of its blocks at random, seats, lengths, scale and the greatest length: what is asked of
    sequences of one length."""
    shape, device = setting.shape, setting.device
    size = (batch, shape.num_kv_heads, -(-length // BLOCK_SIZE))
    num_blocks = size[0] * size[1] * size[2]
    return (
        setting.normal(batch, shape.num_heads, shape.head_dim),
        setting.normal(num_blocks * BLOCK_SIZE, setting.row_format.row_elements),
        torch.randperm(num_blocks, device=device).view(size),
        torch.arange(batch, device=device),
        torch.full(size[:2], length, device=device),
        shape.head_dim**-0.5,
        length,
    )


def cases(setting: Setting) -> Iterator[KernelCase]:
    attend, reference = setting.both("kernels.attention", "attend_blocks")
    shape = setting.shape
    for workload in setting.workloads:
        batch, length = workload.batch, workload.context
        rows = batch * shape.num_kv_heads

        def make(batch: int = batch, length: int = length) -> Operands:
            wanted = filled_blocks(setting, batch, length)
            query = wanted[0]
            keys, values = (
                setting.normal(batch, shape.num_kv_heads, length, shape.head_dim) for _ in range(2)
            )

            def rival() -> Tensor:
                return F.scaled_dot_product_attention(query[:, :, None], keys, values, enable_gqa=True)

            return Operands(
                lambda: attend(*wanted), rival, lambda: relative_error(attend(*wanted), reference(*wanted))
            )

        num_bytes = rows * length * setting.row_format.row_bytes
        yield KernelCase("attend_blocks", f"{rows} x {length}", num_bytes, make, "SDPA, contiguous")

"""Decode attention over listed slots; it must read the rows of all of them once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.base import KernelCase, Operands, Setting, relative_error

# sinks and window, of the budget
FIXED_SLOTS = 96
# slots of the pool for each that is attended: they lie far apart, as in a hot cache
SPREAD = 8


def cases(setting: Setting) -> Iterator[KernelCase]:
    attend, reference = setting.both("kernels.attention", "attend_slots")
    shape = setting.shape
    for workload in setting.workloads:
        batch, attended = workload.batch, min(setting.budget_tokens, workload.context)
        num_fixed, rows = min(FIXED_SLOTS, attended // 2), batch * shape.num_kv_heads
        pool = cache(
            lambda size=(rows * attended * SPREAD, setting.row_format.row_elements): setting.normal(*size)
        )

        def make(pool=pool, batch=batch, attended=attended, num_fixed=num_fixed) -> Operands:  # type: ignore[no-untyped-def]
            query = setting.normal(batch, shape.num_heads, shape.head_dim)
            order = torch.randperm(pool().shape[0], dtype=torch.int32, device=setting.device)
            slots = order[: batch * shape.num_kv_heads * attended].view(batch, shape.num_kv_heads, attended)
            fixed, selected = slots[..., :num_fixed].contiguous(), slots[..., num_fixed:].contiguous()
            seats = torch.arange(batch, device=setting.device)
            wanted = (query, pool(), fixed, seats, selected, shape.head_dim**-0.5)
            keys, values = (
                setting.normal(batch, shape.num_kv_heads, attended, shape.head_dim) for _ in range(2)
            )

            def rival() -> Tensor:
                return F.scaled_dot_product_attention(query[:, :, None], keys, values, enable_gqa=True)

            return Operands(
                lambda: attend(*wanted), rival, lambda: relative_error(attend(*wanted), reference(*wanted))
            )

        num_bytes = rows * attended * setting.row_format.row_bytes
        yield KernelCase("attend_slots", f"{rows} x {attended}", num_bytes, make, "SDPA, rows in order")

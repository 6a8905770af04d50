"""Selection by keys at two bits a coordinate, scores and top-k in one; it must read every code and scale once."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.kernels.base import KernelCase, Operands, Setting
from benchmarks.kernels.bit_operands import NUM_SINKS, Coded, code_bytes
from benchmarks.traces import overlap


def cases(setting: Setting) -> Iterator[KernelCase]:
    select, reference = setting.both("policies.bitkeys.bit_select", "bit_select")
    shape, device = setting.shape, setting.device
    for workload in setting.workloads:
        width = min(setting.budget_tokens, workload.context // 4)

        def make(
            batch: int = workload.batch, context: int = workload.context, width: int = width
        ) -> Operands:
            index = Coded.random(setting, batch, shape.num_kv_heads, num_positions=context)
            wanted = (
                setting.normal(batch, shape.num_heads, shape.head_dim), index.rotation, index.codes, index.scales,
                torch.randn(batch, shape.num_kv_heads, NUM_SINKS, shape.head_dim, device=device),
                torch.arange(batch, device=device),
                torch.full((batch,), NUM_SINKS, device=device), torch.full((batch,), context, device=device),
                torch.full((batch,), width, device=device), width, context, shape.head_dim**-0.5,
            )  # fmt: skip
            return Operands(
                lambda: select(*wanted), error=lambda: 1 - overlap(reference(*wanted), select(*wanted))
            )

        rows = workload.batch * shape.num_kv_heads
        num_bytes = rows * workload.context * code_bytes(setting) + 8 * rows * width
        yield KernelCase("bit_select", f"{rows} x {workload.context} to {width}", num_bytes, make)

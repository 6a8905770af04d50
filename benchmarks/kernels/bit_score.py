"""Scores of every candidate by keys at two bits a coordinate; codes and scales once in, a score out."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.kernels.base import KernelCase, Operands, Setting, relative_error
from benchmarks.kernels.bit_operands import NUM_SINKS, Coded, code_bytes


def cases(setting: Setting) -> Iterator[KernelCase]:
    score, reference = setting.both("policies.bitkeys.bit_score", "bit_score")
    shape, device = setting.shape, setting.device
    for workload in setting.workloads:

        def make(batch: int = workload.batch, context: int = workload.context) -> Operands:
            index = Coded.random(setting, batch, shape.num_kv_heads, num_positions=context)
            wanted = (
                setting.normal(batch, shape.num_heads, shape.head_dim), index.rotation, index.codes, index.scales,
                torch.randn(batch, shape.num_kv_heads, NUM_SINKS, shape.head_dim, device=device),
                torch.arange(batch, device=device),
                torch.full((batch,), NUM_SINKS, device=device), torch.full((batch,), context, device=device),
                shape.head_dim**-0.5, context,
            )  # fmt: skip
            return Operands(
                lambda: score(*wanted), error=lambda: relative_error(score(*wanted), reference(*wanted))
            )

        rows = workload.batch * shape.num_kv_heads
        num_bytes = rows * workload.context * (code_bytes(setting) + torch.float32.itemsize)
        yield KernelCase("bit_score", f"{rows} x {workload.context}", num_bytes, make)

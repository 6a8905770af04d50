"""What stands in for unselected candidates; of a head it must read the sample's codes and the covariances."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.kernels.base import KernelCase, Operands, Setting, relative_error
from benchmarks.kernels.bit_operands import NUM_SINKS, Coded, code_bytes
from gpu_worker.policies.bitkeys.bit_rest.reference import NUM_SAMPLES


def cases(setting: Setting) -> Iterator[KernelCase]:
    rest, reference = setting.both("policies.bitkeys.bit_rest", "bit_rest")
    shape, device = setting.shape, setting.device
    for workload in setting.workloads:
        width = min(setting.budget_tokens, workload.context // 4)

        def make(
            batch: int = workload.batch, context: int = workload.context, width: int = width
        ) -> Operands:
            heads, head_dim = (batch, shape.num_kv_heads), shape.head_dim
            index = Coded.random(setting, *heads, num_positions=context)
            stride = (context - NUM_SINKS) // width
            selected = NUM_SINKS + torch.arange(width, device=device) * stride
            wanted = (
                setting.normal(batch, shape.num_heads, head_dim), index.rotation, index.codes, index.scales,
                index.means, torch.randn(*heads, head_dim, device=device),
                torch.randn(*heads, head_dim, head_dim, device=device).bfloat16(),
                torch.arange(batch, device=device),
                torch.full((batch,), NUM_SINKS, device=device), torch.full((batch,), context, device=device),
                selected.expand(*heads, width), head_dim**-0.5,
            )  # fmt: skip
            return Operands(
                lambda: rest(*wanted).values,
                error=lambda: relative_error(rest(*wanted).values, reference(*wanted).values),
            )

        rows = workload.batch * shape.num_kv_heads
        num_bytes = rows * (NUM_SAMPLES * code_bytes(setting) + 2 * shape.head_dim**2)
        yield KernelCase("bit_rest", f"{rows} x {workload.context} but {width}", num_bytes, make)

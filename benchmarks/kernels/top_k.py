"""Selection of the best positions of every KV head; it must read every score once."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.kernels.base import KernelCase, Operands, Setting
from benchmarks.traces import overlap


def cases(setting: Setting) -> Iterator[KernelCase]:
    top_k, reference = setting.both("kernels.top_k", "top_k")
    num_heads = setting.shape.num_kv_heads
    for workload in setting.workloads:
        width = min(setting.budget_tokens, workload.context)
        size = (workload.batch, num_heads, workload.context)

        def make(size: tuple[int, ...] = size, width: int = width) -> Operands:
            # as weights of a softmax are: few are large
            scores = torch.randn(size, device=setting.device).mul_(2).exp_()
            counts = torch.full((size[0],), width, device=setting.device)
            return Operands(
                lambda: top_k(scores, counts, width),
                lambda: scores.topk(width, dim=-1, sorted=False),
                lambda: 1 - overlap(reference(scores, counts, width), top_k(scores, counts, width)),
            )

        rows = workload.batch * num_heads
        num_bytes = rows * (4 * workload.context + 8 * width)
        label = f"{rows} x {workload.context} to {width}"
        yield KernelCase("top_k", label, num_bytes, make, "torch.topk")

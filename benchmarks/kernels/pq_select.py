"""Selection by pairs of PQ codes, scores and top-k in one; it must read every code once."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.kernels.base import KernelCase, Operands, Setting
from benchmarks.kernels.pq_operands import counts_bytes, index_bytes, random_index
from benchmarks.traces import overlap


def cases(setting: Setting) -> Iterator[KernelCase]:
    select, reference = setting.both("policies.pqcache.pq_select", "pq_select")
    shape = setting.shape
    for workload in setting.workloads:
        width = min(setting.budget_tokens, workload.context // 4)

        def make(
            batch: int = workload.batch, context: int = workload.context, width: int = width
        ) -> Operands:
            index = random_index(setting, batch, context)
            counts = torch.full((batch,), width, device=setting.device)
            wanted = (
                index.query, index.codebooks, index.codes, index.pair_counts, index.seats,
                index.begin, index.end, counts, width, context, shape.head_dim**-0.5,
            )  # fmt: skip
            return Operands(
                lambda: select(*wanted), error=lambda: 1 - overlap(reference(*wanted), select(*wanted))
            )

        rows = workload.batch * shape.num_kv_heads
        num_bytes = index_bytes(setting, workload.batch, workload.context)
        num_bytes += counts_bytes(setting, workload.batch) + 8 * rows * width
        yield KernelCase("pq_select", f"{rows} x {workload.context} to {width}", num_bytes, make)

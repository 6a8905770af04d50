"""PQ scores of every candidate, where they are not selected by pairs; codes once in, a score out."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.kernels.base import KernelCase, Operands, Setting, relative_error
from benchmarks.kernels.pq_operands import index_bytes, random_index


def cases(setting: Setting) -> Iterator[KernelCase]:
    score, reference = setting.both("policies.pqcache.pq_score", "pq_score")
    shape = setting.shape
    for workload in setting.workloads:

        def make(batch: int = workload.batch, context: int = workload.context) -> Operands:
            index = random_index(setting, batch, context)
            wanted = (
                index.query, index.codebooks, index.codes, index.seats, index.begin, index.end,
                shape.head_dim**-0.5, context,
            )  # fmt: skip
            return Operands(
                lambda: score(*wanted), error=lambda: relative_error(score(*wanted), reference(*wanted))
            )

        rows = workload.batch * shape.num_kv_heads
        num_bytes = index_bytes(setting, workload.batch, workload.context) + 4 * rows * workload.context
        yield KernelCase("pq_score", f"{rows} x {workload.context}", num_bytes, make)

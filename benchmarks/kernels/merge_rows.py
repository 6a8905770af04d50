"""Chelsea's first round: rows matched and a share of them merged; rows once in, those that are left out in float32.

It has no rival: the reference waits for the host, and no CUDA graph holds it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.kernels.base import KernelCase, Operands, Setting, contexts, relative_error
from benchmarks.kernels.match_rows import CHUNK
from gpu_worker.policies.chelsea.soft_matching.reference import WeightedRows
from gpu_worker.row_format import row_format

# Chelsea's own, of the first round
MERGED_SHARE = 0.35


def cases(setting: Setting) -> Iterator[KernelCase]:
    merge, reference = setting.both("policies.chelsea.soft_matching", "merge_rows")
    shape, device = setting.shape, setting.device
    for context in contexts(setting):
        num_merged = int(MERGED_SHARE * context)

        def make(context: int = context, num_merged: int = num_merged) -> Operands:
            size = (shape.num_kv_heads, context)
            rows = WeightedRows(
                torch.arange(context, device=device).expand(size),
                torch.ones(size, device=device),
                setting.normal(*size, shape.head_dim),
                setting.normal(*size, shape.head_dim),
            )

            def error() -> float:
                found, wanted = merge(rows, CHUNK, num_merged), reference(rows, CHUNK, num_merged)
                return max(
                    relative_error(found.keys, wanted.keys), relative_error(found.values, wanted.values)
                )

            return Operands(lambda: merge(rows, CHUNK, num_merged), error=error)

        read = context * (8 + 4 + setting.row_format.row_bytes)
        written = (context - num_merged) * (8 + 4 + row_format(shape.head_dim, torch.float32).row_bytes)
        label = f"{shape.num_kv_heads} x {context} to {context - num_merged}"
        yield KernelCase("merge_rows", label, shape.num_kv_heads * (read + written), make)

"""ProtoKV's votes averaged over groups; a vote and a label a token in, a mean out."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.kernels.base import KernelCase, Operands, Setting, contexts, relative_error
from benchmarks.kernels.bucket_sums import NUM_BUCKETS
from benchmarks.kernels.chunk_sums import CHUNK_TOKENS


def cases(setting: Setting) -> Iterator[KernelCase]:
    average, reference = setting.both("policies.protokv.group_means", "group_means")
    num_heads, device = setting.shape.num_kv_heads, setting.device
    for context in contexts(setting):
        num_groups = max(1, context // CHUNK_TOKENS) + NUM_BUCKETS

        def make(context: int = context, num_groups: int = num_groups) -> Operands:
            votes = torch.rand(num_heads, context, device=device) / context
            labels = torch.randint(num_groups, (num_heads, context), dtype=torch.int32, device=device)
            wanted = (votes, labels, num_groups)
            return Operands(
                lambda: average(*wanted),
                lambda: reference(*wanted),
                lambda: relative_error(average(*wanted), reference(*wanted)),
            )

        label = f"{num_heads} x {context} in {num_groups}"
        yield KernelCase("group_means", label, 12 * num_heads * context, make, "the same in PyTorch")

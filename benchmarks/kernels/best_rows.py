"""The fifth of a prompt that a policy keeps, ties by a second score; two scores a row in, a row kept out."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.kernels.base import KernelCase, Operands, Setting, contexts, mismatch

# of the context, one in so many
KEPT_SHARE = 5
# rows of a group, which score alike, as ProtoKV's do
GROUP_ROWS = 50


def cases(setting: Setting) -> Iterator[KernelCase]:
    best_rows, reference = setting.both("kernels.best_rows", "best_rows")
    num_heads, device = setting.shape.num_kv_heads, setting.device
    for context in contexts(setting):
        width = max(1, context // KEPT_SHARE)

        def make(context: int = context, width: int = width) -> Operands:
            groups = torch.rand(num_heads, -(-context // GROUP_ROWS), device=device)
            member = torch.rand(num_heads, context, device=device).mul_(groups.shape[1]).long()
            first = groups.gather(1, member.clamp_(max=groups.shape[1] - 1))
            second = torch.randn(num_heads, context, device=device).mul_(2).exp_()
            wanted = (first, torch.full((num_heads,), width, device=device), width, second)
            return Operands(
                lambda: best_rows(*wanted),
                lambda: reference(*wanted),
                lambda: mismatch(best_rows(*wanted), reference(*wanted)),
            )

        num_bytes = num_heads * (8 * context + 8 * width)
        label = f"{num_heads} x {context} to {width}"
        yield KernelCase("best_rows", label, num_bytes, make, "torch.sort by both, then by row")

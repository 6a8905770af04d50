"""Turning queries and keys of a fused projection; each in and out once."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.kernels.base import (
    KernelCase,
    Operands,
    Setting,
    num_bytes_of,
    relative_error,
    token_counts,
)


def cases(setting: Setting) -> Iterator[KernelCase]:
    rope, reference = setting.both("kernels.rope", "rope")
    shape = setting.shape
    num_turned = shape.num_heads + shape.num_kv_heads
    table = setting.normal(shape.max_len, 2, shape.head_dim)
    for count in token_counts(setting):

        def make(count: int = count) -> Operands:
            qkv = setting.normal(count, (num_turned + shape.num_kv_heads) * shape.head_dim)
            positions = torch.randint(shape.max_len, (count,), device=setting.device)
            wanted = (qkv, table, positions, shape.num_heads, shape.num_kv_heads)

            def error() -> float:
                pairs = zip(rope(*wanted), reference(*wanted), strict=True)
                return max(relative_error(found, true) for found, true in pairs)

            return Operands(lambda: rope(*wanted), lambda: reference(*wanted), error)

        num_bytes = 2 * num_bytes_of(setting.empty(count, num_turned, shape.head_dim))
        yield KernelCase("rope", f"{count} x {num_turned} heads", num_bytes, make, "the same in PyTorch")

"""Sums of ProtoKV's chunks, without the irregular keys; the other keys once in, the sums out."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.kernels.base import KernelCase, Operands, Setting, contexts, relative_error

# ProtoKV's own
CHUNK_TOKENS = 50
NUM_IRREGULAR = 48


def cases(setting: Setting) -> Iterator[KernelCase]:
    add, reference = setting.both("policies.protokv.chunks", "chunk_sums")
    shape = setting.shape
    for context in contexts(setting):
        num_chunks, left_out = max(1, context // CHUNK_TOKENS), min(NUM_IRREGULAR, context // 2)

        def make(context: int = context, num_chunks: int = num_chunks, left_out: int = left_out) -> Operands:
            keys = setting.normal(shape.num_kv_heads, context, shape.head_dim)
            irregular = torch.rand(shape.num_kv_heads, context, device=setting.device).topk(left_out).indices
            is_member = torch.ones(shape.num_kv_heads, context, dtype=torch.bool, device=setting.device)
            wanted = (keys, num_chunks, is_member.scatter_(1, irregular, False))
            return Operands(
                lambda: add(*wanted),
                lambda: reference(*wanted),
                lambda: relative_error(add(*wanted), reference(*wanted)),
            )

        a_key = shape.head_dim * setting.dtype.itemsize
        a_head = context + (context - left_out) * a_key + num_chunks * shape.head_dim * 4
        label = f"{shape.num_kv_heads} x {context} in {num_chunks}"
        yield KernelCase("chunk_sums", label, shape.num_kv_heads * a_head, make, "the same in PyTorch")

"""Codes of a prompt's keys; keys once in, a code a part out."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.kernels.base import KernelCase, Operands, Setting, contexts, load, mismatch
from benchmarks.kernels.pq_operands import KSUB, NUM_PARTS


def cases(setting: Setting) -> Iterator[KernelCase]:
    assign = setting.implementation("policies.pqcache.pq_score", "pq_assign", module="assign_kernel")
    reference = load("policies.pqcache.pq_score", "pq_assign")
    shape = setting.shape
    num_heads = shape.num_kv_heads
    for context in contexts(setting):

        def make(context: int = context) -> Operands:
            keys = setting.normal(num_heads, context, shape.head_dim)
            books = torch.randn(
                num_heads, NUM_PARTS, KSUB, shape.head_dim // NUM_PARTS, device=setting.device
            )
            return Operands(
                lambda: assign(keys, books),
                lambda: reference(keys, books),
                lambda: mismatch(assign(keys, books), reference(keys, books)),
            )

        a_head = context * (shape.head_dim * setting.dtype.itemsize + NUM_PARTS) + 4 * KSUB * shape.head_dim
        label = f"{num_heads} x {context} to {NUM_PARTS} x {KSUB}"
        yield KernelCase("pq_assign", label, num_heads * a_head, make, "the same in PyTorch")

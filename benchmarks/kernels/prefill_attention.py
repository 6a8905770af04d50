"""A prompt's last chunk over all before it; bound by arithmetic, it must at least read every key and value once."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from benchmarks.kernels.base import (
    KernelCase,
    Operands,
    Setting,
    contexts,
    load,
    num_bytes_of,
    relative_error,
)

CHUNK = 8192
# last tokens of the chunk that are checked: the definition keeps all their scores
NUM_CHECKED = 64


def cases(setting: Setting) -> Iterator[KernelCase]:
    attend = setting.implementation("kernels.prefill_attention", "attend_chunk")
    naive = load("kernels.prefill_attention", "attend_chunk_naive")
    shape = setting.shape
    for context in contexts(setting):
        chunk = min(CHUNK, context // 2)

        def make(context: int = context, chunk: int = chunk) -> Operands:
            query = setting.normal(chunk, shape.num_heads, shape.head_dim)
            rows = setting.normal(shape.num_kv_heads, context, setting.row_format.row_elements)
            scale, checked = shape.head_dim**-0.5, min(NUM_CHECKED, chunk)
            keys, values = rows[None].split(shape.head_dim, dim=-1)
            mask = causal_lower_right(chunk, context)

            def rival() -> Tensor:
                grouped = query.transpose(0, 1)[None]
                return F.scaled_dot_product_attention(
                    grouped, keys, values, attn_mask=mask, scale=scale, enable_gqa=True
                )

            def error() -> float:
                found = attend(query, rows, context - chunk, scale)[-checked:]
                return relative_error(found, naive(query[-checked:], rows, context - checked, scale))

            return Operands(lambda: attend(query, rows, context - chunk, scale), rival, error)

        num_bytes = shape.num_kv_heads * context * setting.row_format.row_bytes
        num_bytes += 2 * num_bytes_of(setting.empty(chunk, shape.num_heads, shape.head_dim))
        label = f"{chunk} behind {context - chunk}"
        yield KernelCase("prefill_attention", label, num_bytes, make, "SDPA with a mask")

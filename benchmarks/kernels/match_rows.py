"""Which rows of a chunk are most alike, for Chelsea; keys once in, a partner and a cosine for every second row out."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.kernels.base import KernelCase, Operands, Setting, contexts, mismatch
from gpu_worker.policies.chelsea.soft_matching.reference import num_matches

# Chelsea's own
CHUNK = 256


def cases(setting: Setting) -> Iterator[KernelCase]:
    match, reference = setting.both("policies.chelsea.soft_matching", "match_rows")
    shape = setting.shape
    for context in contexts(setting):

        def make(context: int = context) -> Operands:
            keys = setting.normal(shape.num_kv_heads, context, shape.head_dim)
            return Operands(
                lambda: match(keys, CHUNK),
                lambda: reference(keys, CHUNK),
                lambda: mismatch(match(keys, CHUNK).partner, reference(keys, CHUNK).partner),
            )

        a_head = context * shape.head_dim * setting.dtype.itemsize + num_matches(context, CHUNK) * (8 + 4)
        label = f"{shape.num_kv_heads} x {context} by {CHUNK}"
        num_bytes = shape.num_kv_heads * a_head
        yield KernelCase("match_rows", label, num_bytes, make, "the same in PyTorch")

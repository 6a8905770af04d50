"""How far keys turn away from their chunk's mean, for ProtoKV; keys once in, a number each out."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.kernels.base import KernelCase, Operands, Setting, contexts, relative_error
from benchmarks.kernels.chunk_sums import CHUNK_TOKENS


def cases(setting: Setting) -> Iterator[KernelCase]:
    score, reference = setting.both("policies.protokv.chunks", "irregularity")
    shape = setting.shape
    for context in contexts(setting):
        num_chunks = max(1, context // CHUNK_TOKENS)

        def make(context: int = context, num_chunks: int = num_chunks) -> Operands:
            keys = setting.normal(shape.num_kv_heads, context, shape.head_dim)
            return Operands(
                lambda: score(keys, num_chunks),
                lambda: reference(keys, num_chunks),
                lambda: relative_error(score(keys, num_chunks), reference(keys, num_chunks)),
            )

        num_bytes = shape.num_kv_heads * context * (shape.head_dim * setting.dtype.itemsize + 4)
        label = f"{shape.num_kv_heads} x {context} in {num_chunks}"
        yield KernelCase("irregularity", label, num_bytes, make, "the same in PyTorch")

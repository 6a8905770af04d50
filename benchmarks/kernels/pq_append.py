"""Codes of the tokens that leave the window, of all layers at once; it must read every codebook once."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.kernels.base import KernelCase, Operands, Setting, mismatch, num_bytes_of
from benchmarks.kernels.pq_operands import KSUB, NUM_PARTS

# what is not written is not read either: a short index does
NUM_POSITIONS = 1024


def cases(setting: Setting) -> Iterator[KernelCase]:
    append, reference = setting.both("policies.pqcache.pq_append", "pq_append")
    shape, device = setting.shape, setting.device
    for batch in sorted({workload.batch for workload in setting.workloads}):
        heads = (batch, shape.num_layers, shape.num_kv_heads)

        def make(batch: int = batch, heads: tuple[int, int, int] = heads) -> Operands:
            keys = setting.normal(*heads, shape.head_dim)
            books = torch.randn(*heads, NUM_PARTS, KSUB, shape.head_dim // NUM_PARTS, device=device)
            codes = torch.zeros(*heads, NUM_POSITIONS, NUM_PARTS, dtype=torch.uint8, device=device)
            counts = torch.zeros(*heads, KSUB * KSUB, dtype=torch.int32, device=device)
            seats = torch.arange(batch, device=device)
            positions = torch.full((batch,), NUM_POSITIONS // 2, device=device)

            def error() -> float:
                found, wanted = codes.clone(), codes.clone()
                append(keys, books, found, counts.clone(), seats, positions)
                reference(keys, books, wanted, counts.clone(), seats, positions)
                place = NUM_POSITIONS // 2
                return mismatch(found[..., place, :], wanted[..., place, :])

            return Operands(lambda: append(keys, books, codes, counts, seats, positions), error=error)

        num_bytes = batch * shape.num_layers * shape.num_kv_heads * KSUB * shape.head_dim * 4
        num_bytes += num_bytes_of(setting.empty(*heads, shape.head_dim))
        yield KernelCase("pq_append", f"{batch} tokens of {shape.num_layers} layers", num_bytes, make)

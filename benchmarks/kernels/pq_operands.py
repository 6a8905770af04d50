"""A random PQ index of a batch, as PQCache builds it: two parts of 64 centroids."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.kernels.base import Setting, num_bytes_of

NUM_PARTS = 2
KSUB = 64
# sinks before and window behind the candidates
NUM_SINKS = 32
NUM_RECENT = 64


@dataclass(frozen=True)
class PQIndex:
    """Of one layer; seat b is row b. The candidates are [begin, end)."""

    query: Tensor
    codebooks: Tensor
    codes: Tensor
    pair_counts: Tensor
    seats: Tensor
    begin: Tensor
    end: Tensor


def random_index(setting: Setting, batch: int, context: int) -> PQIndex:
    shape, device = setting.shape, setting.device
    begin, end = min(NUM_SINKS, context // 4), context - min(NUM_RECENT, context // 4)
    size = (batch, shape.num_kv_heads, context, NUM_PARTS)
    codes = torch.randint(KSUB, size, dtype=torch.uint8, device=device)
    pairs = codes[:, :, begin:end, 0].long() * KSUB + codes[:, :, begin:end, 1]
    counts = torch.zeros(batch, shape.num_kv_heads, KSUB * KSUB, dtype=torch.int32, device=device)
    counts.scatter_add_(-1, pairs, torch.ones_like(pairs, dtype=torch.int32))
    dsub = shape.head_dim // NUM_PARTS
    return PQIndex(
        setting.normal(batch, shape.num_heads, shape.head_dim),
        torch.randn(batch, shape.num_kv_heads, NUM_PARTS, KSUB, dsub, device=device) / dsub**0.5,
        codes,
        counts,
        torch.arange(batch, device=device),
        torch.full((batch,), begin, device=device),
        torch.full((batch,), end, device=device),
    )


def index_bytes(setting: Setting, batch: int, context: int) -> int:
    """Codes and codebooks, each once."""
    shape = setting.shape
    rows = batch * shape.num_kv_heads
    return rows * (context * NUM_PARTS + KSUB * shape.head_dim * torch.float32.itemsize)


def counts_bytes(setting: Setting, batch: int) -> int:
    return num_bytes_of(
        torch.empty(batch, setting.shape.num_kv_heads, KSUB * KSUB, dtype=torch.int32, device="meta")
    )

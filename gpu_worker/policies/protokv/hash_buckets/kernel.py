"""Sums of hash buckets in Triton, of a few keys: every bucket's program hashes all of a head's keys and adds its own.

That takes one launch, and what is computed again for each bucket is little where keys are as few as irregular ones.
"""
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.policies.protokv.chunks import reference as chunks
from gpu_worker.policies.protokv.hash_buckets import reference
from gpu_worker.policies.protokv.hash_buckets.reference import RandomFeatures

EPS = tl.constexpr(chunks.EPS)
# Keys times buckets of a head, and bits, up to which a bucket's program hashes them all.
MOST_HASHES = 1 << 13
MOST_BITS = 16
TILE_ELEMENTS = 8192


def bucket_sums(keys: Tensor, features: RandomFeatures) -> Tensor:
    """See the reference. All on one CUDA device; the keys' last stride is 1. Many keys go to PyTorch."""
    num_heads, num_rows, width = keys.shape
    num_buckets, num_bits = features.num_buckets, features.weights.shape[2]
    if num_rows * num_buckets > MOST_HASHES or num_bits > MOST_BITS:
        return reference.bucket_sums(keys, features)
    sums = torch.empty(num_heads, num_buckets, width, dtype=torch.float32, device=keys.device)
    if num_heads:
        lanes = max(16, triton.next_power_of_2(width))
        rows = max(1, min(TILE_ELEMENTS // lanes, max(16, triton.next_power_of_2(num_rows))))
        sum_bucket[(num_buckets, num_heads)](
            keys, features.weights, features.phases, sums,
            *keys.stride()[:2], *features.weights.stride(), features.phases.stride(0), features.phases.stride(2),
            num_rows, num_buckets, WIDTH=width, BITS=num_bits, LANES=lanes, ROWS=rows, num_warps=4,
        )  # fmt: skip
    return sums


@triton.jit(do_not_specialize=["num_rows", "num_buckets"])
def sum_bucket(
    keys, weights, phases, sums, stride_head, stride_row,
    weights_head, weights_dim, weights_bit, phases_head, phases_bit, num_rows, num_buckets,
    WIDTH: tl.constexpr, BITS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One bucket of one head."""
    bucket, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows, dims = tl.arange(0, ROWS), tl.arange(0, LANES)
    is_dim = dims < WIDTH
    total = tl.zeros([LANES], tl.float32)
    for first in range(0, num_rows, ROWS):
        row = first + rows
        source = keys + head * stride_head + row[:, None].to(tl.int64) * stride_row + dims[None, :]
        tile = tl.load(source, mask=(row < num_rows)[:, None] & is_dim[None, :], other=0.0).to(tl.float32)
        unit = tile / tl.maximum(tl.sqrt(tl.sum(tile * tile, axis=1)), EPS)[:, None]
        number = tl.zeros([ROWS], tl.int32)
        for bit in tl.static_range(BITS):
            of_bit = weights + head * weights_head + dims * weights_dim + bit * weights_bit
            weight = tl.load(of_bit, mask=is_dim, other=0.0)
            angle = tl.sum(unit * weight[None, :], axis=1)
            angle += tl.load(phases + head * phases_head + bit * phases_bit)
            number = number * 2 + (tl.cos(angle) > 0).to(tl.int32)
        is_in = number % num_buckets == bucket
        # Rows that are not there are zero.
        total += tl.sum(tl.where(is_in[:, None], tile, 0.0), axis=0)
    tl.store(sums + (head * num_buckets + bucket) * WIDTH + dims, total, mask=is_dim)

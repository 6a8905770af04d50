"""Slot weights in Triton: a pass over the keys, split like decode attention's, and one over the scores that it leaves.

`score_split`, grid (B * H_kv, splits): a program scores one split of the slots of a (sequence, KV head) for the whole
group, which stands in one tile of at least 16 for `tl.dot`, and leaves the scores and, by query head, the log2 of the
split's softmax sum in float32. `weigh`, grid (B * H_kv, tiles): a program joins the splits' sums and writes the mean
weight of each of its slots. A key is read once; a score is 4 bytes beside the 256 of a key of 128 elements.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from gpu_worker.kernels.attention.kernel import is_interpreted, num_processors
from gpu_worker.kernels.attention.reference import BLOCK_SIZE
from gpu_worker.kernels.attention.splits import MAX_SPLITS, num_splits
from gpu_worker.kernels.slot_weights.programs import score_split, weigh

# Key bytes that a program has in flight, at most.
TILE_BYTES = 16384
NUM_STAGES = 3
# Scores that a weighing program has of its whole group.
WEIGHED = 4096


def slot_weights(
    query: Tensor,
    pool: Tensor,
    block_tables: Tensor,
    seats: Tensor,
    lengths: Tensor,
    scale: float,
    longest: int,
) -> Tensor:
    """See the reference. All on one CUDA device; the query's and the pool's last strides are 1."""
    batch, num_heads, head_dim = query.shape
    num_kv_heads = block_tables.shape[1]
    group, num_rows = num_heads // num_kv_heads, batch * num_kv_heads
    weights = torch.empty(batch, num_kv_heads, longest, dtype=torch.float32, device=query.device)
    if not weights.numel():
        return weights
    dim_tile, group_width = max(16, triton.next_power_of_2(head_dim)), triton.next_power_of_2(group)
    tile = min(BLOCK_SIZE, max(16, TILE_BYTES // (dim_tile * pool.element_size())))
    capacity = min(block_tables.shape[2] * BLOCK_SIZE, longest)
    num_tiles, processors = triton.cdiv(capacity, tile), num_processors(query.device)
    splits = num_splits(num_rows, num_tiles, processors, may_be_shorter=True)
    scores = torch.empty(num_rows, group, capacity, dtype=torch.float32, device=query.device)
    partial_lse = torch.empty(num_rows, splits, group, dtype=torch.float32, device=query.device)
    score_split[(num_rows, splits)](
        query,
        pool,
        block_tables,
        seats,
        lengths,
        scores,
        partial_lse,
        *query.stride()[:2],
        pool.stride(0),
        *block_tables.stride(),
        *lengths.stride(),
        capacity,
        scale,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=BLOCK_SIZE,
        GROUP_TILE=max(16, group_width),
        DIM_TILE=dim_tile,
        TILE=tile,
        WIDE_DOT=query.dtype == torch.bfloat16 and is_interpreted(),
        num_stages=NUM_STAGES,
    )
    weighed = max(64, min(WEIGHED // group_width, triton.next_power_of_2(longest)))
    weigh[(num_rows, triton.cdiv(longest, weighed))](
        scores,
        partial_lse,
        lengths,
        weights,
        *lengths.stride(),
        capacity,
        longest,
        splits,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_WIDTH=group_width,
        SPLITS_TILE=MAX_SPLITS,
        TILE=weighed,
    )
    return weights

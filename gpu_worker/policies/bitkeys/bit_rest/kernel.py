"""The stand-in for unselected candidates, in Triton: one launch, a program for each (lane, KV head).

It reads no more than 512 codes and scales of a head, the head's covariances, 2 d d bytes, and the selected positions.
A processor of an H200 has registers and shared memory for two programs with heads of 128.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from gpu_worker.kernels.attention import Rest
from gpu_worker.kernels.attention.kernel import is_interpreted
from gpu_worker.policies.bitkeys.bit_rest.programs import sum_up_rest
from gpu_worker.policies.bitkeys.bit_rest.reference import NUM_SAMPLES

# Selected positions that are looked at at a time.
TILE = 2048
NUM_WARPS = 8
# Quarters of rotation and covariances that are under way at a time, and one; of wide heads shared memory holds fewer.
STAGES, WIDE_STAGES, WIDE = 4, 2, 128


def bit_rest(
    query: Tensor,
    rotation: Tensor,
    codes: Tensor,
    scales: Tensor,
    means: Tensor,
    value_means: Tensor,
    slopes: Tensor,
    seats: Tensor,
    begin: Tensor,
    end: Tensor,
    selected: Tensor,
    scale: float,
    rest: Rest | None = None,
) -> Rest:
    """See the reference. All on one CUDA device; what seats have may be views of one layer."""
    batch, num_heads, head_dim = query.shape
    num_kv_heads, num_bytes = codes.shape[1], codes.shape[3]
    group = num_heads // num_kv_heads
    rest = rest or Rest.room(query)
    if batch == 0:
        return rest
    # Bytes one by one would take a register each.
    words = codes.view(torch.int32) if num_bytes % 4 == 0 else codes
    sum_up_rest[(batch * num_kv_heads,)](
        query.contiguous(), rotation, words, scales, means, value_means, slopes, seats.contiguous(),
        begin.contiguous(), end.contiguous(), selected.contiguous(), rest.values, rest.log_weights,
        num_kv_heads, selected.shape[2], scale,
        *words.stride()[:2], *scales.stride()[:2], *means.stride()[:2], *value_means.stride()[:2],
        *slopes.stride()[:2],
        GROUP=group, WIDTH=max(8, triton.next_power_of_2(group)), HEAD_DIM=head_dim, NUM_BYTES=num_bytes,
        BYTES=max(16, triton.next_power_of_2(num_bytes)), WORD_BYTES=words.element_size(), SAMPLES=NUM_SAMPLES,
        TILE=TILE, STAGES=STAGES if head_dim <= WIDE else WIDE_STAGES, IS_PLAIN=is_interpreted(),
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return rest

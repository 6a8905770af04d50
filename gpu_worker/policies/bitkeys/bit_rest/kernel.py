"""What stands in for unselected candidates, in Triton: one launch, a program for each (lane, KV head).

It reads no more than 512 codes and scales of a head, the head's covariances, 2 d d bytes, and of the selected
positions what a binary search for each sample touches.
"""

from __future__ import annotations

import triton
from torch import Tensor

from gpu_worker.kernels.attention import Rest
from gpu_worker.kernels.attention.kernel import is_interpreted
from gpu_worker.policies.bitkeys.bit_rest.programs import sum_up_rest
from gpu_worker.policies.bitkeys.bit_rest.reference import NUM_SAMPLES

# Coordinates of a key whose covariances are read at a time.
ROWS = 32


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
    sum_up_rest[(batch * num_kv_heads,)](
        query.contiguous(), rotation, codes, scales, means, value_means, slopes, seats.contiguous(),
        begin.contiguous(), end.contiguous(), selected.contiguous(), rest.values, rest.log_weights,
        num_kv_heads, selected.shape[2], selected.shape[2].bit_length(), scale,
        *codes.stride()[:2], *scales.stride()[:2], *means.stride()[:2], *value_means.stride()[:2],
        *slopes.stride()[:2],
        GROUP=group, WIDTH=max(16, triton.next_power_of_2(group)), HEAD_DIM=head_dim,
        DIMS=max(ROWS, triton.next_power_of_2(head_dim)), ROWS=ROWS, NUM_BYTES=num_bytes,
        BYTES=max(16, triton.next_power_of_2(num_bytes)), SAMPLES=NUM_SAMPLES, IS_PLAIN=is_interpreted(),
        num_warps=8,
    )  # fmt: skip
    return rest

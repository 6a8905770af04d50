"""The definition of selection by keys at two bits a coordinate, in float32 PyTorch."""

from __future__ import annotations

from torch import Tensor

from gpu_worker.kernels.top_k.reference import top_k
from gpu_worker.policies.bitkeys.bit_score.reference import bit_score, levels


def bit_select(
    query: Tensor,
    rotation: Tensor,
    codes: Tensor,
    scales: Tensor,
    sinks: Tensor,
    seats: Tensor,
    begin: Tensor,
    end: Tensor,
    counts: Tensor,
    width: int,
    num_positions: int,
    scale: float,
) -> Tensor:
    """Positions of the best `counts[b]` candidates of every head, ascending; -1 pads at the end.

    The best by the level of their `bit_score`, which has other arguments of these names: weights that differ by less
    than one part in 8 may tie, and a tie goes to the higher position. counts: int64 [B], none above `width`.
    Returns int64 [B, H_kv, width].
    """
    weights = bit_score(query, rotation, codes, scales, sinks, seats, begin, end, scale, num_positions)
    return top_k(levels(weights, counts, query.shape[1] // codes.shape[1]), counts, width)

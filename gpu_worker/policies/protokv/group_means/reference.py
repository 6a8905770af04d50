"""The definition of votes averaged over groups, in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

# Most votes of a head, the window's length, and bits of a fraction of one: their sum as an integer is 2^62 at most.
MAX_VOTES = 1 << 14
VOTE_BITS = 48


def group_means(votes: Tensor, labels: Tensor, num_groups: int) -> Tensor:
    """Every token's vote becomes the mean of its group's: float32 [H, n]. votes: float32 [H, n], the sum of a head at
    most MAX_VOTES. labels: int32 or int64 [H, n], from 0 to num_groups - 1."""
    labels = labels.long()
    # Integers: their sum does not depend on the order, so that the same votes always give the same means.
    fixed = (votes * 2.0**VOTE_BITS).long()
    sums = torch.zeros(votes.shape[0], num_groups, dtype=torch.int64, device=votes.device)
    counts = torch.zeros_like(sums)
    sums.scatter_add_(1, labels, fixed)
    counts.scatter_add_(1, labels, torch.ones_like(labels))
    return (sums.float() / counts.clamp(min=1) * 2.0**-VOTE_BITS).gather(1, labels)

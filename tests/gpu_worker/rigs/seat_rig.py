"""Index tensors as an engine holds them: a layer of many, its sequences at seats in any order, others beside them."""

from __future__ import annotations

import torch
from torch import Tensor


def seats_of(batch: int, device: torch.device) -> Tensor:
    """Seats of a batch among `batch + 2`, in no order."""
    return torch.randperm(batch + 2, generator=torch.Generator().manual_seed(batch))[:batch].to(device)


def seated(tensor: Tensor, seats: Tensor, poison: float) -> Tensor:
    """One layer [seats, ...] of an index in which `tensor` [B, ...] lies at its seats, and poison everywhere else."""
    index = tensor.new_full((len(seats) + 2, 3, *tensor.shape[1:]), poison)
    index[seats, 1] = tensor
    return index[:, 1]


def at_seats(tensor: Tensor, seats: Tensor, poison: float) -> Tensor:
    """An index of one layer alone: `tensor` [B, ...] at its seats, poison at the others."""
    index = tensor.new_full((len(seats) + 2, *tensor.shape[1:]), poison)
    index[seats] = tensor
    return index

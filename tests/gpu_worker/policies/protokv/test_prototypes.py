"""Prototypes: the nearest of them, by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.policies.protokv.chunks import chunk_sums
from gpu_worker.policies.protokv.policy import nearest_prototype


def random_keys(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def axis(index: int, dim: int = 4) -> Tensor:
    return torch.eye(dim)[index]


def test_two_groups_that_lie_far_apart_cluster_as_constructed() -> None:
    """The first chunk is all of one kind, the second of the other; strays go to their own kind, wherever they are."""
    kinds = torch.tensor([0] * 9 + [1] * 10 + [0, 0])
    keys = 10 * torch.eye(4)[kinds] + 0.5 * random_keys(21, 4)
    kinds[3], keys[3] = 1, keys[12]
    heads = torch.stack([keys, -keys])
    labels = nearest_prototype(heads, chunk_sums(heads, num_chunks=2))
    assert labels.tolist() == [kinds.tolist()] * 2


def test_an_empty_group_never_wins() -> None:
    """Its cosine of 0 is higher than that with every other prototype."""
    sums = torch.stack([-axis(0), torch.zeros(4), -3 * axis(1), torch.zeros(4)])[None]
    keys = torch.stack([axis(0) + 2 * axis(1), 2 * axis(0) + axis(1)])[None]
    assert nearest_prototype(keys, sums).tolist() == [[0, 2]]


def test_a_prototypes_length_does_not_matter() -> None:
    sums = torch.stack([axis(0), 100 * (axis(0) + axis(1))])[None]
    keys = torch.stack([axis(0), 0.01 * axis(0), axis(0) + axis(1)])[None]
    assert nearest_prototype(keys, sums).tolist() == [[0, 0, 1]]

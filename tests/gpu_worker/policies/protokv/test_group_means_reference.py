"""Means of groups by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.policies.protokv.group_means import group_means


def random_keys(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_group_means_by_hand() -> None:
    votes = torch.tensor([[1.0, 2, 6, 0.5], [4, 3, 2, 1]])
    labels = torch.tensor([[0, 2, 0, 2], [1, 1, 1, 0]])
    means = group_means(votes, labels, num_groups=3)
    torch.testing.assert_close(means, torch.tensor([[3.5, 1.25, 3.5, 1.25], [3, 3, 3, 1]]))


def test_group_means_do_not_depend_on_the_order_of_tokens() -> None:
    votes = random_keys(1, 5000).softmax(dim=1)
    labels = torch.arange(5000)[None] % 7
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(0))
    means = group_means(votes, labels, 7)
    assert torch.equal(group_means(votes[:, order], labels[:, order], 7), means[:, order])
    expected = torch.stack([votes[labels == group].double().mean() for group in range(7)])
    torch.testing.assert_close(means[0, :7].double(), expected, rtol=1e-6, atol=0)


def test_small_votes_keep_their_mean() -> None:
    votes = torch.full((1, 10), 3e-9)
    means = group_means(votes, torch.zeros(1, 10, dtype=torch.int64), 1)
    torch.testing.assert_close(means, votes, rtol=1e-5, atol=0)

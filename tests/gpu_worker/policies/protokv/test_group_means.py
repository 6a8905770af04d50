"""Means of groups: the kernel equals its reference to the bit, and both are what plain means are."""

from __future__ import annotations

import math

import pytest
import torch

from gpu_worker.policies.protokv.group_means import reference

kernel = pytest.importorskip("gpu_worker.policies.protokv.group_means.kernel")


def test_group_means_by_hand(device: torch.device) -> None:
    votes = torch.tensor([[1.0, 2, 6, 0.5], [4, 3, 2, 1]], device=device)
    labels = torch.tensor([[0, 2, 0, 2], [1, 1, 1, 0]], device=device)
    for module in kernel, reference:
        means = module.group_means(votes, labels, 3)
        torch.testing.assert_close(means.tolist(), [[3.5, 1.25, 3.5, 1.25], [3.0, 3.0, 3.0, 1.0]])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("num_heads", "num_tokens", "num_groups"),
    [(1, 1, 1), (3, 64, 64), (2, 65, 7), (8, 700, 37), (1, 300, 671)],
)
def test_means_are_those_of_the_reference(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    num_heads: int,
    num_tokens: int,
    num_groups: int,
    dtype: torch.dtype,
) -> None:
    """Of a part of longer rows; beyond it votes are NaN and labels out of range."""
    monkeypatch.setattr(kernel, "TILE", 64)
    generator = torch.Generator().manual_seed(num_tokens)
    votes = torch.full((num_heads, num_tokens + 5), math.nan)
    votes[:, :num_tokens] = (3 * torch.randn(num_heads, num_tokens, generator=generator)).softmax(1)
    labels = torch.full((num_heads, num_tokens + 3), 1 << 30, dtype=dtype)
    labels[:, :num_tokens] = torch.randint(0, num_groups, (num_heads, num_tokens), generator=generator)
    given = votes.to(device)[:, :num_tokens], labels.to(device)[:, :num_tokens], num_groups
    means = kernel.group_means(*given)
    assert torch.equal(means, reference.group_means(*given))
    # In whatever order they are summed.
    order = torch.randperm(num_tokens, generator=generator).to(device)
    shuffled = given[0][:, order], given[1][:, order], num_groups
    for module in kernel, reference:
        assert torch.equal(module.group_means(*shuffled), means[:, order])


def test_large_and_small_votes(device: torch.device) -> None:
    votes = torch.tensor([[16000.0, 3e-9, 3e-9, 300, 0, 1e-30]], device=device)
    labels = torch.tensor([[0, 1, 1, 0, 2, 2]], device=device)
    for module in kernel, reference:
        means = module.group_means(votes, labels, 4)
        assert means[0, 0] == 8150
        torch.testing.assert_close(means[0, 1:3], votes[0, 1:3], rtol=1e-5, atol=0)


def test_nothing_is_no_error(device: torch.device) -> None:
    votes = torch.zeros(0, 7, device=device)
    assert kernel.group_means(votes, votes.int(), 3).shape == (0, 7)

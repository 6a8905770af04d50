"""Means of groups are the same to the bit, in whatever order votes are added."""

from __future__ import annotations

import pytest
import torch
from operations.groups import votes

from gpu_worker.policies.protokv.group_means import reference

kernel = pytest.importorskip("gpu_worker.policies.protokv.group_means.kernel")


@pytest.mark.parametrize("size", [(2, 65, 7), (8, 700, 37), (1, 300, 671)])
def test_means_are_the_same_to_the_bit(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int, int]
) -> None:
    monkeypatch.setattr(kernel, "TILE", 64)
    given = votes(*size, torch.int32)
    shares, labels, num_groups = given["votes"].to(device), given["labels"].to(device), given["num_groups"]
    means = kernel.group_means(shares, labels, num_groups)
    assert torch.equal(means, reference.group_means(shares, labels, num_groups))
    order = torch.randperm(size[1], generator=torch.Generator().manual_seed(0)).to(device)
    for module in kernel, reference:
        shuffled = module.group_means(shares[:, order], labels[:, order], num_groups)
        assert torch.equal(shuffled, means[:, order])

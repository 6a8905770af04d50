"""Selections by pairs of codes where products are extreme, or many. All else is in the table of kernels."""

from __future__ import annotations

import pytest
import torch
from kernel_contract import on_device
from operations.selection import pairs

kernel = pytest.importorskip("gpu_worker.policies.pqcache.pq_select.kernel")


@pytest.mark.parametrize("scale", [0.0, 40.0])
def test_a_bound_of_the_largest_score_would_make_every_weight_vanish(
    device: torch.device, scale: float
) -> None:
    """The codes of the largest products never meet. Sums: -0.5, -1.25, -0.1, -0.2."""
    arguments = pairs(((0, 4),), (2,), 4, 1, (64, 2), scale=scale)
    arguments["query"][:] = torch.tensor([1.0, 0, 1, 0])
    arguments["codebooks"][:] = 0
    arguments["codebooks"][:, :, 0, :4, 0] = torch.tensor([1000.0, 999, -1000, -1001])
    arguments["codebooks"][:, :, 1, :4, 0] = torch.tensor([-1000.5, -1000.25, 999.9, 1000.8])
    codes = torch.tensor([[0, 0], [1, 1], [2, 2], [3, 3]])
    arguments["codes"][:] = codes.to(torch.uint8)
    arguments["pair_counts"][:] = 0
    arguments["pair_counts"][..., codes[:, 0] * 65] = 1
    assert kernel.pq_select(**on_device(arguments, device))[0].tolist() == [[2, 3]] * 2


def test_many_candidates_and_pairs_take_two_words() -> None:
    assert [kernel.count_bits(n, 64**2) for n in (2**18 - 1, 2**18)] == [18, 32]

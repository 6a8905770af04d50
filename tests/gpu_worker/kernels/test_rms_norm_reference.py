"""Sum and norms of rows against the formula in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpu_worker.kernels.rms_norm import add_normed, rms_norm

EPS = 1e-3


def normed_row(row: list[float], weight: list[float]) -> list[float]:
    root = (sum(x * x for x in row) / len(row) + EPS) ** 0.5
    return [x / root * w for x, w in zip(row, weight, strict=True)]


def norm(rows: Tensor, weight: Tensor) -> Tensor:
    return torch.tensor([normed_row(row, weight.tolist()) for row in rows.tolist()])


@pytest.mark.parametrize("norms_added", [False, True])
def test_the_sum_is_normed(norms_added: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, added = torch.randn(2, 3, 7, generator=generator)
    weight, added_weight = torch.randn(2, 7, generator=generator)
    before = hidden.clone(), added.clone()
    summed, normed = rms_norm(hidden, weight, EPS, added, added_weight if norms_added else None)
    expected = hidden + (norm(added, added_weight) if norms_added else added)
    torch.testing.assert_close(summed, expected)
    torch.testing.assert_close(normed, norm(expected, weight))
    if norms_added:
        assert torch.equal(add_normed(hidden, added, added_weight, EPS), summed)
    assert torch.equal(hidden, before[0])
    assert torch.equal(added, before[1])


def test_without_an_addend_hidden_is_the_sum() -> None:
    hidden, weight = torch.randn(3, 7), torch.randn(7)
    summed, normed = rms_norm(hidden, weight, EPS)
    assert summed is hidden
    torch.testing.assert_close(normed, norm(hidden, weight))


def test_16_bit_squares_are_summed_in_float32() -> None:
    hidden = torch.full((1, 4096), 300.0, dtype=torch.float16)
    normed = rms_norm(hidden, torch.ones(4096, dtype=torch.float16), 0.0)[1]
    assert torch.equal(normed, torch.ones_like(hidden))

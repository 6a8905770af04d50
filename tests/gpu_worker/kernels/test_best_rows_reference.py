"""The definition of the best rows against sorting tuples."""

from __future__ import annotations

import math

import pytest
import torch

from gpu_worker.kernels.best_rows import best_rows


@pytest.mark.parametrize("has_second", [False, True])
@pytest.mark.parametrize("width", [1, 9, 40])
def test_best_by_first_then_second_then_the_higher_row(has_second: bool, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    first = torch.randint(-2, 3, (4, 30), generator=generator).float()
    second = torch.randint(-2, 3, (4, 30), generator=generator).float() if has_second else None
    first[1, ::3] = -math.inf
    counts = torch.tensor([width, width, 0, 1])
    taken = best_rows(first, counts, width, second)
    for head in range(4):
        ties = first[head] if second is None else second[head]
        rows = [row for row in range(30) if first[head, row] > -math.inf]
        rows.sort(key=lambda row: (first[head, row].item(), ties[row].item(), row), reverse=True)
        expected = sorted(rows[: counts[head]])
        assert taken[head].tolist() == expected + [-1] * (width - len(expected))


def test_nan_is_never_taken_and_last_among_ties() -> None:
    nan = math.nan
    first, second = torch.tensor([[nan, 1.0, 1.0, -math.inf]]), torch.tensor([[5.0, 2.0, nan, 1.0]])
    assert best_rows(first, torch.tensor([4]), 4).tolist() == [[1, 2, -1, -1]]
    assert best_rows(first, torch.tensor([1]), 1, second).tolist() == [[1]]


def test_no_more_than_the_width_is_taken() -> None:
    assert best_rows(torch.arange(5.0)[None], torch.tensor([4]), 2).tolist() == [[3, 4]]
    assert best_rows(torch.zeros(2, 0), torch.tensor([0, 3]), 2).tolist() == [[-1, -1], [-1, -1]]
    assert best_rows(torch.zeros(2, 3), torch.tensor([1, 1]), 0).shape == (2, 0)

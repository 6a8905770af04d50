"""Selection by score against sorting in plain Python."""

from __future__ import annotations

import pytest
import torch

from gpu_worker.kernels.top_k import top_k

MINUS_INF = float("-inf")


def best(scores: list[float], count: int) -> list[int]:
    candidates = [position for position, score in enumerate(scores) if score > MINUS_INF]
    ranked = sorted(candidates, key=lambda position: (-scores[position], -position))
    return sorted(ranked[:count])


@pytest.mark.parametrize("num_values", [2, 5, 1000])
@pytest.mark.parametrize("counts", [[3, 3, 3], [1, 40, 7], [0, 5, 0], [50, 60, 12], [0, 0, 0]])
def test_selection_is_that_of_a_sort(num_values: int, counts: list[int]) -> None:
    generator = torch.Generator().manual_seed(num_values)
    scores = torch.randint(0, num_values, (3, 2, 50), generator=generator) - num_values / 2
    scores[torch.rand(3, 2, 50, generator=generator) < 0.3] = MINUS_INF
    taken = top_k(scores, torch.tensor(counts))
    assert taken.shape == (3, 2, max(counts))
    assert taken.dtype == torch.int64
    for b in range(3):
        for head in range(2):
            expected = best(scores[b, head].tolist(), counts[b])
            assert taken[b, head].tolist() == expected + [-1] * (max(counts) - len(expected))


def test_of_equals_the_higher_position_wins() -> None:
    scores = torch.tensor([[[1.0, 2.0, 1.0, 1.0, 0.0]]])
    assert top_k(scores, torch.tensor([3])).tolist() == [[[1, 2, 3]]]


def test_fewer_candidates_than_asked_for_are_padded() -> None:
    scores = torch.tensor([[[MINUS_INF, 0.5, MINUS_INF], [MINUS_INF] * 3]])
    assert top_k(scores, torch.tensor([2])).tolist() == [[[1, -1], [-1, -1]]]
    assert top_k(scores, torch.tensor([5])).tolist() == [[[1, -1, -1, -1, -1], [-1] * 5]]


def test_extreme_scores_are_kept_apart() -> None:
    least = torch.finfo(torch.float32).min
    scores = torch.tensor([[[least, MINUS_INF, 1e38, -0.0, 0.0, float("inf")]]])
    assert top_k(scores, torch.tensor([2])).tolist() == [[[2, 5]]]
    # -0.0 and 0.0 are equal: the higher position is taken.
    assert top_k(scores, torch.tensor([3])).tolist() == [[[2, 4, 5]]]
    assert top_k(scores, torch.tensor([6])).tolist() == [[[0, 2, 3, 4, 5, -1]]]

"""The tokens that every scoring policy keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gpu_worker.policies.base import Plan
from gpu_worker.policies.retain import LayerRows
from gpu_worker.policies.scored import Scores, keep_best

PLAN = Plan(12, 7, num_sink=2, num_recent=3, num_selected=2)
NEVER = float("-inf")


def prompt(num_heads: int = 2) -> LayerRows:
    rows = torch.arange(12.0).expand(num_heads, -1)[..., None].repeat(1, 1, 8)
    return LayerRows.of_prompt(0, 1, rows, torch.empty(num_heads, 0, 4), 1.0)


def test_sinks_window_and_the_best_between_by_either_score() -> None:
    first = torch.tensor([[9.0, 9, 0, 5, 0, 0, 5, 0, 5, 9, 9, 9], [0.0, 0, 3, 1, 0, 0, 2, 0, 0, 0, 0, 0]])
    second = torch.zeros(2, 12)
    second[0, 3] = 1
    retained = keep_best(prompt(), PLAN, Scores(first, second))
    assert retained.positions.tolist() == [[0, 1, 3, 8, 9, 10, 11], [0, 1, 2, 6, 9, 10, 11]]
    assert torch.equal(retained.keys[..., 0].long(), retained.positions)
    assert retained.counts_on_host() == [7, 7]


def test_heads_of_unequal_numbers_are_padded() -> None:
    retained = keep_best(prompt(), PLAN, Scores(torch.arange(12.0).expand(2, -1)), torch.tensor([1, 3]))
    assert retained.positions.tolist() == [[0, 1, 8, 9, 10, 11, -1, -1], [0, 1, 6, 7, 8, 9, 10, 11]]
    assert retained.counts_on_host() == [6, 8]


@pytest.mark.parametrize("bad", [float("nan"), NEVER])
def test_as_many_are_kept_where_a_model_overflows(bad: float) -> None:
    retained = keep_best(prompt(), PLAN, Scores(torch.full((2, 12), bad)))
    assert retained.positions.tolist() == [[0, 1, 7, 8, 9, 10, 11]] * 2


@pytest.mark.parametrize("is_even", [True, False])
def test_the_window_is_whole_where_a_budget_is_too_small_for_it(is_even: bool) -> None:
    plan = PLAN.of_layer(4)
    retained = keep_best(replace(prompt(), is_even=is_even), plan, Scores(torch.arange(12.0).expand(2, -1)))
    assert retained.positions.tolist() == [[0, 1, 9, 10, 11]] * 2


def test_padding_is_never_kept() -> None:
    rows = prompt()
    rows = replace(rows, positions=rows.positions.clone(), is_even=False)
    rows.positions[1, 10:] = -1
    plan = replace(PLAN, num_recent=0, num_selected=5)
    retained = keep_best(replace(rows, num_tokens=12), plan, Scores(torch.arange(12.0).expand(2, -1)))
    assert retained.positions.tolist() == [[0, 1, 7, 8, 9, 10, 11], [0, 1, 5, 6, 7, 8, 9]]
    assert not retained.is_even

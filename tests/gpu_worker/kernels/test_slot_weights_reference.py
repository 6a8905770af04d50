"""A decode step's attention weights, by hand."""

from __future__ import annotations

import math

import torch

from gpu_worker.kernels.slot_weights import slot_weights


def test_the_mean_over_a_group_of_softmax_weights() -> None:
    pool = torch.full((128, 4), float("nan"))
    # Block 1 holds the head's slots; its keys are (0, 0), (1, 0) and what is not filled.
    pool[64:66, :2] = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    query = torch.tensor([[[math.log(3.0) / 0.5, 0.0], [0.0, 9.0]]])
    tables, seats, lengths = torch.tensor([[[7]], [[1]]]), torch.tensor([1]), torch.tensor([[2]])
    weights = slot_weights(query, pool, tables, seats, lengths, 0.5, 4)
    # 1 : 3 for the first query head, 1 : 1 for the second.
    torch.testing.assert_close(weights, torch.tensor([[[0.375, 0.625, 0.0, 0.0]]]))


def test_an_empty_head_weighs_nothing() -> None:
    pool = torch.full((64, 4), float("nan"))
    args = torch.ones(1, 1, 2), pool, torch.tensor([[[0]]]), torch.tensor([0]), torch.tensor([[0]])
    assert slot_weights(*args, 1.0, 3).tolist() == [[[0.0, 0.0, 0.0]]]


def test_what_a_table_has_no_block_for_weighs_nothing() -> None:
    pool = torch.ones(64, 4)
    args = torch.ones(1, 1, 2), pool, torch.tensor([[[0]]]), torch.tensor([0]), torch.tensor([[2]])
    weights = slot_weights(*args, 1.0, 130)
    assert weights[0, 0, :2].tolist() == [0.5, 0.5]
    assert not weights[0, 0, 2:].any()

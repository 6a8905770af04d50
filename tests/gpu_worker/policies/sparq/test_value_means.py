"""Sums of values by seat: what enters them, and what does not."""

from __future__ import annotations

import torch

from gpu_worker.policies.base import CacheShape
from gpu_worker.policies.sparq.value_means import ValueMeans, mixed

SHAPE = CacheShape(4, 2, 2, 3, 8, 512, 1.0, torch.device("cpu"))


def test_prompt_and_decoded_values_are_in_the_mean_and_padding_is_not() -> None:
    means, values = ValueMeans(SHAPE), torch.randn(2, 2, 12, 8)
    for layer in range(2):
        means.fill(1, layer, values[layer, :, :10])
        means.fill(3, layer, 100 + values[layer, :, :5])
    seats = torch.tensor([1, 0, 0])
    for position in (10, 11):
        new = torch.stack([values[1, :, position], *torch.full((2, 2, 8), float("nan"))])
        found = means.take_in(seats, 1, torch.tensor([position, -1, -1]), new)
        torch.testing.assert_close(found[0], values[1, :, : position + 1].mean(1))
    # Seat 3 is as it was, the padding's seat too.
    other = means.take_in(torch.tensor([3]), 1, torch.tensor([5]), 100 + values[1, None, :, 5])
    torch.testing.assert_close(other[0], 100 + values[1, :, :6].mean(1))
    means.fill(0, 1, values[1, :, :3])
    fresh = means.take_in(torch.tensor([0]), 1, torch.tensor([3]), values[1, None, :, 3])
    torch.testing.assert_close(fresh[0], values[1, :, :4].mean(1))


def test_a_step_that_is_taken_again_adds_nothing() -> None:
    means, values = ValueMeans(SHAPE), torch.randn(2, 6, 8)
    means.fill(2, 0, values[:, :5])
    for _again in range(2):
        found = means.take_in(torch.tensor([2]), 0, torch.tensor([5]), values[None, :, 5])
        torch.testing.assert_close(found[0], values.mean(1))


def test_each_query_head_mixes_by_its_own_share() -> None:
    attended, means = torch.randn(2, 6, 8), torch.randn(2, 2, 8)
    share = torch.rand(2, 6)
    share[0, :2] = torch.tensor([0.0, 1.0])
    found = mixed(attended, means, share)
    torch.testing.assert_close(found[0, 0], attended[0, 0])
    torch.testing.assert_close(found[0, 1], means[0, 0])
    torch.testing.assert_close(found[1, 5], (1 - share[1, 5]) * attended[1, 5] + share[1, 5] * means[1, 1])

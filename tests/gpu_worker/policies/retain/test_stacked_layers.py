"""Layers that are compressed at once keep what they keep one by one."""

from __future__ import annotations

import pytest
import torch

from gpu_worker.policies import Chelsea
from gpu_worker.policies.retain import LayerRows, Retained
from gpu_worker.policies.retain.stacked import split, stacked


def layer_rows(layer: int, with_more: bool) -> LayerRows:
    generator = torch.Generator().manual_seed(layer)
    rows = torch.randn(2, 120, 16, generator=generator)
    queries = torch.randn(4, 0, 8)
    prompt = LayerRows.of_prompt(layer, 3, rows, queries, 0.3)
    if not with_more:
        return prompt
    degrees, scores = torch.randint(1, 5, (2, 2, 120), generator=generator).float()
    history = torch.rand(2, 120, 4, generator=generator)
    return LayerRows(
        layer,
        3,
        130,
        prompt.keys,
        prompt.values,
        prompt.positions,
        queries,
        0.3,
        0,
        degrees,
        scores,
        history,
        2,
    )


@pytest.mark.parametrize("with_more", [False, True])
def test_chelsea_keeps_the_same_of_each_layer(with_more: bool) -> None:
    policy = Chelsea(num_sink=4, num_recent=8, chunk=16)
    plan = policy.plan(120, 40)
    layers = [layer_rows(layer, with_more) for layer in range(3)]
    together = split(policy.compress(stacked(layers), plan, 40), 3)
    for alone, found in zip((policy.compress(rows, plan, 40) for rows in layers), together, strict=True):
        assert torch.equal(found.positions, alone.positions)
        torch.testing.assert_close(found.keys, alone.keys)
        torch.testing.assert_close(found.values, alone.values)
        assert torch.equal(found.degrees, alone.degrees)
        assert found.rounds == alone.rounds


@pytest.mark.parametrize("with_more", [False, True])
def test_what_is_stacked_comes_apart_as_it_was(with_more: bool) -> None:
    layers = [layer_rows(layer, with_more) for layer in range(3)]
    index = torch.arange(120).expand(6, -1)
    one = stacked(layers)
    assert one.keys.shape[0] == 6
    for rows, found in zip(layers, split(Retained.of(one, index, one.scores), 3), strict=True):
        assert torch.equal(found.keys, rows.keys)
        assert torch.equal(found.positions, rows.positions)
        for name in ("degrees", "scores", "history"):
            mine, theirs = getattr(found, name), getattr(rows, name)
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.equal(mine, theirs)

"""Layers that are compressed at once, as one layer of more heads, keep what they keep one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gpu_worker.policies.chelsea.policy import Chelsea
from gpu_worker.policies.retain import LayerRows

NUM_HEADS = 2


def layer_rows(layer: int, with_more: bool) -> LayerRows:
    generator = torch.Generator().manual_seed(layer)
    rows = torch.randn(NUM_HEADS, 120, 16, generator=generator)
    prompt = LayerRows.of_prompt(layer, 3, rows, torch.randn(4, 0, 8), 0.3)
    if not with_more:
        return prompt
    degrees = torch.randint(1, 5, (NUM_HEADS, 120), generator=generator).float()
    return replace(prompt, num_tokens=130, notes=degrees.log(), rounds=2)


@pytest.mark.parametrize("with_more", [False, True])
def test_chelsea_keeps_the_same_of_each_layer(with_more: bool) -> None:
    policy = Chelsea(num_sink=4, num_recent=8, chunk=16)
    plan = policy.plan(120, 40)
    layers = [layer_rows(layer, with_more) for layer in range(3)]
    stacked = replace(
        layers[0],
        keys=torch.cat([rows.keys for rows in layers]),
        values=torch.cat([rows.values for rows in layers]),
        positions=torch.cat([rows.positions for rows in layers]),
        queries=torch.cat([rows.queries for rows in layers]),
        notes=torch.cat([rows.notes for rows in layers if rows.notes is not None]) if with_more else None,
    )
    together = policy.compress(stacked, plan, 40)
    for layer, alone in enumerate(policy.compress(rows, plan, 40) for rows in layers):
        heads = slice(layer * NUM_HEADS, (layer + 1) * NUM_HEADS)
        assert torch.equal(together.positions[heads], alone.positions)
        torch.testing.assert_close(together.keys[heads], alone.keys)
        torch.testing.assert_close(together.values[heads], alone.values)
        assert together.notes is not None
        assert alone.notes is not None
        assert torch.equal(together.notes[heads], alone.notes)
        assert together.rounds == alone.rounds


@pytest.mark.parametrize("is_even", [False, True])
def test_who_says_that_nothing_is_padded_has_as_many_rows_as_it_says(is_even: bool) -> None:
    policy = Chelsea(num_sink=4, num_recent=8, chunk=16)
    rows = replace(layer_rows(0, with_more=True), is_even=is_even)
    retained = policy.compress(rows, policy.plan(120, 40), 40)
    assert retained.is_even == is_even
    assert retained.counts_on_host() == retained.counts.tolist() == [40] * NUM_HEADS

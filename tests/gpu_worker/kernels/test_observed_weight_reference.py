"""Observed weights, by hand and by their definition, query by query."""

from __future__ import annotations

import math

import pytest
import torch

from gpu_worker.kernels.observed_weight import observed_weight
from gpu_worker.kernels.observed_weight import reference as definition


def test_shares_of_softmax_weights_by_hand() -> None:
    keys = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [9.0, 9.0]]])
    queries = torch.tensor([[[math.log(3.0) / 0.5, 0.0]], [[5.0, 5.0]]])
    positions, shares = torch.tensor([[1], [0]]), torch.tensor([[0.5], [2.0]])
    # 1 : 3 over two tokens for the first query head; the second sees one token.
    observed = observed_weight(queries, keys, positions, shares, 0.5)
    torch.testing.assert_close(observed, torch.tensor([[0.125 + 2.0, 0.375, 0.0]]))


@pytest.mark.parametrize("max_weights", [1, 200, 1 << 26])
@pytest.mark.parametrize("group", [1, 3, 4])
def test_any_number_of_queries_at_a_time(group: int, max_weights: int) -> None:
    generator = torch.Generator().manual_seed(group)
    num_heads, width, num_tokens = 2 * group, 9, 21
    queries = torch.randn(num_heads, width, 8, generator=generator)
    keys = torch.randn(2, num_tokens, 8, generator=generator)
    positions = torch.randint(-1, num_tokens, (num_heads, width), generator=generator)
    positions[0], positions[-1, -1] = -1, num_tokens - 1
    shares = torch.rand(num_heads, width, generator=generator)
    expected = torch.zeros(2, num_tokens, dtype=torch.float64)
    for head in range(num_heads):
        for query, last, share in zip(queries[head], positions[head].tolist(), shares[head], strict=True):
            seen = keys[head // group, : last + 1].double()
            expected[head // group, : last + 1] += share * (seen @ query.double() * 0.3).softmax(dim=0)
    queries[positions < 0] = math.nan
    shares[positions < 0] = math.nan
    observed = definition.observed_weight(queries, keys, positions, shares, 0.3, max_weights)
    torch.testing.assert_close(observed.double(), expected, atol=1e-6, rtol=1e-5)


def test_no_queries_observe_nothing() -> None:
    nothing = torch.zeros(4, 0)
    observed = observed_weight(torch.ones(4, 0, 8), torch.ones(2, 5, 8), nothing.long(), nothing, 1.0)
    assert torch.equal(observed, torch.zeros(2, 5))

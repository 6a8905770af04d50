"""The added coordinate that turns the largest inner product into the nearest by L2."""

from __future__ import annotations

import torch

from gpu_worker.policies.pqcache.pq_score import augment, max_square_norms


def test_parts_get_what_their_squares_leave_of_the_largest() -> None:
    keys = torch.tensor([[3.0, 4.0, 0.0, 1.0], [0.0, 1.0, 2.0, 0.0], [5.0, 0.0, 0.0, 0.0]])
    norms = max_square_norms(keys, 2)
    assert norms.tolist() == [25.0, 4.0]
    expected = [
        [3.0, 4.0, 0.0, 0.0, 1.0, 3**0.5],
        [0.0, 1.0, 24**0.5, 2.0, 0.0, 0.0],
        [5.0, 0.0, 0.0, 0.0, 0.0, 2.0],
    ]
    torch.testing.assert_close(augment(keys, norms), torch.tensor(expected))


def test_a_part_longer_than_all_that_were_fitted_gets_zero() -> None:
    assert augment(torch.tensor([3.0, 4.0]), torch.tensor([9.0])).tolist() == [3.0, 4.0, 0.0]


def test_the_nearest_to_a_query_are_those_of_the_largest_product() -> None:
    generator = torch.Generator().manual_seed(0)
    keys, query = torch.randn(50, 6, generator=generator), torch.randn(6, generator=generator)
    augmented = augment(keys, max_square_norms(keys, 1))
    distances = (augmented - torch.cat([query, torch.zeros(1)])).norm(dim=-1)
    assert distances.argsort().tolist() == (keys @ query).argsort(descending=True).tolist()
    # by L2 of the keys as they are it is another order
    assert (keys - query).norm(dim=-1).argsort().tolist() != distances.argsort().tolist()

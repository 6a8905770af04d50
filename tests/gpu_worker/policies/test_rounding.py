"""Numbers cut to a few bits, by which ties are seen in spite of rounding."""

from __future__ import annotations

import torch

from gpu_worker.policies.rounding import rounded


def test_a_number_keeps_its_first_bits_at_any_size() -> None:
    sizes = torch.tensor([0.0, 1e-20, 3e-5, 0.7, 1.0, 123.4, 5e9, -77.7])
    found = rounded(sizes)
    assert ((found - sizes).abs() <= sizes.abs() * 2**-10).all()
    assert torch.equal(rounded(found), found)
    assert torch.equal(rounded(torch.tensor([1 + 2**-10, 1 + 2**-9])), torch.tensor([1.0, 1 + 2**-9]))


def test_what_differs_by_less_than_the_step_is_mostly_equal() -> None:
    values = torch.rand(2000, generator=torch.Generator().manual_seed(0)) + 0.5
    near = rounded(values * (1 + 1e-6))
    assert (near == rounded(values)).float().mean() > 0.99

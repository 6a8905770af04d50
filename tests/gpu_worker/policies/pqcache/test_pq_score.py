"""Scores by product-quantised keys where products are extreme. All else is in the table of kernels."""

from __future__ import annotations

import pytest
import torch
from kernel_contract import on_device
from operations.products import coded_keys

from gpu_worker.policies.pqcache.pq_score import reference

kernel = pytest.importorskip("gpu_worker.policies.pqcache.pq_score.kernel")


def test_scores_far_apart_neither_overflow_nor_vanish(device: torch.device) -> None:
    """Compare kernel and reference: rounding of large products is too coarse to compare them with exact ones."""
    arguments = on_device(coded_keys(4, 300, ((1, 290),), scale=40.0), device)
    query, books, codes = (arguments[name] for name in ("query", "codebooks", "codes"))

    def check_alike() -> None:
        expected = reference.pq_score(**arguments)
        assert expected[..., 1:290].isfinite().all()
        torch.testing.assert_close(kernel.pq_score(**arguments), expected, atol=1e-6, rtol=1e-4)

    check_alike()
    # One part so large that every exponential would underflow without the largest score of the candidates.
    arguments["scale"] = 1.0
    books[:, :, 0, 5] = 1000 * query[:, ::4, :32]
    codes[:, :, 1:290, 0] %= 3
    check_alike()
    # All of them so small that a 0 among the largest scores would make every exponential vanish.
    arguments["scale"] = 0.3
    books[:] = -30 * query[:, ::4].sign().view(1, 3, 2, 1, 32)
    arguments["query"] = query[:, ::4].contiguous()
    check_alike()
